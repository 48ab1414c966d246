"""The products of adapted layers: the outputs and gradients of their formula, one function, one cast a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.layers.linear import Linear, outputs
from blockdiff.layers.lora import LowRank
from blockdiff.layers.mlp import MLP
from blockdiff.layers.weights import FORMS
from blockdiff.models.adapters import cast_once
from tests.support.launches import Operations

pytestmark = pytest.mark.quick


def layers(
    count: int, dtype: torch.dtype = torch.float64, bias: bool = False, dropout: float = 0.0, form: str | None = None
) -> list[Linear]:
    """Adapted layers of 16 inputs, with ranks of 2, 3, ... and values that count; their weights are frozen."""
    torch.manual_seed(count)
    made = []
    for n in range(count):
        layer = Linear(16, 8 + 2 * n, bias=bias).to(dtype).requires_grad_(False)
        if form is not None:
            weight = layer.weight.detach()
            layer.store(FORMS[form])
            layer.hold("weight", FORMS[form].nearest(weight))
        layer.adapt(LowRank(2 + n, 3.0 + n, dropout=dropout))
        for letter in "AB":
            matrix = layer.get_parameter(f"lora_{letter}")
            wide = torch.promote_types(dtype, torch.float32)
            setattr(layer, f"lora_{letter}", torch.nn.Parameter(torch.randn(matrix.shape, dtype=wide)))
        made.append(layer)
    return made


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 5, 16, dtype=dtype, generator=torch.Generator().manual_seed(7)).requires_grad_()


def by_formula(some: Sequence[Linear], x: Tensor, dropped: Tensor | None = None) -> list[Tensor]:
    made = []
    for layer in some:
        held, low_rank = layer.held("weight"), layer.low_rank
        assert low_rank is not None
        weight = held.to(x.dtype) if layer.stored is None else held.decoded(x.dtype)
        A, B = layer.lora_A.to(x.dtype), layer.lora_B.to(x.dtype)
        added = low_rank.scale * F.linear(F.linear(x if dropped is None else dropped, A), B)
        made.append(F.linear(x, weight, layer._parameters["bias"]) + added)
    return made


def gradients(outs: Sequence[Tensor], x: Tensor, some: Sequence[Linear]) -> list[Tensor]:
    total = torch.cat([out.flatten() for out in outs]).double()
    total = (total * torch.linspace(-1, 2, len(total), dtype=torch.float64)).sum()
    trained = [parameter for layer in some for parameter in layer.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(total, [x, *trained]))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("trains", ["adapters", "all"])
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_the_formula(count, trains, bias):
    some, x = layers(count, bias=bias), tokens()
    for layer in some if trains == "all" else []:
        layer.requires_grad_(True)
    got, truth = outputs(some, x), by_formula(some, x)
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, truth, strict=True))
    for a, b in zip(gradients(got, x, some), gradients(truth, x, some), strict=True):
        assert a.dtype == b.dtype and (a - b).abs().max() < 1e-12 * (1 + b.abs().max())


def test_dropout_is_of_the_adapter_alone_and_each_layer_has_its_own():
    some, x = layers(2, dropout=0.5), tokens()
    torch.manual_seed(3)
    got = outputs(some, x)
    torch.manual_seed(3)
    drops = [F.dropout(x, 0.5) for _ in some]
    truth = [by_formula([layer], x, dropped)[0] for layer, dropped in zip(some, drops, strict=True)]
    for a, b in zip([*got, *gradients(got, x, some)], [*truth, *gradients(truth, x, some)], strict=True):
        assert (a - b).abs().max() < 1e-12 * (1 + b.abs().max())


@pytest.mark.parametrize("form", FORMS)
def test_adapters_over_stored_weights_have_the_gradients_of_the_formula(form):
    some, x = layers(2, torch.float32, form=form), tokens(torch.float32)
    got, truth = outputs(some, x), by_formula(some, x)
    for a, b in zip([*got, *gradients(got, x, some)], [*truth, *gradients(truth, x, some)], strict=True):
        assert (a - b).norm() < 1e-6 * b.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_errors_are_about_those_of_single_operations(dtype):
    some, x = layers(2, dtype), tokens(dtype)
    truth = by_formula(some, x.float())
    truth = [*truth, *gradients(truth, x, some)]
    errors = []
    for function in (outputs, by_formula):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outs = function(some, x)
        assert all(out.dtype is torch.bfloat16 for out in outs)
        errors.append([(a - b).norm() for a, b in zip([*outs, *gradients(outs, x, some)], truth, strict=True)])
    assert all(ours < 1.5 * theirs for ours, theirs in zip(*errors, strict=True))


def test_a_layer_with_a_hook_is_called_as_ever():
    some, x, seen = layers(2), tokens(), []
    some[1].register_forward_hook(lambda module, inputs, out: seen.append(out.shape))
    outputs(some, x)
    assert seen == [(2, 5, 10)]


def test_adapters_are_cast_once_within_a_step_and_anew_outside():
    mlp = MLP(16, 16, kernels=layers(1)[0].kernels).to(torch.bfloat16).requires_grad_(False)
    for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        layer.adapt(LowRank(2, 4.0))
        torch.nn.init.ones_(layer.lora_A), torch.nn.init.ones_(layer.lora_B)
    x = tokens(torch.bfloat16)

    def casts() -> int:
        with Operations() as operations:
            mlp(x)
        return operations.found["aten._to_copy.default"]

    with cast_once(mlp):
        assert [casts(), casts()] == [5, 0]
        before = mlp(x)
    assert [casts(), casts()] == [5, 5]
    with torch.no_grad():
        mlp.down_proj.lora_B.add_(1)
    with cast_once(mlp):
        assert not torch.equal(mlp(x), before)


def test_a_compiler_sees_the_whole_function():
    some, x = layers(3), tokens()
    truth = outputs(some, x)
    got = torch.compile(lambda x: outputs(some, x), backend="aot_eager", fullgraph=True)(x)
    pairs = zip([*got, *gradients(got, x, some)], [*truth, *gradients(truth, x, some)], strict=True)
    assert all((a - b).abs().max() < 1e-12 * (1 + b.abs().max()) for a, b in pairs)


def test_a_second_derivative_is_refused():
    some, x = layers(1), tokens()
    (out,) = outputs(some, x)
    with pytest.raises(BlockdiffError, match="second derivative"):
        torch.autograd.grad(out.sin().sum(), x, create_graph=True)
