"""Norms and norm_rope, in torch and by C functions, against their references, and the frequencies of RoPE."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.layers.rope import angles, default_frequencies, proportional_frequencies
from tests.oracles import norm_rope as norm_reference
from tests.support.closeness import compare_gradients, copies, relative_error

pytestmark = pytest.mark.quick

EPS = 1e-6
DTYPES = [(torch.float64, 3e-7), (torch.float32, 3e-6)]  # norms compute in fp32 whatever the dtype


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def transposed(*shape: int, seed: int) -> Tensor:
    """A transposed tensor: dense, but in another order than its axes."""
    b, t, d = shape
    return torch.randn(t, b, d, generator=generator(seed), dtype=torch.float64).transpose(0, 1)


def sliced(*shape: int, seed: int) -> Tensor:
    """Every second row of a tensor."""
    x = torch.randn(*shape[:-2], shape[-2] * 2, shape[-1], generator=generator(seed), dtype=torch.float64)
    return x[..., ::2, :]


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("weights", ["w", "0", "ww", "w0", "0w", "ww0", "00"])
def test_rms_norms_match_the_reference(kernels, weights, needs, dtype, tolerance):
    x = transposed(3, 5, 24, seed=0)
    assert not x.is_contiguous() and x.to(dtype).stride() == x.stride()
    w: list[Tensor | None] = [
        None if kind == "0" else torch.rand(24, generator=generator(i), dtype=torch.float64) + 0.5
        for i, kind in enumerate(weights)
    ]
    flags = [needs[0], *[needs[1 + i % 2] for i in range(len(w))]]
    mine, truth = copies([x, *w], dtype, flags), copies([x, *w], torch.float64, flags)
    outs = kernels.rms_norms(mine[0], mine[1:], EPS)
    expected = [norm_reference.rms_norm(truth[0], weight, EPS) for weight in truth[1:]]
    for out, y in zip(outs, expected, strict=True):
        assert out.dtype == dtype and relative_error(out, y) < tolerance
    with torch.no_grad():
        for out, y in zip(kernels.rms_norms(mine[0], mine[1:], EPS), expected, strict=True):
            assert relative_error(out, y) < tolerance
    if not any(o.requires_grad for o in expected):
        assert not any(o.requires_grad for o in outs)
        return
    loss = sum((o * (i + 1)).pow(3).sum() for i, o in enumerate(outs))
    loss.backward()
    sum((o * (i + 1)).pow(3).sum() for i, o in enumerate(expected)).backward()
    compare_gradients(mine, truth, 10 * tolerance)


@pytest.mark.parametrize("layout", [transposed, sliced])
def test_norms_take_any_layout_in_both_directions(kernels, layout):
    """Inputs that are views, and gradients of the same layout as the outputs."""
    x, y = layout(3, 5, 24, seed=0).float(), layout(3, 5, 24, seed=1).float()
    base = torch.stack([x, y]).requires_grad_()
    wide = base.detach().double().requires_grad_()
    w = torch.rand(24, generator=generator(2)) + 0.5

    def loss(base: Tensor, norms: Any) -> Tensor:
        a, b = base[0].transpose(0, 1), base[1].transpose(0, 1)
        first, second = norms(a, (w.to(base.dtype), None))
        return (first * b + second.sin()).transpose(0, 1).pow(2).sum()

    loss(base, lambda x, ws: kernels.rms_norms(x, ws, EPS)).backward()
    loss(wide, lambda x, ws: [norm_reference.rms_norm(x, weight, EPS) for weight in ws]).backward()
    assert relative_error(base.grad, wide.grad) < 3e-6


def test_a_norm_whose_output_is_not_used_gets_a_zero_gradient(kernels):
    x = torch.randn(4, 8, generator=generator(0), requires_grad=True)
    a, b = (torch.rand(8, generator=generator(i)).requires_grad_() for i in (1, 2))
    kernels.rms_norms(x, (a, b), EPS)[0].sum().backward()
    truth = x.detach().double().requires_grad_()
    norm_reference.rms_norm(truth, a.detach().double(), EPS).sum().backward()
    assert relative_error(x.grad, truth.grad) < 1e-5
    assert b.grad is None or not b.grad.any()


def test_norms_of_zeros_are_zero_with_finite_gradients(kernels):
    x = torch.zeros(2, 8, requires_grad=True)
    w = torch.ones(8, requires_grad=True)
    out = kernels.rms_norms(x, (w, None), EPS)
    sum(o.sum() for o in out).backward()
    assert all((o == 0).all() for o in out)
    assert x.grad.isfinite().all() and w.grad.isfinite().all()


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("scalar_shape", [None, (1,), (3, 5, 1)])
@pytest.mark.parametrize("needs", [n for n in itertools.product([True, False], repeat=3) if any(n)])
def test_add_rms_norm_matches_the_reference(kernels, needs, scalar_shape, dtype, tolerance):
    x, y = transposed(3, 5, 24, seed=0), transposed(3, 5, 24, seed=1)
    w = torch.rand(24, generator=generator(2), dtype=torch.float64) + 0.5
    mine, truth = copies([x, y, w], dtype, list(needs)), copies([x, y, w], torch.float64, list(needs))
    scalar = None if scalar_shape is None else torch.rand(scalar_shape, generator=generator(3)).to(dtype) + 0.5
    out = kernels.add_rms_norm(*mine, EPS, scalar)
    expected = truth[0] + norm_reference.rms_norm(truth[1], truth[2], EPS)
    expected = expected * scalar.double() if scalar is not None else expected
    assert out.dtype == dtype and relative_error(out, expected) < tolerance
    with torch.no_grad():
        assert relative_error(kernels.add_rms_norm(*mine, EPS, scalar), expected) < tolerance
    out.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    compare_gradients(mine, truth, 10 * tolerance)
    assert torch.equal(mine[0].detach(), x.to(dtype)) and torch.equal(mine[1].detach(), y.to(dtype))


@pytest.mark.parametrize("dtype,tolerance", DTYPES)
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("T,h,d", [(1, 1, 2), (7, 3, 16), (17, 2, 30)])
def test_norm_rope_turns_pairs_of_halves(kernels, T, h, d, needs, dtype, tolerance):
    x = torch.randn(2, h, T, d, generator=generator(0), dtype=torch.float64).transpose(1, 2)
    w = torch.rand(d, generator=generator(1), dtype=torch.float64) + 0.5
    positions = torch.randint(0, 5000, (2, T), generator=generator(2))
    frequencies = default_frequencies(d, 1e4)
    cos, sin = angles(positions, frequencies, dtype)
    mine, truth = copies([x, w], dtype, list(needs)), copies([x, w], torch.float64, list(needs))
    out = kernels.norm_rope(*mine, cos, sin, EPS)
    angle = (positions[..., None].float() * frequencies).double()  # angles are fp32 by definition
    expected = norm_reference.norm_rope(*truth, angle, EPS)
    assert out.dtype == dtype and relative_error(out, expected) < tolerance
    with torch.no_grad():
        assert relative_error(kernels.norm_rope(*mine, cos, sin, EPS), expected) < tolerance
    out.pow(3).sum().backward()
    expected.pow(3).sum().backward()
    compare_gradients(mine, truth, 10 * tolerance)


def test_the_frequencies_of_both_layer_kinds():
    sliding = default_frequencies(256, 1e4)
    assert sliding.shape == (128,)
    assert torch.allclose(sliding.double(), 1e4 ** (-2 * torch.arange(128, dtype=torch.float64) / 256))
    full = proportional_frequencies(512, 1e6, 0.25)
    assert full.shape == (256,)
    assert torch.allclose(full[:64].double(), 1e6 ** (-2 * torch.arange(64, dtype=torch.float64) / 512))
    assert (full[64:] == 0).all()
