"""NVFP4 weights in Triton against the reference in fp64, in the interpreter or on the GPU there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from safetensors.torch import load_file
from torch import Tensor

from blockdiff.kernels import IN_TORCH
from blockdiff.kernels.expert_mlp import triton as experts
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.nvfp4 import Nvfp4
from blockdiff.kernels.nvfp4 import triton as ours
from blockdiff.kernels.nvfp4.kernels_decode import RAISED, UNIT, pairs
from tests.oracles import expert_mlp as expert_reference
from tests.oracles import nvfp4 as reference
from tests.support.closeness import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 3e-6  # relative
GOLDEN = Path(__file__).parents[1] / "data" / "fourbit"


def in_nvfp4(*shape: int, seed: int = 0) -> Nvfp4:
    """A matrix whose channels have scales of their own, which are no powers of two."""
    weight = Nvfp4.nearest(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    factors = torch.linspace(0.7, 1.3, shape[-2])[:, None]
    return Nvfp4(weight.codes.to(DEVICE), weight.block_scale.to(DEVICE), (weight.scale * factors).to(DEVICE))


def dense(weight: Nvfp4) -> Tensor:
    return reference.decoded(Nvfp4(*(part.cpu() for part in weight)), torch.float64)


@triton.jit
def _pairs(codes, out):
    byte = tl.arange(0, 256)
    tl.store(out + byte, pairs(tl.load(codes + byte)))


def test_in_bf16_every_code_times_every_scale_is_exact():
    """Bits of codes are those that kernels make; a product of two bf16 numbers is what their one instruction makes."""
    out = torch.empty(256, dtype=torch.int32, device=DEVICE)
    _pairs[(1,)](torch.arange(256, dtype=torch.uint8).view(torch.int8).to(DEVICE), out)
    of_byte = out.cpu().view(torch.bfloat16).view(256, 2)  # the lower half is first
    scale = (torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * RAISED.value).bfloat16()
    made = (of_byte[:, None] * scale[:, None]).double() * UNIT.value
    block_scale = torch.arange(127, dtype=torch.uint8).expand(256, 127)
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 127 * 8)
    truth = reference.decoded(Nvfp4(codes, block_scale, torch.ones(256, 1)), torch.float64)
    assert torch.equal(made, truth.view(256, 127, 8, 2)[:, :, 0])


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
def test_every_code_with_every_scale_is_decoded_exactly(dtype, back):
    golden = load_file(GOLDEN / "all_codes.safetensors")
    codes, block_scale, truth = golden["weight"], golden["weight_scale"].view(torch.uint8), golden["decoded"]
    weight = [t.to(DEVICE) for t in (codes, block_scale, torch.full((len(codes), 1), 0.5))]
    x = torch.eye(codes.shape[0] if back else truth.shape[1], device=DEVICE, dtype=dtype)
    made = ours._nvfp4_linear(x, weight[0].view(torch.int8), weight[2], weight[1].view(torch.int8), back)
    assert torch.equal((made if back else made.T).cpu().float(), truth / 2)


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_other_dtypes_are_refused(kind):
    x, gate_up, down = torch.zeros(1, 16, device=DEVICE), in_nvfp4(1, 32, 16), in_nvfp4(1, 16, 16)
    index, weight = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), torch.ones(1, 1, device=DEVICE)
    for dtype in (torch.float16, torch.float64):
        with pytest.raises(Unserved, match=str(dtype)):
            if kind == "linear":
                ours.nvfp4_linear(x.to(dtype), down.part(0))
            else:
                experts.expert_mlp(x.to(dtype), gate_up, down, index, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [100, 3000])
def test_bf16_is_about_as_close_to_fp64_as_torch_in_bf16(tokens):
    """At the released model's widths, with adapters; gradients by fp64 of the same decoded weights."""
    E, k, D, F, rank, g = 8, 2, 2816, 704, 8, torch.Generator().manual_seed(tokens)
    x, weight = torch.randn(tokens, D, generator=g).bfloat16(), torch.rand(tokens, k, generator=g)
    gate_up, down = in_nvfp4(E, 2 * F, D, seed=1), in_nvfp4(E, D, F, seed=2)
    gate_up, down = (w._replace(scale=w.scale / 40) for w in (gate_up, down))
    index = torch.rand(tokens, E, generator=g).argsort(-1)[:, :k]
    shapes = (E, rank, D), (E, 2 * F, rank), (E, rank, F), (E, D, rank)
    low_rank = [torch.randn(shape, generator=g).bfloat16() / 40 for shape in shapes]
    direction = torch.randn(tokens, D, generator=g)

    def run(of_experts: Any, linear: Any, dtype: torch.dtype, *matrices: Any) -> list[Tensor]:
        own = [t.detach().to(DEVICE, dtype).requires_grad_() for t in (x, *low_rank)]
        out = of_experts(own[0], *matrices, index.to(DEVICE), weight.to(DEVICE), "gelu_tanh", own[1:])
        (out * direction.to(DEVICE, dtype)).sum().backward()
        made = [out, *(t.grad for t in own)]
        own[0].grad = None
        product = linear(own[0], matrices[0][0] if dtype == torch.float64 else matrices[0].part(0))
        product.square().sum().backward()
        return [*made, product, own[0].grad]  # type: ignore[list-item]

    truth = [dense(w).to(DEVICE) for w in (gate_up, down)]
    exact = run(expert_reference.expert_mlp, torch.nn.functional.linear, torch.float64, *truth)
    mine = run(experts.expert_mlp, ours.nvfp4_linear, torch.bfloat16, gate_up, down)
    torchs = run(IN_TORCH.expert_mlp, IN_TORCH.nvfp4_linear, torch.bfloat16, gate_up, down)
    for got, of_torch, true in zip(mine, torchs, exact, strict=True):
        assert relative_error(got, true) <= 1.25 * relative_error(of_torch, true) + 1e-3
