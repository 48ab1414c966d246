"""NVFP4 weights: the numbers of codes and scales, rounding to them, and experts of a released file.

tests/data/fourbit has what NVIDIA's ModelOpt and compressed-tensors make of one tensor, and outputs of transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from blockdiff.kernels import IN_C
from blockdiff.kernels.nvfp4 import Nvfp4
from blockdiff.kernels.nvfp4.matrix import _codes
from tests.oracles import nvfp4 as reference
from tests.support.closeness import relative_error

pytestmark = pytest.mark.quick
GOLDEN = Path(__file__).parents[1] / "data" / "fourbit"


def in_nvfp4(*shape: int, seed: int = 0) -> Nvfp4:
    return Nvfp4.nearest(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def in_file(weight: str) -> Nvfp4:
    """The experts of layer 0 of the tiny checkpoint of ModelOpt: gate over up, one expert beside the other."""
    stored: dict[str, Tensor] = {}
    for file in (GOLDEN / "tiny_modelopt").glob("model-*.safetensors"):
        stored |= load_file(file)
    names = ("gate_proj", "up_proj") if weight == "gate_up_proj" else (weight,)
    made = [
        [
            matrix_of(*(stored[f"model.decoder.layers.0.experts.{e}.{name}.weight{end}"] for end in Nvfp4.SUFFIXES))
            for name in names
        ]
        for e in range(4)
    ]
    stacked = [[torch.cat(tensors) for tensors in zip(*matrices, strict=True)] for matrices in made]
    return Nvfp4(*(torch.stack(tensors) for tensors in zip(*stacked, strict=True)))


def matrix_of(codes: Tensor, block_scale: Tensor, scale: Tensor) -> Nvfp4:
    """The tensors of a file as a matrix."""
    return Nvfp4(codes, block_scale.view(torch.uint8), scale.expand(len(codes), 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_code_with_every_scale_is_decoded_to_the_number_it_stands_for(dtype):
    golden = load_file(GOLDEN / "all_codes.safetensors")
    matrix = matrix_of(golden["weight"], golden["weight_scale"], golden["weight_scale_2"])
    assert torch.equal(matrix.decoded(dtype), golden["decoded"].to(dtype))  # no rounding in any of them
    assert torch.equal(reference.decoded(matrix, torch.float32), golden["decoded"])


def test_what_libraries_have_made_is_decoded_as_they_decode_it():
    golden = load_file(GOLDEN / "tensor.safetensors")
    theirs = (golden[f"modelopt.{name}"] for name in ("weight", "weight_scale", "weight_scale_2"))
    made = matrix_of(*theirs).decoded(torch.float32)
    assert relative_error(made, golden["modelopt.decoded"]) < 1e-7
    codes, block_scale, divisor = (golden[f"ct.weight_{name}"] for name in ("packed", "scale", "global_scale"))
    matrix = matrix_of(codes, block_scale, 1 / divisor)
    assert relative_error(matrix.decoded(torch.float32), golden["ct.decoded_fp32"]) < 1e-7
    assert torch.equal(matrix.decoded(torch.bfloat16), golden["ct.decoded_bf16_by_library"])


def test_codes_are_those_of_modelopt_with_its_scales():
    golden = load_file(GOLDEN / "tensor.safetensors")
    scale = golden["modelopt.weight_scale"].float() * golden["modelopt.weight_scale_2"]
    numbers = golden["source"].float().unflatten(-1, (-1, 16)) / scale[..., None]
    codes = _codes(numbers).flatten(-2).unflatten(-1, (-1, 2))
    own, theirs = codes[..., 0] | codes[..., 1] << 4, golden["modelopt.weight"]
    assert int((own != theirs).sum()) == 0


@pytest.mark.parametrize("kind", ["normal", "outliers", "channels"])
def test_the_chosen_scales_lose_less_than_those_of_the_largest_number(kind):
    g = torch.Generator().manual_seed(4)
    weight = torch.randn(96, 704, generator=g)
    if kind == "outliers":
        weight = torch.where(torch.rand(weight.shape, generator=g) < 1e-3, weight * 8, weight)
    if kind == "channels":
        weight = weight * torch.randn(96, 1, generator=g).exp() * torch.randn(704, generator=g).exp()
    lost = float((Nvfp4.nearest(weight).decoded(torch.float32) - weight).norm() / weight.norm())
    assert 0.078 < lost < 0.084  # amax / 6 loses 0.092 to 0.095


def test_what_is_made_is_exact_in_bf16():
    made = in_nvfp4(3, 40, 64)
    assert torch.equal(made.decoded(torch.bfloat16).double(), reference.decoded(made, torch.float64))
    assert int(made.block_scale.max()) <= 126


def test_zeros_small_blocks_and_matrices_that_are_not_finite():
    weight = torch.zeros(3, 32)
    weight[1, :16], weight[2] = 1e-3, 1.0
    assert relative_error(Nvfp4.nearest(weight).decoded(torch.float32), weight) < 2**-4
    assert torch.equal(Nvfp4.nearest(torch.zeros(2, 16)).decoded(torch.float32), torch.zeros(2, 16))
    for wrong in (float("nan"), float("inf")):
        weight[0, 3] = wrong
        assert not (Nvfp4.nearest(weight).decoded(torch.float32) @ torch.ones(32)).isfinite().any()


def test_experts_are_those_of_transformers_with_decoded_weights():
    golden = load_file(GOLDEN / "experts.safetensors")
    rounded = load_file(GOLDEN / "tiny_modelopt" / "expected.safetensors")  # scales were multiplied in fp32 there
    names = ("gate_up_proj", "down_proj")
    matrices = [in_file(name) for name in names]
    in_fp32 = [rounded[f"decoded.layer0.{name}"].double() for name in names]
    in_fp64 = [reference.decoded(matrix, torch.float64) for matrix in matrices]
    outs = []
    for weights in (in_fp32, matrices, in_fp64):
        x = golden["x"].clone().requires_grad_()
        out = IN_C.expert_mlp(x, *weights, golden["index"], golden["weight"], "gelu_tanh")
        out.backward(golden["grad_out"])
        outs.append((out, x.grad))
    for ours, true in (*zip(outs[0], (golden["out"], golden["grad_x"]), strict=True), *zip(*outs[1:], strict=True)):
        assert relative_error(ours, true) < 1e-12
    for ours, true in zip(in_fp64, in_fp32, strict=True):
        assert relative_error(ours, true) < 1e-7
