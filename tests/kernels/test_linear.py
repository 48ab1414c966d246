"""Linear layers and their parts; experts with many tokens are those of the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blockdiff.kernels import IN_C
from blockdiff.layers.attention import Attention
from blockdiff.layers.linear import Linear
from blockdiff.layers.lora import LowRank
from blockdiff.layers.mlp import MLP
from blockdiff.layers.weights import FORMS
from blockdiff.spans import encode_spans
from tests.oracles import expert_mlp as reference
from tests.support.closeness import relative_error

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


def test_a_linear_layer_of_torch_becomes_one_of_ours_with_the_same_parameters():
    layer = nn.Linear(96, 64).eval()
    ours = Linear.of(layer)
    assert ours.weight is layer.weight and ours.bias is layer.bias and not ours.training
    assert (
        torch.equal(ours(drawn(256, 96)), layer(drawn(256, 96)))
        and ours.state_dict().keys() == layer.state_dict().keys()
    )


def test_a_forward_hook_on_a_layer_of_attention_is_called():
    module, seen = Attention(64, 2, 1, 32, True, 1e-6, IN_C), []
    module.o_proj.register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    attended(module)
    assert seen == [(1, 8, 64)]


@pytest.mark.parametrize("form", [None, "fp8"])
def test_the_gated_half_of_an_mlp_is_one_op_unless_a_layer_does_more_than_multiply(form):
    module, calls = MLP(64, 96, IN_C), []
    kernels = IN_C.replaced(gated_linear=lambda *call: calls.append(call) or IN_C.gated_linear(*call))
    module.kernels = kernels
    if form is not None:
        for each in (module.gate_proj, module.up_proj):
            weight = each.weight.detach()
            each.store(FORMS[form])
            each.hold("weight", FORMS[form].nearest(weight))
    out = module(drawn(200, 64))
    assert len(calls) == 1
    assert (
        relative_error(
            out,
            module.down_proj(
                IN_C.gated(*(each(drawn(200, 64)) for each in (module.gate_proj, module.up_proj)), "gelu_tanh")
            ),
        )
        < FP32
    )
    module.up_proj.adapt(LowRank(2, 4.0))
    for parameter in (module.up_proj.lora_A, module.up_proj.lora_B):
        parameter.data.zero_()
    assert relative_error(module(drawn(200, 64)), out) < FP32 and len(calls) == 1


def attended(module: Attention) -> tuple[Tensor, tuple[Tensor, ...]]:
    spans = encode_spans(torch.zeros(1, 8, dtype=torch.int64))
    return module(drawn(1, 8, 64), (drawn(1, 8, 32), drawn(1, 8, 32)), spans, None)


def test_layers_give_their_products():
    out, (k, v) = attended(Attention(64, 2, 1, 32, True, 1e-6, IN_C))
    assert out.shape == (1, 8, 64) and k.shape == v.shape == (1, 8, 1, 32)
    assert MLP(64, 96, IN_C)(drawn(200, 64)).shape == (200, 64)
