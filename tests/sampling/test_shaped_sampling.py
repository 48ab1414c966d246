"""Filters and leave-one-out distributions on their way from a strategy to the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from blockdiff.checkpoint.generation import Generation
from blockdiff.diffusion.prediction import leave_one_out_bonus
from blockdiff.diffusion.schedule import Linear
from blockdiff.sampling import DiffusionSettings
from blockdiff.sampling.predict import PredictInputs, predict
from blockdiff.sampling.request import Request
from blockdiff.sampling.strategies import Ancestral, Composed, Never
from blockdiff.sampling.strategy import Canvases, Decision, Shape
from tests.scripted import ScriptedModel, random_script, sampler_for

pytestmark = pytest.mark.quick

L, V, BOS = 8, 40, 2


def model_and_inputs(B: int = 6) -> tuple[ScriptedModel, Tensor, Tensor, Tensor]:
    """A model whose hidden states are logits, such states, canvases and uniform numbers."""
    g = torch.Generator().manual_seed(B)
    hidden, canvas = torch.randn(B, L, V, generator=g) * 2, torch.randint(V, (B, L), generator=g)
    return ScriptedModel(random_script(L, V, {}, {}), L, V), hidden, canvas, torch.rand(B, L, generator=g)


def test_rows_of_unlike_shapes_are_shaped_each_in_its_own_way():
    model, hidden, canvas, uniform = model_and_inputs()
    temperature = torch.linspace(0.5, 1.5, 6)
    shapes = [Shape(0.5), Shape(0.7, top_k=2), Shape(0.9), Shape(1.1, top_p=0.3), Shape(1.3, top_k=2), Shape(1.5)]
    shapes[5] = Shape(1.5, alpha=0.5, is_of_others=True, is_of_seen=True)
    inputs = PredictInputs(hidden, canvas, temperature, uniform)
    together = predict(model, inputs, shapes=shapes, prediction="posterior")
    for row, shape in enumerate(shapes):
        own = PredictInputs(hidden[row, None], canvas[row, None], temperature[row, None], uniform[row, None])
        alone = predict(model, own, shapes=[shape])
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))
    log_p = (hidden[1] / temperature[1]).topk(2).values.log_softmax(-1)
    assert torch.allclose(together.entropy[1], -(log_p.exp() * log_p).sum(-1), atol=1e-5)
    plain = predict(model, inputs)
    assert torch.equal(together.soft_embedding, plain.soft_embedding)


@pytest.mark.parametrize("prediction,is_of_others,sign", [
    ("posterior", False, 0), ("posterior", True, -1), ("leave_one_out", False, 1), ("leave_one_out", True, 0),
])  # fmt: skip
def test_what_a_seen_token_says_of_itself_is_added_or_taken_away(prediction, is_of_others, sign):
    model, hidden, canvas, uniform = model_and_inputs()
    alpha, shape = 0.75, Shape(0.8, alpha=0.75, is_of_others=is_of_others, is_of_seen=True)
    inputs = PredictInputs(hidden, canvas, 0.8, uniform)
    stats = predict(model, inputs, shapes=[shape] * 6, prediction=prediction)
    bonus = float(leave_one_out_bonus(Linear(), torch.tensor([[1 - alpha]]), V))
    z = hidden + sign * bonus * torch.nn.functional.one_hot(canvas, V)
    log_p = (z / 0.8).log_softmax(-1)
    assert torch.equal(stats.argmax, log_p.argmax(-1))
    assert torch.allclose(stats.log_probability, log_p.gather(-1, canvas[..., None])[..., 0], atol=1e-4)


def test_under_mask_noise_a_seen_token_is_carried_over_whatever_alpha():
    model, hidden, canvas, uniform = model_and_inputs()
    canvas[:, ::2] = 7
    shape = Shape(0.8, alpha=0.75, is_of_others=True)
    inputs = PredictInputs(hidden, canvas, 0.8, uniform)
    shaped = predict(model, inputs, mask_id=7, shapes=[shape] * 6)
    plain = predict(model, inputs, mask_id=7)
    assert all(torch.equal(a, b) for a, b in zip(shaped, plain, strict=True))
    assert torch.equal(shaped.sample[:, 1::2], canvas[:, 1::2])


@dataclass(frozen=True)
class Watch:
    """Another strategy, whose canvases are kept in a list."""

    inner: Composed | Ancestral
    seen: tuple[list[Canvases]]

    def shape(self, step: int, steps: int) -> Shape:
        return self.inner.shape(step, steps)

    def decide(self, canvases: Canvases) -> Decision:
        self.seen[0].append(canvases)
        return self.inner.decide(canvases)

    def __hash__(self) -> int:
        return id(self)


def test_a_sampler_draws_from_what_the_filters_leave():
    model = ScriptedModel(random_script(L, V, {}, {}), L, V)
    generation = Generation(max_steps=4, max_new_tokens=L)
    for filters, is_argmax in (({"top_k": 1}, True), ({"min_p": 1.0}, True), ({}, False)):
        watch = Watch(Composed(stopping=Never(), **filters), ([],))
        sampler_for(model, None, generation, strategy=watch).generate([Request(0, tokens=[7])])
        equal = [torch.equal(canvases.stats.sample, canvases.stats.argmax) for canvases in watch.seen[0]]
        assert len(equal) == 4 and all(equal) == is_argmax


def test_a_leave_one_out_model_gives_its_posterior_to_the_strategy_that_asks_for_it():
    model = ScriptedModel(random_script(L, V, {}, {}), L, V)
    generation = Generation(max_steps=4, max_new_tokens=L)
    seen = {}
    for prediction in ("posterior", "leave_one_out"):
        watch = Watch(Ancestral(stopping=Never()), ([],))
        diffusion = DiffusionSettings(prediction=prediction)
        sampler_for(model, None, generation, diffusion, strategy=watch).generate([Request(0, tokens=[7])])
        seen[prediction] = watch.seen[0]
    first, loo = (seen[prediction][0].stats for prediction in seen)
    assert torch.equal(first.entropy, loo.entropy)  # all is noise: what is seen says nothing
    second, loo = (seen[prediction][2] for prediction in seen)
    bonus = float(leave_one_out_bonus(Linear(), torch.tensor([[0.5]]), V))
    z = model.script(7, 0, 2) + bonus * torch.nn.functional.one_hot(loo.tokens_BL[0], V)
    expected = torch.distributions.Categorical(logits=z / loo.temperature_B).entropy()
    assert torch.allclose(loo.stats.entropy[0], expected, atol=1e-4)
    assert not torch.allclose(second.stats.entropy[0], expected, atol=1e-2)
