"""Experts, routing and gated activations, in torch and by C functions, against their references."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels import IN_C, Kernels
from blockdiff.kernels.c_library import serves
from blockdiff.kernels.expert_mlp import c as experts_in_c
from blockdiff.kernels.expert_mlp import torch as experts_in_torch
from blockdiff.layers.experts import Router
from tests.oracles import expert_mlp as expert_reference
from tests.support.closeness import compare_gradients, copies, relative_error
from tests.support.expert_choices import chosen

pytestmark = pytest.mark.quick


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def expert_case(N: int, E: int, k: int, choice: str = "random") -> tuple[list[Tensor], Tensor]:
    """x, gate_up, down and routing weights in fp64, and which experts; E among them means no expert."""
    D, F_ = 12, 5
    g = generator(N + 10 * E + k)
    x = torch.randn(N, D, generator=g, dtype=torch.float64)
    gate_up = torch.randn(E, 2 * F_, D, generator=g, dtype=torch.float64)
    down = torch.randn(E, D, F_, generator=g, dtype=torch.float64)
    weight = torch.rand(N, k, generator=g, dtype=torch.float64)
    return [x, gate_up, down, weight], chosen(N, E, k, choice, g)


def compare_experts(
    kernels: Kernels, tensors: list[Tensor], index: Tensor, needs: list[bool], dtype: torch.dtype, tolerance: float
) -> None:
    mine, truth = copies(list(tensors), dtype, needs), copies(list(tensors), torch.float64, needs)
    out = kernels.expert_mlp(mine[0], mine[1], mine[2], index, mine[3])
    expected = expert_reference.expert_mlp(truth[0], truth[1], truth[2], index, truth[3])
    assert out.dtype == dtype and relative_error(out, expected) < tolerance
    direction = torch.randn(out.shape, generator=generator(9), dtype=torch.float64)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    compare_gradients(mine, truth, tolerance)


EXPERT_DTYPES = [(torch.float64, 1e-12), (torch.float32, 3e-5)]  # a single sum may cancel
ALL = [True] * 4


@pytest.mark.parametrize("dtype,tolerance", EXPERT_DTYPES)
@pytest.mark.parametrize("E,k", [(1, 1), (3, 1), (3, 2), (8, 2)])
@pytest.mark.parametrize("N", [0, 1, 63, 257])
def test_expert_mlp_matches_its_reference(kernels, N, E, k, dtype, tolerance):
    tensors, index = expert_case(N, E, k)
    compare_experts(kernels, tensors, index, ALL, dtype, tolerance)


@pytest.mark.parametrize("dtype,tolerance", EXPERT_DTYPES)
@pytest.mark.parametrize("choice", ["one", "some empty", "none", "padding"])
@pytest.mark.parametrize("E,k", [(1, 1), (3, 1), (8, 2)])
def test_expert_mlp_with_empty_experts_and_tokens_without_one(kernels, E, k, choice, dtype, tolerance):
    tensors, index = expert_case(37, E, k, choice)
    if choice in ("none", "padding"):
        assert (index == E).all(-1).any()
    compare_experts(kernels, tensors, index, ALL, dtype, tolerance)
    out = kernels.expert_mlp(*(t.to(dtype) for t in tensors[:3]), index, tensors[3].to(dtype))
    assert (out[(index == E).all(-1)] == 0).all()


@pytest.mark.parametrize("dtype,tolerance", EXPERT_DTYPES)
@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=4) if any(n)])
def test_expert_mlp_trains_whatever_is_not_frozen(kernels, needs, dtype, tolerance):
    tensors, index = expert_case(37, 3, 2, "padding")
    compare_experts(kernels, tensors, index, list(needs), dtype, tolerance)


def test_experts_take_indices_of_other_integers_and_routing_weights_of_any_layout(kernels):
    tensors, index = expert_case(37, 3, 2, "padding")
    given = [x.float().requires_grad_() for x in tensors]
    given[3] = tensors[3].float().t().contiguous().t().requires_grad_()
    plain = [x.float().requires_grad_() for x in tensors]
    outs = [kernels.expert_mlp(*plain[:3], index, plain[3]), kernels.expert_mlp(*given[:3], index.int(), given[3])]
    for out in outs:
        out.square().sum().backward()
    assert relative_error(*outs) < 1e-6
    for x, y in zip(given, plain, strict=True):
        assert relative_error(x.grad, y.grad) < 1e-6


@pytest.mark.parametrize("dtype,tolerance", EXPERT_DTYPES)
@pytest.mark.parametrize("choice", ["random", "one", "some empty", "none", "padding"])
def test_the_dense_path_equals_the_grouped_one(kernels, choice, dtype, tolerance, monkeypatch):
    tensors, index = expert_case(63, 8, 2, choice)
    x, gate_up, down, weight = (t.to(dtype) for t in tensors)
    calls = []
    module = experts_in_c if kernels is IN_C and serves(x) else experts_in_torch
    dense = module._dense
    monkeypatch.setattr(module, "_dense", lambda *a: calls.append(1) or dense(*a))
    with torch.no_grad():
        quick = kernels.expert_mlp(x, gate_up, down, index, weight)
        monkeypatch.setattr(experts_in_torch, "DENSE_FLOPS", -1)
        grouped = kernels.expert_mlp(x, gate_up, down, index, weight)
    assert len(calls) == 1
    assert relative_error(quick, grouped) < tolerance


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_the_router_follows_its_formula(kernels, top_k, dtype):
    D, E, N = 24, 5, 63
    g = generator(top_k)
    router = Router(D, E, top_k, kernels).to(dtype)
    with torch.no_grad():
        router.proj.weight.copy_(torch.randn(E, D, generator=g) * 3)
        router.scale.copy_(torch.rand(D, generator=g) + 0.5)
        router.per_expert_scale.copy_(torch.rand(E, generator=g) + 0.5)
    x = torch.randn(N, D, generator=g).to(dtype)
    index, weight = router(x)
    if dtype == torch.bfloat16:  # rounded after each factor
        scores = F.linear(x * router.scale * D**-0.5, router.proj.weight)
    else:
        scores = (x * router.scale * D**-0.5) @ router.proj.weight.T
    probability = torch.exp(scores.detach().float() - scores.detach().float().logsumexp(-1, keepdim=True))
    for n in range(N):
        chosen = probability[n, index[n]]
        assert len(set(index[n].tolist())) == top_k
        assert torch.allclose(chosen, probability[n].sort(descending=True)[0][:top_k], rtol=1e-5)
        truth = chosen / chosen.sum() * router.per_expert_scale[index[n]].float()
        assert torch.allclose(weight[n].float(), truth, rtol=1e-5)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-6), (torch.float32, 3e-6)])
@pytest.mark.parametrize("N,E,k", [(1, 1, 1), (63, 5, 2), (257, 40, 8)])
def test_the_gradients_of_routing_match_its_formula(kernels, N, E, k, dtype, tolerance):
    g = generator(N)
    scores, scale = torch.randn(N, E, generator=g) * 3, torch.rand(E, generator=g) + 0.5
    mine, truth = copies([scores, scale], dtype, [True] * 2), copies([scores, scale], torch.float64, [True] * 2)
    index, weight = kernels.route(*mine, k)
    best, order = truth[0].topk(k, -1)
    assert torch.equal(index, order)
    expected = best.softmax(-1) * truth[1][order]
    assert relative_error(weight, expected) < tolerance
    direction = torch.randn(weight.shape, generator=generator(9), dtype=torch.float64)
    (weight * direction).sum().backward()
    (expected * direction).sum().backward()
    assert relative_error(mine[0].grad, truth[0].grad, floor=1e-3) < 10 * tolerance
    assert relative_error(mine[1].grad, truth[1].grad) < tolerance


@pytest.mark.parametrize("activation", ["gelu_tanh", "silu", "swiglu_oai"])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_gated_activations_match_their_formula_from_tiny_to_huge_gates(kernels, dtype, tolerance, activation):
    g = generator(0)
    gate = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-80.0, -20.0, -1e-30, 0.0, 1e-30, 20.0, 80.0])])
    mine, truth = (copies([gate, torch.randn(4008, generator=g)], d, [True] * 2) for d in (dtype, torch.float64))
    truth[1].data.copy_(mine[1].data)
    out, expected = kernels.gated(*mine, activation), expert_reference.gated(*truth, activation)
    direction = torch.randn(out.shape, generator=generator(9), dtype=torch.float64)
    (out * direction).sum().backward()
    (expected * direction).sum().backward()
    ends = slice(0, 4001)  # the huge ones would hide the others in a norm
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(mine, truth, strict=True))]
    for x, y in pairs:
        assert relative_error(x[ends], y[ends]) < tolerance
        assert torch.allclose(x[4001:].double(), y[4001:], rtol=1e-5, atol=1e-6)
