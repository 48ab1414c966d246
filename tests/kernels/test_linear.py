"""Products by the tile unit of a CPU, where it has one; elsewhere the same calls run natively."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blockdiff.kernels import CPU, NATIVE, Kernels, c_library
from blockdiff.kernels.expert_mlp import reference
from blockdiff.kernels.linear import cpu as tiles
from blockdiff.layers.attention import Attention
from blockdiff.layers.linear import product
from blockdiff.layers.mlp import MLP
from tests.closeness import relative_error

pytestmark = pytest.mark.quick
HAS_TILES = c_library.library() is not None and tiles.has_tiles()
FP32, BF16 = 5e-7, 8e-3  # relative errors in the 2-norm


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def values_and_gradients(
    x: Tensor, weights: list[Tensor], grads: list[Tensor], autocast: bool, kernels: Kernels = CPU
) -> list[Tensor]:
    inputs = [each.detach().clone().requires_grad_() for each in (x, *weights)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outs = kernels.linears(inputs[0], inputs[1:])
    return [*outs, *torch.autograd.grad(outs, inputs, [g.to(out.dtype) for g, out in zip(grads, outs, strict=True)])]


# rows, depth, widths: whole tiles; odd edges everywhere; several panels of depth and of width; wide enough for all
SHAPES = [(128, 64, (64,)), (301, 77, (65, 33, 1)), (170, 600, (70, 530)), (530, 203, (193, 320, 200))]


@pytest.mark.parametrize(("rows", "depth", "widths"), SHAPES)
def test_autocast_rounds_what_is_multiplied_and_in_tiles_no_sum(rows, depth, widths):
    x, weights = drawn(rows, depth), [drawn(width, depth) for width in widths]
    grads = [drawn(rows, width) for width in widths]
    found = values_and_gradients(x, weights, grads, True)
    if HAS_TILES:  # the gradient of a small weight is made in fp32, without rounding
        (x, *weights), bound = [each.bfloat16() for each in (x, *weights)], FP32
    else:
        bound = BF16
    truth = values_and_gradients(x.double(), [w.double() for w in weights], [g.double() for g in grads], False)
    values = 1 + len(widths)
    assert all(out.dtype == (torch.float32 if HAS_TILES else torch.bfloat16) for out in found[: len(widths)])
    for n, (value, true) in enumerate(zip(found, truth, strict=True)):
        assert relative_error(value, true) < (bound if n < values - 1 else BF16)


@pytest.mark.parametrize(("rows", "depth", "widths"), SHAPES)
def test_without_autocast_products_are_at_least_as_exact_as_those_of_torch(rows, depth, widths):
    x, weights = drawn(rows, depth), [drawn(width, depth) for width in widths]
    grads = [drawn(rows, width) for width in widths]
    found = values_and_gradients(x, weights, grads, False)
    theirs = values_and_gradients(x, weights, grads, False, NATIVE)
    truth = values_and_gradients(x.double(), [w.double() for w in weights], [g.double() for g in grads], False)
    for value, other, true in zip(found, theirs, truth, strict=True):
        assert relative_error(value, true) < max(1.2 * relative_error(other, true), 2.5e-7)


@pytest.mark.parametrize("shape", [(128, 64, 64), (301, 77, 65), (64, 700, 530)])
@pytest.mark.parametrize("layout", ["rows rows", "rows columns", "columns rows", "columns columns"])
def test_a_product_is_written_or_added_whatever_way_its_sides_lie(shape, layout):
    M, K, N = shape
    left, right = drawn(M, K), drawn(K, N)
    sides = [
        x if kind == "rows" else x.t().contiguous().t() for x, kind in zip((left, right), layout.split(), strict=True)
    ]
    truth, out = left.double() @ right.double(), drawn(M, N + 3)[:, :N]
    before = out.double()
    assert relative_error(tiles.mm(*sides), truth) < FP32
    assert relative_error(tiles.mm(*sides, out, 1), before + truth) < FP32
    assert relative_error(tiles.mm(*sides, out), truth) < FP32


def test_a_row_that_is_not_finite_gives_what_torch_gives():
    for x in (drawn(300, 96), drawn(300, 600)):
        x[3, 5], x[4, 5], x[290, 7], x[290, 8] = float("nan"), float("inf"), float("inf"), -3e38
        weight = drawn(80, x.shape[1])
        grad = drawn(300, 80)
        found = values_and_gradients(x, [weight], [grad], False)
        theirs = values_and_gradients(x, [weight], [grad], False, NATIVE)
        assert all(torch.allclose(*pair, 1e-4, 1e-4, equal_nan=True) for pair in zip(found, theirs, strict=True))


def test_under_autocast_a_row_that_is_not_finite_spoils_no_other():
    x = drawn(256, 96)
    x[3, 5], x[4, 5] = float("nan"), float("inf")
    with torch.autocast("cpu", torch.bfloat16):
        (out,) = CPU.linears(x, [drawn(64, 96)])
    assert not out[3:5].isfinite().any() and out[:3].isfinite().all() and out[5:].isfinite().all()


@pytest.mark.parametrize("autocast", [False, True])
def test_in_tiles_a_row_has_the_same_bits_whatever_stands_beside_it_and_whatever_the_threads(autocast):
    x, weights, threads = drawn(401, 300), [drawn(70, 300), drawn(65, 300)], torch.get_num_threads()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        both = CPU.linears(x, weights)
        if not HAS_TILES:
            assert all(torch.equal(*pair) for pair in zip(both, NATIVE.linears(x, weights), strict=True))
            return
        alone = [CPU.linears(x[100:300], [weight])[0] for weight in weights]
        try:
            torch.set_num_threads(1 if threads > 1 else 2)
            others = CPU.linears(x, weights)
        finally:
            torch.set_num_threads(threads)
    assert all(torch.equal(*pair) for pair in zip(both, others, strict=True))
    assert all(torch.equal(one[100:300], other) for one, other in zip(both, alone, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("hidden", "width"), [(192, 200), (70, 65)])
def test_experts_with_many_tokens_are_those_of_the_reference(autocast, hidden, width):
    N, E, k = 700, 4, 2
    x, weight = drawn(N, hidden).requires_grad_(), drawn(N, k).softmax(-1).requires_grad_()
    gate_up, down = drawn(E, 2 * width, hidden) * hidden**-0.5, drawn(E, hidden, width) * width**-0.5
    inputs = (x, gate_up.requires_grad_(), down.requires_grad_())
    index = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(n))[:k] for n in range(N)])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = CPU.expert_mlp(*inputs, index, weight)
    wide = [each.detach().double().requires_grad_() for each in (*inputs, weight)]
    truth = reference.expert_mlp(*wide[:3], index, wide[3])
    grad = drawn(*truth.shape)
    found = [out, *torch.autograd.grad(out, (*inputs, weight), grad.to(out.dtype))]
    wanted = [truth, *torch.autograd.grad(truth, wide, grad.double())]
    bound = 3 * BF16 if autocast else 2 * FP32
    assert all(relative_error(value, true) < bound for value, true in zip(found, wanted, strict=True))


def test_a_layer_with_hooks_is_called_as_a_module():
    layer, seen = nn.Linear(96, 64, bias=False), []
    x = drawn(256, 96)
    assert relative_error(product(layer, x, CPU), layer(x)) < FP32
    layer.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    assert product(layer, x, CPU).shape == seen.pop()


@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_layers_multiply_through_the_kernels(kind, monkeypatch):
    module = MLP(64, 96, CPU) if kind == "mlp" else Attention(64, 2, 1, 32, True, 1e-6, CPU)
    products = {name for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    monkeypatch.setattr(nn.Linear, "forward", None)  # calling one fails
    if kind == "mlp":
        assert module(drawn(200, 64)).shape == (200, 64) and len(products) == 3
    else:
        rope = drawn(1, 8, 32), drawn(1, 8, 32)
        q, k, v = module.heads_of(drawn(1, 8, 64), rope)
        assert (q.shape[2], k.shape[2], v.shape[2]) == (2, 1, 1) and len(products) == 4
