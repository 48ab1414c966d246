"""fp8 weights in Triton against the reference in fp64, in the interpreter or on the GPU there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.expert_mlp import triton as experts
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.fp8 import triton as ours
from blockdiff.kernels.gated.triton import gated_linear
from tests.oracles import expert_mlp as expert_reference
from tests.oracles import fp8 as reference
from tests.support.closeness import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 3e-6  # relative


def in_fp8(*shape: int, seed: int = 0) -> Fp8:
    weight = Fp8.nearest(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return Fp8(*(part.to(DEVICE) for part in weight))


def dense(weight: Fp8) -> Tensor:
    return reference.decoded(weight, torch.float64).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_finite_code_is_decoded_exactly(dtype):
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1)
    codes[:, [127, 255]] = 0  # a channel with a NaN has a scale that is NaN
    scale = torch.tensor([[1.0], [0.5], [2.0**-7]])
    like = torch.empty(0, dtype=dtype, device=DEVICE)
    made = ours._decoded(codes.view(torch.int8).to(DEVICE), scale.to(DEVICE), like)
    assert torch.equal(made.cpu().double(), reference.decoded(Fp8(codes, scale), torch.float64).to(dtype).double())


@pytest.mark.parametrize("few", [512, 0])  # 0: the weight is decoded, and torch's product follows
@pytest.mark.parametrize("shape,F", [((1, 1, 130), 70), ((3, 17, 44), 19), ((0, 44), 19)])
def test_a_product_with_its_gradient(shape, F, few, monkeypatch):
    monkeypatch.setattr(ours, "FEW_ROWS", few)
    weight = in_fp8(F, shape[-1])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    mine, true = x.clone().to(DEVICE).requires_grad_(), x.double().requires_grad_()
    direction = torch.randn(*shape[:-1], F, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    out, truth = ours.fp8_linear(mine, weight), true @ dense(weight).T
    (out.double() * direction.to(DEVICE)).sum().backward()
    (truth * direction).sum().backward()
    assert relative_error(out, truth) < FP32 and relative_error(mine.grad, true.grad) < FP32


def test_the_gated_half_of_an_mlp():
    gate, up = in_fp8(37, 44, seed=1), in_fp8(37, 44, seed=2)
    x = torch.randn(21, 44, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        out = gated_linear(x.to(DEVICE), gate, up, "gelu_tanh")
    truth = expert_reference.gated(x.double() @ dense(gate).T, x.double() @ dense(up).T, "gelu_tanh")
    assert relative_error(out, truth) < FP32


@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("N,E,k,choice", [(63, 3, 2, "padding"), (1, 1, 1, "all"), (130, 8, 2, "some empty")])
def test_experts_with_all_gradients_that_there_are(N, E, k, choice, rank):
    D, F, g = 44, 20, torch.Generator().manual_seed(N)
    x, weight = torch.randn(N, D, generator=g), torch.rand(N, k, generator=g)
    gate_up, down = in_fp8(E, 2 * F, D, seed=1), in_fp8(E, D, F, seed=2)
    index = torch.rand(N, E, generator=g).argsort(-1)[:, :k]
    if choice == "padding":
        index = torch.where(torch.rand(N, 1, generator=g) < 0.4, E, index)
    if choice == "some empty":
        index = index // 2 * 2
    shapes = ((E, rank, D), (E, 2 * F, rank), (E, rank, F), (E, D, rank)) if rank else ()
    low_rank = [torch.randn(shape, generator=g) / 4 for shape in shapes]
    direction = torch.randn(N, D, generator=g, dtype=torch.float64)

    def run(op: Any, device: str, dtype: torch.dtype, *matrices: Any) -> list[Tensor | None]:
        own = [t.detach().to(device, dtype).requires_grad_() for t in (x, weight, *low_rank)]
        out = op(own[0], *matrices, index.to(device), own[1], "gelu_tanh", own[2:])
        (out.double() * direction.to(device)).sum().backward()
        return [out, *(t.grad for t in own)]

    got = run(experts.expert_mlp, DEVICE, torch.float32, gate_up, down)
    truth = run(expert_reference.expert_mlp, "cpu", torch.float64, dense(gate_up), dense(down))
    for mine, true in zip(got, truth, strict=True):
        assert mine is not None and true is not None and relative_error(mine, true) < FP32
    with torch.no_grad():
        of_tokens = index.to(DEVICE), weight.to(DEVICE), "gelu_tanh", [m.to(DEVICE) for m in low_rank]
        slots = experts.expert_slots(x.to(DEVICE), gate_up, down, *of_tokens)
    counts = (slots.index_Nk < E)[..., None]
    assert relative_error(torch.where(counts, slots.values_NkD, 0.0).sum(1), truth[0]) < FP32
