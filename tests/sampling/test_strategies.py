"""The rules that strategies are made of, each against its definition and transformers' own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.diffusion_gemma import generation_diffusion_gemma as reference

from blockdiff.checkpoint.generation import Generation
from blockdiff.sampling.request import Request
from blockdiff.sampling.sampler import Sampler
from blockdiff.sampling.strategies import Composed, released
from blockdiff.sampling.strategies.acceptance import EntropyBound
from blockdiff.sampling.strategies.stopping import StableAndConfident
from blockdiff.sampling.strategies.temperature import LinearTemperature
from blockdiff.sampling.strategy import Canvases, Decision, Shape
from tests.canvases import canvases_of
from tests.scripted import ScriptedModel, random_script

pytestmark = pytest.mark.quick

L, V = 8, 40


def with_entropy(entropy_BL: Tensor) -> Canvases:
    canvases = canvases_of(torch.zeros(*entropy_BL.shape, 2))
    return replace(canvases, stats=canvases.stats._replace(entropy=entropy_BL))


def test_the_temperature_falls_from_t_max_and_never_reaches_t_min():
    temperatures = [LinearTemperature(0.4, 0.8).at(step, 48) for step in range(48)]
    assert temperatures[0] == torch.tensor(0.8) and abs(temperatures[-1] - 0.40833) < 1e-5
    processor = reference.LinearTemperatureScheduleLogitsProcessor(0.4, 0.8, 48)
    for step, temperature in enumerate(temperatures):
        remaining = torch.tensor(48 - step, dtype=torch.int32)
        assert processor(None, torch.tensor(1.0), remaining) == 1 / torch.tensor(temperature)


def test_acceptance_follows_the_bound_on_a_small_example():
    entropy = torch.tensor([[0.5, 0.04, 0.06, 0.01, 9.0], [3.0, 2.0, 4.0, 5.0, 6.0], [0.0] * 5])
    # Sums of the smaller ones: 0, .01, .05, .11 > .1; in row two even the second is over.
    expected = [[False, True, True, True, False], [False, True, False, False, False], [True] * 5]
    assert EntropyBound(0.1).accept(with_entropy(entropy)).keep_BL.tolist() == expected


def test_acceptance_by_entropy_equals_transformers_on_random_logits():
    generator = torch.Generator().manual_seed(1)
    for trial in range(50):
        scale = 10.0 ** (trial % 4 - 1)
        logits = torch.randn(4, 12, 30, generator=generator) * scale
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        sampler = reference.EntropyBoundSampler(reference.EntropyBoundSamplerConfig(0.1), 12, 30, 48)
        sampler.accept_canvas(torch.zeros(4, 12).long(), torch.ones(4, 12).long(), logits, 1)
        assert torch.equal(EntropyBound(0.1).accept(with_entropy(entropy)).keep_BL, sampler.accepted_token_mask)


@pytest.mark.parametrize("stability", [0, 1, 2, 3])
def test_stopping_equals_transformers_step_for_step(stability):
    generator = torch.Generator().manual_seed(stability)
    theirs = reference.StableAndConfidentStoppingCriteria(stability, 0.3)
    ours = StableAndConfident(stability, 0.3)
    previous, unchanged, stops = torch.full((8, 5), -1), torch.zeros(8, dtype=torch.int64), 0
    for _ in range(40):
        # Two peaks that rarely move, at two sharpnesses: argmax and confidence change on their own.
        sharp = torch.where(torch.rand(8, 1, 1, generator=generator) < 0.6, 9.0, 2.0)
        peak = (torch.rand(8, 1, generator=generator) < 0.3).long().expand(8, 5)
        logits = torch.nn.functional.one_hot(peak, 6) * sharp
        unchanged = (unchanged + 1) * (peak == previous).all(-1)
        stop = ours.stop(canvases_of(logits, previous_BL=previous, unchanged_B=unchanged))
        previous = peak
        assert torch.equal(stop, theirs(peak, logits))
        stops += int(stop.sum())
    assert 0 < stops < 8 * 40


class Watch:
    """The released rules, which remembers what it saw, keeps position 0 as it is and never stops."""

    def __init__(self) -> None:
        self.inner, self.seen = Composed(), []

    def shape(self, step: int, steps: int) -> Shape:
        return self.inner.shape(step, steps)

    def decide(self, canvases: Canvases) -> Decision:
        self.seen.append((canvases, canvases.uniform_BL))
        keep_BL = self.inner.decide(canvases).keep_BL.clone()
        keep_BL[:, 0] = False
        stay_BL = torch.zeros_like(keep_BL)
        stay_BL[:, :2] = True
        return Decision(keep_BL, None, stay_BL)


def sampler_of(strategy: object, calm: dict[int, int] | None = None) -> Sampler:
    generation = Generation(max_steps=4, max_new_tokens=L)
    return Sampler(ScriptedModel(random_script(L, V, {}, calm or {}), L, V), None, generation, strategy=strategy)


def test_a_strategy_sees_the_canvas_and_what_it_kept_and_decides_what_becomes_of_it():
    watch = Watch()
    requests = [Request(n, tokens=[n], seed=n) for n in (10, 11)]
    results = sampler_of(watch).generate(requests)
    assert [result.steps for result in results] == [[4], [4]]  # None stops no canvas before its last step
    assert [canvases.step_B.tolist() for canvases, _ in watch.seen] == [[n, n] for n in range(4)]
    before = None
    for canvases, _ in watch.seen:
        assert list(canvases.ids) == [10, 11] and canvases.steps_B.tolist() == [4, 4]
        if before is None:
            assert not canvases.kept_BL.any() and (canvases.previous_BL == -1).all()
        else:
            keep_BL = watch.inner.decide(before).keep_BL
            keep_BL[:, 0] = False
            assert torch.equal(canvases.previous_BL, before.stats.argmax)
            assert canvases.kept_BL[:, :2].all() and torch.equal(canvases.kept_BL[:, 2:], keep_BL[:, 2:])
            assert torch.equal(canvases.tokens_BL[:, 0], before.tokens_BL[:, 0])
            assert torch.equal(canvases.tokens_BL[keep_BL], before.stats.sample[keep_BL])
        before = canvases
    assert results[0].tokens == before.stats.argmax[0].tolist()


def test_the_second_uniform_numbers_have_an_address():
    (watch, alone), request = (Watch(), Watch()), Request(10, tokens=[10], seed=5)
    sampler_of(watch).generate([Request(11, tokens=[11], seed=4), request])
    sampler_of(alone).generate([request])
    drawn = [uniform_BL[1] for _, uniform_BL in watch.seen]
    assert all(torch.equal(a, b[0]) for a, (_, b) in zip(drawn, alone.seen, strict=True))
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == 4


def test_without_a_strategy_the_released_rules_have_the_numbers_of_the_settings():
    generation = Generation(entropy_bound=0.3, t_min=0.1, t_max=0.9, stability=2, confidence=0.4)
    model = ScriptedModel(random_script(L, V, {}, {}), L, V)
    expected = Composed(EntropyBound(0.3), LinearTemperature(0.1, 0.9), StableAndConfident(2, 0.4))
    assert Sampler(model, None, generation).strategy == released(generation) == expected
    assert released(Generation()) == Composed()


def test_equal_strategies_are_one_strategy():
    assert len({Composed(), Composed(EntropyBound(0.1)), Composed(EntropyBound(0.2))}) == 2
