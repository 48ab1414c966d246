"""The rules that strategies are made of, each against its definition and transformers' own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.diffusion_gemma import generation_diffusion_gemma as reference

from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RequestError
from blockdiff.sampling.request import Request
from blockdiff.sampling.sampler import Sampler
from blockdiff.sampling.strategies import Ancestral, Composed, Confident, EntropyBound, Quota, released
from blockdiff.sampling.strategy import Canvases, Decision, Shape
from tests.support.canvases import canvases_of
from tests.support.scripted import ScriptedModel, random_script, sampler_for
from tests.support.streamed import streamed

pytestmark = pytest.mark.quick

L, V = 8, 40
HALF = Shape(0.5)


def with_entropy(entropy_BL: Tensor) -> Canvases:
    canvases = canvases_of(torch.zeros(*entropy_BL.shape, 2))
    return replace(canvases, stats=canvases.stats._replace(entropy=entropy_BL))


def test_the_temperature_falls_from_t_max_and_never_reaches_t_min():
    temperatures = [Composed(t_min=0.4, t_max=0.8).shape(step, 48).temperature for step in range(48)]
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
    ours = Composed(stability=stability, confidence=0.3)
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


def kept(canvases: Canvases) -> Canvases:
    """The same with memory of its own."""
    return replace(canvases, previous_BL=canvases.previous_BL.clone(), kept_BL=canvases.kept_BL.clone())


class Watch:
    """The released rules, which remembers what it saw, keeps position 0 as it is and never stops."""

    def __init__(self) -> None:
        self.inner, self.seen = Composed(), []

    def shape(self, step: int, steps: int) -> Shape:
        return self.inner.shape(step, steps)

    def decide(self, canvases: Canvases) -> Decision:
        self.seen.append((kept(canvases), canvases.uniform_BL))
        keep_BL = self.inner.decide(canvases).keep_BL.clone()
        keep_BL[:, 0] = False
        stay_BL = torch.zeros_like(keep_BL)
        stay_BL[:, :2] = True
        return Decision(keep_BL, None, stay_BL)


def sampler_of(strategy: object, calm: dict[int, int] | None = None) -> Sampler:
    generation = Generation(max_steps=4, max_new_tokens=L)
    return sampler_for(ScriptedModel(random_script(L, V, {}, calm or {}), L, V), None, generation, strategy=strategy)


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
    expected = Composed(EntropyBound(0.3), t_min=0.1, t_max=0.9, stability=2, confidence=0.4)
    assert Sampler(model, None, generation).strategy == released(generation) == expected
    assert released(Generation()) == Composed()


def test_a_request_may_bring_its_own_strategy_and_a_mistake_in_it_is_its_own_error():
    never, bad = Composed(confidence=0), "quota:confidence=0.1,pace=bad"
    requests = [Request(0, tokens=[5]), Request(1, tokens=[5], strategy=never)]
    requests += [Request(2, tokens=[5], strategy="ddim:confidence=0"), Request(3, tokens=[5], strategy=bad)]
    requests += [Request(4, tokens=[5], strategy=Composed)]
    *answered, misspelt, no_object = streamed(sampler_of(None, calm={5: 0}), requests)
    assert [result.steps for result in answered] == [[2], [4], [4]]
    assert "pace takes one of linear, cosine" in misspelt.error
    assert "an object with shape() and decide()" in no_object.error


@dataclass(frozen=True)
class Given:
    """A strategy that gives whatever it was given."""

    shaped: Any = HALF
    made: Callable[[Tensor], Any] = Decision

    def shape(self, step: int, steps: int) -> Any:
        return self.shaped

    def decide(self, canvases: Canvases) -> Any:
        return self.made(canvases.stats.entropy < 1)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda keep_BL: keep_BL, "Tensor.*Decision"),
        (lambda keep_BL: Decision(keep_BL.float()), r"keep_BL .*torch\.float32 \[1, 8\].*torch\.bool \[1, 8\]"),
        (lambda keep_BL: Decision(keep_BL[0]), r"keep_BL .*torch\.bool \[8\].*torch\.bool \[1, 8\]"),
        (lambda keep_BL: Decision(keep_BL, stay_BL=keep_BL[:, :3]), r"stay_BL .*torch\.bool \[1, 3\]"),
        (lambda keep_BL: Decision(keep_BL, True), r"stop_B .*bool.*torch\.bool \[1\]"),
        (lambda keep_BL: Decision(keep_BL, final_BL=keep_BL), r"final_BL .*torch\.bool \[1, 8\].*torch\.int64"),
        (lambda keep_BL: Decision(keep_BL, final_BL=keep_BL[:, :3].long()), r"final_BL .*torch\.int64 \[1, 3\]"),
    ],
)
def test_a_decision_that_is_none_of_these_canvases_is_one_line(made, words):
    with pytest.raises(RequestError, match=rf"^strategy Given: decide\(\) .*{words}"):
        sampler_of(Given(made=made)).generate([Request(0, tokens=[5])])


WRONG_SHAPES = {
    "temperature must be a number more than 0, got -1.0": dict(temperature=-1.0),
    "temperature must be a number more than 0, got 0.0": dict(temperature=0.0),
    "temperature must be a number more than 0, got nan": dict(temperature=math.nan),
    "temperature must be a number more than 0, got inf": dict(temperature=math.inf),
    "temperature must be a number more than 0, got '1'": dict(temperature="1"),
    "top_k must be an integer of at least 1, got 0": dict(top_k=0),
    "top_k must be an integer of at least 1, got 2.5": dict(top_k=2.5),
    "top_p must be a number more than 0 and at most 1, got 0.0": dict(top_p=0.0),
    "min_p must be a number from 0 to 1, got 2": dict(min_p=2),
}


@dataclass(frozen=True)
class Shaped(Given):
    """A strategy that makes a shape of what it was given."""

    def shape(self, step: int, steps: int) -> Any:
        return Shape(**(dict(temperature=1.0) | dict(self.shaped)))


@pytest.mark.parametrize("said", WRONG_SHAPES)
def test_a_shape_that_no_step_can_draw_from_is_the_error_of_its_request(said):
    wrong, float_, right = streamed(
        sampler_of(None),
        [
            Request(0, tokens=[5], strategy=Shaped(tuple(WRONG_SHAPES[said].items()))),
            Request(1, tokens=[5], strategy=Given(0.5), repetition_penalty=1.5),
            Request(2, tokens=[5], strategy=Given()),
        ],
    )
    assert wrong.error.startswith(f"strategy Shaped: shape() gave no shape for step 0: {said}")
    assert float_.error.startswith("strategy Given: shape() gave a float, not a Shape, for step 0")
    assert right.error is None


@pytest.mark.parametrize("token", [-1, 9999])
def test_a_committed_token_that_the_model_has_not_is_the_error_of_its_request(token):
    def ended(keep_BL: Tensor) -> Decision:
        return Decision(keep_BL, torch.ones_like(keep_BL[:, 0]), final_BL=torch.full(keep_BL.shape, token))

    wrong, right = sampler_of(None).generate(
        [Request(0, tokens=[5], strategy=Given(made=ended)), Request(1, tokens=[5], strategy=Given())]
    )
    assert f"decide() gave token {token} in final_BL, which is none of the model's" in wrong.error
    assert right.error is None


def test_a_strategy_that_is_not_frozen_says_so():
    @dataclass
    class Thawed:
        shape = decide = print

    with pytest.raises(RequestError, match=r"Thawed .*@dataclass\(frozen=True\)"):
        sampler_of(Thawed())


def test_equal_strategies_are_one_strategy():
    assert len({Composed(), Composed(EntropyBound(0.1)), Composed(EntropyBound(0.2))}) == 2


@pytest.mark.parametrize(
    "wrong", [dict(t_min=0.9), dict(t_min=0, t_max=0), dict(t_max=math.inf), dict(stability=-1), dict(confidence=-0.1)]
)
def test_numbers_of_a_strategy_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least 0"):
        Composed(**wrong)


def test_a_temperature_without_a_fall_is_the_same_at_every_step():
    assert {Composed(t_min=0.75, t_max=0.75).shape(step, 7).temperature for step in range(7)} == {0.75}


def test_a_canvas_ends_by_stability_by_confidence_by_both_or_never():
    seen = with_entropy(torch.tensor([[0.1, 0.0], [0.1, 0.0], [0.1, 0.0], [0.3, 0.5]]))
    seen = replace(seen, unchanged_B=torch.tensor([0, 1, 2, 2]))
    assert Composed(stability=2, confidence=math.inf).stop(seen).tolist() == [False, False, True, True]
    assert Composed(stability=0, confidence=0.06).stop(seen).tolist() == [True, True, True, False]
    assert Composed(stability=1, confidence=0.06).stop(seen).tolist() == [False, True, True, False]
    assert Composed(confidence=0).stop(seen) is None


def with_probability(p_BL: Tensor, **given: object) -> Canvases:
    canvases = canvases_of(torch.zeros(*p_BL.shape, 2), **given)
    return replace(canvases, stats=canvases.stats._replace(log_probability=p_BL.log()))


def test_confident_samples_are_kept_and_at_least_one_that_was_not():
    p = torch.tensor([[0.95, 0.2, 0.91, 0.3], [0.1, 0.2, 0.4, 0.3], [0.99, 0.2, 0.3, 0.1]])
    kept = torch.tensor([[False] * 4, [False] * 4, [True, False, True, False]])
    expected = [[True, False, True, False], [False, False, True, False], [True, True, False, False]]
    assert Confident(0.9).accept(with_probability(p, kept_BL=kept)).keep_BL.tolist() == expected


@pytest.mark.parametrize("pace,wanted", [("linear", [2, 4, 5]), ("cosine", [1, 3, 5])])
def test_a_quota_is_reached_step_by_step_by_the_likeliest(pace, wanted):
    p = torch.tensor([[0.3, 0.9, 0.1, 0.8, 0.8]])
    order = [1, 3, 4, 0, 2]  # equal ones in the order of their positions
    for step, count in enumerate(wanted):
        seen = with_probability(p, step_B=torch.tensor([step]), steps_B=torch.tensor([3]))
        keep = Quota(pace).accept(seen).keep_BL[0]
        assert keep.nonzero().flatten().tolist() == sorted(order[:count])


def law_of(strategy: Ancestral, step: int, steps: int, seen: int, x0: int, pi: Tensor) -> Tensor:
    """The probabilities of the next token given what is seen and what is predicted, from a fine grid of draws."""
    count = 20_000
    uniform = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    canvases = canvases_of(
        torch.nn.functional.one_hot(torch.full((1, count), x0), len(pi)) * 99.0,
        step_B=torch.tensor([step]),
        steps_B=torch.tensor([steps]),
        second_BL=uniform[None].float(),
        tokens_BL=torch.full((1, count), seen),
        noise_probability=float(pi[0]),
    )
    decision = strategy.decide(canvases)
    stands = decision.standing(canvases)[decision.kept_BL]
    law = torch.bincount(stands, minlength=len(pi)).double() / count
    return law + pi * (1 - law.sum())


@pytest.mark.parametrize("is_mask", [False, True])
def test_a_ddim_step_has_the_law_of_the_posterior_with_the_prediction_summed_out(is_mask):
    """The law adds up p(x_0) q(x_t | x_s) q(x_s | x_0) / q(x_t | x_0) over x_0, from the forward process alone.

    The routes' masses were compared with diffusers' DiscreteDDIMScheduler (0.42.1) once.
    """
    size, steps, step = 4, 5, 2
    alpha_t, alpha_s = step / steps, (step + 1) / steps
    pi = torch.tensor([0.0, 0.0, 0.0, 1.0] if is_mask else [1 / size] * size).double()
    eye = torch.eye(size, dtype=torch.float64)
    to_t, to_s = (alpha * eye + (1 - alpha) * pi for alpha in (alpha_t, alpha_s))  # [x_0, x]
    between = alpha_t / alpha_s * eye + (1 - alpha_t / alpha_s) * pi  # [x_s, x_t]
    predicted = torch.tensor([0.5, 0.3, 0.2, 0.0] if is_mask else [0.4, 0.3, 0.2, 0.1]).double()
    for seen in (0, 2, 3):
        # Carry-over: under mask noise what is visible is true.
        p = eye[seen] if is_mask and seen < 3 else predicted
        possible = p.nonzero().flatten().tolist()
        expected = sum(p[x0] * between[:, seen] * to_s[x0] / to_t[x0, seen] for x0 in possible)
        assert expected.sum() == pytest.approx(1.0)
        got = sum(p[x0] * law_of(Ancestral(), step, steps, seen, x0, pi) for x0 in possible)
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)


def test_the_last_ddim_step_keeps_every_prediction():
    seen = canvases_of(torch.randn(2, 50, 7), steps_B=torch.tensor([6, 3]), step_B=torch.tensor([5, 2]))
    for canvases in (seen, replace(seen, noise_probability=0.0)):
        assert Ancestral().decide(canvases).keep_BL.all()
