"""Parameter groups and their learning rates, the optimiser, gradient norm and clipping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from blockdiff.errors import RunError
from blockdiff.sampling import Engine, Generation, Request, Result
from blockdiff.training.optimiser import (
    build,
    clip_gradients,
    gradient_norm,
    parameter_groups,
    set_lr,
    trainable,
)
from tests.support.families import small_model
from tests.support.toy_objective import ToyObjective

pytestmark = pytest.mark.quick


def test_weight_decay_leaves_norms_scales_and_the_embedding_table_alone():
    module = ToyObjective()
    decayed, free = parameter_groups(module, weight_decay=0.5)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == ["mix.weight", "signal.weight"]
    assert sorted(names[id(p)] for p in free["params"]) == ["norm", "signal.bias", "vocabulary.table"]
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.5, 0.0)


def test_frozen_parameters_are_in_no_group():
    module = ToyObjective()
    module.signal.requires_grad_(False)
    assert list(trainable(module)) == ["norm", "vocabulary.table", "mix.weight"]
    assert sum(len(group["params"]) for group in parameter_groups(module, 0.1)) == 3


def test_the_learning_rate_reaches_optimisers_that_keep_it_in_a_tensor():
    optimiser = build(ToyObjective(), lr=1.0)
    held = torch.tensor(1.0)
    optimiser.param_groups[0]["lr"] = held
    set_lr(optimiser, 0.25)
    assert held == 0.25 and optimiser.param_groups[0]["lr"] is held


def test_adamw_is_fused_and_an_unknown_optimiser_or_nothing_to_train_is_refused():
    assert build(ToyObjective(), lr=1.0).defaults["fused"] is True
    with pytest.raises(RunError, match=r"'lion'.*adamw, muon or adamw_8bit"):
        build(ToyObjective(), name="lion", lr=1.0)
    with pytest.raises(RunError, match="no parameter"):
        build(ToyObjective().requires_grad_(False), lr=1.0)


def test_adamw_takes_the_step_of_its_formula():
    module = nn.Linear(3, 2, bias=False)
    before = module.weight.detach().clone()
    module.weight.grad = torch.tensor([[1.0, -2.0, 0.5], [0.1, 0.0, 3.0]])
    build(module, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.2).step()
    expected = before * (1 - 0.1 * 0.2) - 0.1 * module.weight.grad.sign()
    torch.testing.assert_close(module.weight.detach(), expected, rtol=1e-5, atol=1e-6)


def test_the_gradient_norm_is_over_all_parameters_and_skips_those_without_a_gradient():
    a, b, c = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert gradient_norm([a, b, c]) == pytest.approx(5.0)
    assert gradient_norm([c]) == 0.0


def test_the_gradient_norm_of_bfloat16_gradients_is_an_fp32_number():
    p, q = (nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for n in (2, 1))
    p.grad, q.grad = torch.tensor([1.0, 16.0]).bfloat16(), torch.tensor([1.0]).bfloat16()
    assert gradient_norm([p, q]) == pytest.approx(math.sqrt(258), rel=1e-6)


def test_a_gradient_that_is_not_finite_shows_in_the_norm():
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([1.0, float("nan")])
    assert math.isnan(gradient_norm([p]))


@pytest.mark.parametrize(("limit", "expected"), [(1.0, [0.6, 0.8]), (10.0, [3.0, 4.0]), (0.0, [3.0, 4.0])])
def test_clipping_scales_down_to_the_limit_and_never_up(limit, expected):
    p, unused = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    p.grad = torch.tensor([3.0, 4.0])
    clip_gradients([p, unused], gradient_norm([p, unused]), limit)
    assert p.grad.tolist() == pytest.approx(expected)
    assert unused.grad is None


@pytest.mark.parametrize("has_notice", [True, False])
def test_after_a_step_of_a_foreign_fused_optimiser_prefixes_are_encoded_anew(has_notice):
    model = small_model("llama", dtype=torch.float64)
    generation = Generation(max_new_tokens=4, eos_ids=(1,))
    make = lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True)  # noqa: E731
    optimiser = build(model, name=make, lr=0.05) if has_notice else make(model.parameters())
    engine = Engine(model, None, generation, page_tokens=4)
    before = answer(engine, 0)
    assert answer(engine, 1).cached_tokens == 36
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1), dtype=parameter.dtype)
    optimiser.step()
    after, fresh = answer(engine, 2), answer(Engine(model, None, generation, page_tokens=4), 2)
    assert before.score != fresh.score and fresh.cached_tokens == 0
    # without notice it shares a prefix that the weights before the step have encoded
    assert (after.cached_tokens, after.score == fresh.score) == ((0, True) if has_notice else (36, False))


def answer(engine: Engine, number: int) -> Result:
    """The answer of an engine to a prompt of 40 tokens."""
    engine.submit(Request(number, tokens=list(range(5, 45)), scores=True))
    while engine.step():
        pass
    (result,) = (event for event in engine.events() if isinstance(event, Result))
    return result
