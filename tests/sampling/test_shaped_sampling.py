"""Filters on their way from a strategy to the tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.predict import PredictInputs, predict
from blockdiff.sampling.request import Request
from blockdiff.sampling.strategies import Composed
from blockdiff.sampling.strategy import Canvases, Decision, Shape
from tests.support.scripted import ScriptedModel, random_script, sampler_for

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
    inputs = PredictInputs(hidden, canvas, temperature, uniform)
    together = predict(model, inputs, shapes=shapes)
    for row, shape in enumerate(shapes):
        own = PredictInputs(hidden[row, None], canvas[row, None], temperature[row, None], uniform[row, None])
        alone = predict(model, own, shapes=[shape])
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(together, alone, strict=True))
    log_p = (hidden[1] / temperature[1]).topk(2).values.log_softmax(-1)
    assert torch.allclose(together.entropy[1], -(log_p.exp() * log_p).sum(-1), atol=1e-5)
    plain = predict(model, inputs)
    assert torch.equal(together.soft_embedding, plain.soft_embedding)


@dataclass(frozen=True)
class Watch:
    """Another strategy, whose canvases are kept in a list."""

    inner: Composed
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
        watch = Watch(Composed(confidence=0, **filters), ([],))
        sampler_for(model, None, generation, strategy=watch).generate([Request(0, tokens=[7])])
        equal = [torch.equal(canvases.stats.sample, canvases.stats.argmax) for canvases in watch.seen[0]]
        assert len(equal) == 4 and all(equal) == is_argmax
