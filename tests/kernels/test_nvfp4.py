"""NVFP4 weights: what codes stand for, the way there, and products in torch against the reference with gradients.

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
from tests.oracles import expert_mlp as experts
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


@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("shape,F", [((1, 1, 16), 19), ((3, 17, 48), 64), ((2, 3, 528), 16), ((0, 4, 48), 16)])
def test_a_product_with_its_gradient(kernels, shape, F, dtype, bound):
    weight = in_nvfp4(F, shape[-1])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    outs = []
    for op, own in ((kernels.nvfp4_linear, x), (reference.nvfp4_linear, x.double())):
        own = own.detach().requires_grad_()
        out = op(own, weight)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)).sum().backward()
        outs.append((out, own.grad))
    (out, grad), (true_out, true_grad) = outs
    assert out.dtype == grad.dtype == dtype
    assert relative_error(out, true_out) < bound and relative_error(grad, true_grad) < bound


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("N,E,k,empty", [(1, 3, 2, False), (37, 5, 2, True), (0, 3, 1, False), (9, 4, 2, False)])
def test_experts_with_all_gradients_that_there_are(kernels, N, E, k, empty, rank):
    D, F = 48, 16
    g = torch.Generator().manual_seed(N + E)
    x, weight = torch.randn(N, D, generator=g), torch.rand(N, k, generator=g)
    gate_up, down = in_nvfp4(E, 2 * F, D, seed=1), in_nvfp4(E, D, F, seed=2)
    index = torch.rand(N, E, generator=g).argsort(-1)[:, :k]
    index = torch.where(index == 1, E, index) if empty else index  # expert 1 gets no token, and some have no expert
    shapes = ((E, rank, D), (E, 2 * F, rank), (E, rank, F), (E, D, rank)) if rank else ()
    low_rank = [torch.randn(shape, generator=g) / 4 for shape in shapes]
    found = []
    for dtype in (torch.float32, torch.float64):
        own = [t.detach().to(dtype).requires_grad_() for t in (x, weight, *low_rank)]
        matrices = own[2:]
        if dtype == torch.float32:
            out = kernels.expert_mlp(own[0], gate_up, down, index, own[1], "silu", matrices)
        else:
            dense = (reference.decoded(w, dtype) for w in (gate_up, down))
            out = experts.expert_mlp(own[0], *dense, index, own[1], "silu", matrices)
        (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(dtype)).sum().backward()
        found.append([out, *(t.grad for t in own)])
    for ours, true in zip(*found, strict=True):
        assert relative_error(ours, true) < 1e-5


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
