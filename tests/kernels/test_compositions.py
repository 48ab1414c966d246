"""Compositions of the ops of a layer in fp32 on a CPU, against the same in fp64: outputs and every gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from blockdiff.kernels import IN_C, IN_TORCH, Kernels
from blockdiff.kernels.expert_mlp import Slots
from blockdiff.kernels.heads import HeadNorms
from blockdiff.layers.norm import RMSNorm

pytestmark = pytest.mark.quick

EPS = 1e-6
SHAPES = [(2, 35, 96), (1, 1, 16), (3, 7, 21), (1, 40, 300)]


def drawn(shape: tuple[int, ...], seed: int, trains: bool = True) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(trains)


def compare(function, inputs) -> None:
    """`function(kernels, *inputs)` in fp32 by C functions equals torch in fp64; the gradients too."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs]
    results = []
    for kernels, given in ((IN_C, inputs), (IN_TORCH, wide)):
        outs = [out for out in function(kernels, *given) if out.is_floating_point()]
        factors = [drawn(out.shape, 90 + n, False).to(out.dtype) for n, out in enumerate(outs)]
        trained = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
        grads = torch.autograd.grad(sum((f * out).sum() for f, out in zip(factors, outs, strict=True)), trained)
        results.append([*outs, *grads])
    for ours, exact in zip(*results, strict=True):
        assert ours.shape == exact.shape
        ours, exact = ours.detach().double(), exact.detach()
        assert float((ours - exact).norm() / exact.norm().clamp(min=1e-9)) < 2e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("trains", [True, False])
def test_a_residual_sum_and_its_norms(shape, trains):
    D = shape[-1]
    weight, first, second = (drawn((D,), seed, trains) for seed in (2, 3, 4))

    def norms(kernels: Kernels, x, y, weight, first, second):
        return kernels.residual_norms(x, y, weight, (first, second, None), EPS)

    inputs = drawn(shape, 0), drawn(shape, 1), weight, first, second
    compare(norms, inputs)


@pytest.mark.parametrize("used", [(0,), (1,), (2, 3), (0, 3)])
def test_a_sum_or_norm_that_is_not_used_gets_no_gradient(used):
    shape = (2, 5, 33)

    def norms(kernels: Kernels, x, y, weight, first, second):
        made = kernels.residual_norms(x, y, weight, (first, second, None), EPS)
        return [made[n] for n in used] + [0.0 * (first.sum() + second.sum() + weight.sum() + y.sum())]

    inputs = drawn(shape, 0), drawn(shape, 1), *(drawn((33,), seed) for seed in (2, 3, 4))
    compare(norms, inputs)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scalars", ["none", "one", "rows"])
@pytest.mark.parametrize("trains", [True, False])
def test_the_end_of_a_layer(shape, scalars, trains):
    B, T, D = shape
    weights = [drawn((D,), seed, trains) for seed in (3, 4, 5)]
    scalar = {"none": None, "one": drawn((1,), 6, False), "rows": drawn((B, T, 1), 6, False)}[scalars]

    def end(kernels: Kernels, x, dense, routed, first, second, third, scalar):
        slots = Slots(routed.unsqueeze(1), None, 0)
        return [kernels.layer_end(x, dense, slots, (first, second, third), EPS, scalar)]

    inputs = drawn(shape, 0), drawn(shape, 1), drawn((B * T, D), 2), *weights, scalar
    compare(end, inputs)


@pytest.mark.parametrize("is_key", [True, False])
@pytest.mark.parametrize("d", [8, 20, 32])
def test_queries_keys_and_values_after_norms_and_rope(is_key, d):
    B, T, h, K = 2, 9, 4, 2
    norms = [RMSNorm(d, EPS, IN_C) for _ in range(2)]
    rope = drawn((B, T, d), 5, False), drawn((B, T, d), 6, False)

    def made(kernels: Kernels, q, k, v, q_weight, k_weight):
        for norm, weight in zip(norms, (q_weight, k_weight), strict=True):
            norm.kernels = kernels
            norm._parameters["weight"] = weight
        cos, sin = (x.to(q.dtype) for x in rope)
        return kernels.attention_heads(q, k, k if is_key else v, HeadNorms(d, *norms, True, EPS), (cos, sin))

    inputs = [drawn((B, T, n, d), seed) for seed, n in enumerate((h, K, K))]
    inputs[2].requires_grad_(not is_key)
    compare(made, (*inputs, drawn((d,), 7), drawn((d,), 8)))


@pytest.mark.parametrize("E, k", [(8, 2), (5, 3), (4, 4)])
@pytest.mark.parametrize("trains", [True, False])
def test_the_scores_and_the_choice_of_a_router(E, k, trains):
    N, D = 37, 24

    def routed(kernels: Kernels, x, scale, weight, expert_scale):
        return kernels.routed_tokens(x, scale, D**-0.5, weight, expert_scale, k)

    inputs = drawn((N, D), 0), *(drawn(shape, 1 + n, trains) for n, shape in enumerate([(D,), (E, D), (E,)]))
    compare(routed, inputs)


def test_a_model_that_is_copied_computes_with_the_same_functions():
    norm = copy.deepcopy(RMSNorm(8, EPS, IN_C))
    assert norm.kernels is IN_C
