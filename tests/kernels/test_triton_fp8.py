"""fp8 weights in Triton against the reference in fp64, in the interpreter or on the GPU there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.expert_mlp import torch as experts_in_torch
from blockdiff.kernels.expert_mlp import triton as experts
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.fp8 import torch as in_torch
from blockdiff.kernels.fp8 import triton as ours
from blockdiff.kernels.gated.triton import gated_linear
from tests.closeness import relative_error
from tests.oracles import expert_mlp as expert_reference
from tests.oracles import fp8 as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32 = 3e-6  # relative


def in_fp8(*shape: int, seed: int = 0) -> Fp8:
    weight = in_torch.quantised(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
    return Fp8(*(part.to(DEVICE) for part in weight[:2]))


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
    (out,), truth = ours.fp8_linears(mine, (weight,)), true @ dense(weight).T
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


# -- inputs in fp8, too --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("N,K,dtype", [(40, 70, torch.float32), (3, 256, torch.bfloat16), (0, 20, torch.float32)])
def test_rows_are_rounded_to_the_codes_of_torch(N, K, dtype):
    x = torch.randn(N, K, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, N)[:, None]
    if N > 5:
        x[3], x[4, :5] = 0.0, torch.tensor([448.0, 1.0625, -1.1875, 2.0**-10, 3 * 2.0**-10])  # between two codes
    x = x.to(dtype)
    codes, scale = ours.rounded_rows(x.to(DEVICE))
    truth = in_torch.quantised(x)
    assert torch.equal(codes.cpu().view(torch.uint8), truth.codes) and torch.equal(scale.cpu()[:, None], truth.scale)


def test_every_number_that_e4m3_has_stays_as_it_is():
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    x = torch.tensor([[reference.value(int(code)) for code in codes]])
    made, scale = ours.rounded_rows(x.to(DEVICE))
    assert scale.tolist() == [1.0] and torch.equal(made.cpu().view(torch.uint8)[0], codes)


def test_a_row_that_is_not_finite_stays_so():
    x = torch.tensor([[1.0, float("nan")], [float("inf"), 1.0], [3.0, -1.0]], device=DEVICE)
    (out,) = ours.fp8_linears(x, (in_fp8(4, 2)._replace(rounds_inputs=True),))
    assert not out[:2].isfinite().any() and out[2].isfinite().all()


def test_products_of_fp8_with_fp8_round_once_and_have_the_gradient_of_inputs_as_they_are(monkeypatch):
    weights = [in_fp8(70, 130)._replace(rounds_inputs=True), in_fp8(19, 130, seed=1)._replace(rounds_inputs=True)]
    x = torch.randn(3, 17, 130, generator=torch.Generator().manual_seed(1))
    mine = x.to(DEVICE).requires_grad_()
    launched = launches(monkeypatch)
    outs = ours.fp8_linears(mine, weights)
    assert launched == ["fp8_round_rows", "fp8_product", "fp8_product"]
    for out, truth in zip(outs, reference.fp8_linears(x.double(), [cpu(w) for w in weights]), strict=True):
        assert relative_error(out, truth) < FP32
    sum(out.sum() for out in outs).backward()
    truth = sum(dense(weight).sum(0) for weight in weights)
    assert relative_error(mine.grad, truth.expand(3, 17, 130)) < FP32


def test_the_product_of_torch_is_asked_for_as_it_takes_its_arguments(monkeypatch):
    monkeypatch.setattr(ours, "torch_multiplies_fp8", lambda x, inner, columns: True)
    weight = in_fp8(48, 64)._replace(rounds_inputs=True)
    x = torch.randn(33, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    launched = launches(monkeypatch)
    (out,) = ours.fp8_linears(x.to(DEVICE), (weight,))
    assert launched == ["fp8_round_rows"] and out.dtype == torch.bfloat16
    assert relative_error(out, reference.fp8_linears(x.double(), (cpu(weight),))[0]) < 4e-3
    assert ours.fp8_linears(x[:0].to(DEVICE), (weight,))[0].shape == (0, 48)


@pytest.mark.parametrize("rank", [0, 5])
def test_experts_multiply_tokens_and_what_is_activated_in_fp8(rank):
    N, E, k, D, F, g = 63, 3, 2, 44, 20, torch.Generator().manual_seed(63)
    x, weight = torch.randn(N, D, generator=g), torch.rand(N, k, generator=g)
    gate_up, down = (in_fp8(*shape)._replace(rounds_inputs=True) for shape in ((E, 2 * F, D), (E, D, F)))
    index = torch.where(torch.rand(N, 1, generator=g) < 0.4, E, torch.rand(N, E, generator=g).argsort(-1)[:, :k])
    shapes = ((E, rank, D), (E, 2 * F, rank), (E, rank, F), (E, D, rank)) if rank else ()
    low_rank = [torch.randn(shape, generator=g) / 4 for shape in shapes]
    of_tokens = index, weight.double(), "gelu_tanh", [matrix.double() for matrix in low_rank]
    truth = expert_reference.expert_mlp(x.double(), dense(gate_up), dense(down), *of_tokens, taken=reference.rounded)
    found = []
    for op in (experts.expert_mlp, experts_in_torch.expert_mlp):
        own = [t.detach().to(DEVICE).requires_grad_() for t in (x, weight, *low_rank)]
        out = op(own[0], gate_up, down, index.to(DEVICE), own[1], "gelu_tanh", own[2:])
        out.sum().backward()
        found.append([out, *(t.grad for t in own)])
    assert relative_error(found[0][0], truth) < FP32
    for mine, true in zip(*found, strict=True):
        assert mine is not None and true is not None and relative_error(mine, true) < FP32
    with torch.no_grad():
        slots = experts.expert_slots(x.to(DEVICE), gate_up, down, index.to(DEVICE), weight.to(DEVICE), "gelu_tanh",
                                     [matrix.to(DEVICE) for matrix in low_rank])  # fmt: skip
    counts = (slots.index_Nk < E)[..., None]
    assert relative_error(torch.where(counts, slots.values_NkD, 0.0).sum(1), truth) < FP32


def cpu(weight: Fp8) -> Fp8:
    return Fp8(weight.codes.cpu(), weight.scale.cpu(), weight.rounds_inputs)


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that fp8_linears launches from now on, while they run."""
    found, launch = [], ours.launch

    def counted(kernel: Any, *arguments: Any, **constants: Any) -> None:
        found.append(kernel.fn.__name__)
        launch(kernel, *arguments, **constants)

    monkeypatch.setattr(ours, "launch", counted)
    return found
