"""Linear layers call the kernels for their products; experts with many tokens are those of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blockdiff.kernels import IN_C
from blockdiff.layers.attention import Attention
from blockdiff.layers.linear import product
from blockdiff.layers.mlp import MLP
from blockdiff.spans import encode_spans
from tests.closeness import relative_error
from tests.oracles import expert_mlp as reference

pytestmark = pytest.mark.quick
FP32, BF16 = 5e-7, 8e-3  # relative errors in the 2-norm


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(("hidden", "width"), [(192, 200), (70, 65)])
def test_experts_with_many_tokens_are_those_of_the_reference(autocast, hidden, width):
    N, E, k = 700, 4, 2
    x, weight = drawn(N, hidden).requires_grad_(), drawn(N, k).softmax(-1).requires_grad_()
    gate_up, down = drawn(E, 2 * width, hidden) * hidden**-0.5, drawn(E, hidden, width) * width**-0.5
    inputs = (x, gate_up.requires_grad_(), down.requires_grad_())
    index = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(n))[:k] for n in range(N)])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = IN_C.expert_mlp(*inputs, index, weight)
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
    assert relative_error(product(layer, x, IN_C), layer(x)) < FP32
    layer.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    assert product(layer, x, IN_C).shape == seen.pop()


@pytest.mark.parametrize("kind", ["mlp", "attention"])
def test_layers_multiply_through_the_kernels(kind, monkeypatch):
    module = MLP(64, 96, IN_C) if kind == "mlp" else Attention(64, 2, 1, 32, True, 1e-6, IN_C)
    products = {name for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    monkeypatch.setattr(nn.Linear, "forward", None)  # calling one fails
    if kind == "mlp":
        assert module(drawn(200, 64)).shape == (200, 64) and len(products) == 3
    else:
        rope = drawn(1, 8, 32), drawn(1, 8, 32)
        spans = encode_spans(torch.zeros(1, 8, dtype=torch.int64))
        out, (k, v) = module(drawn(1, 8, 64), rope, spans, None)
        assert out.shape == (1, 8, 64) and k.shape == v.shape == (1, 8, 1, 32) and len(products) == 4
