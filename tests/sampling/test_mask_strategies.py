"""Strategies of mask canvases: which places a step fills or edits, when a canvas ends, and temperature 0."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blockdiff.checkpoint.diffusion import DiffusionSettings
from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RequestError
from blockdiff.sampling.request import Request
from blockdiff.sampling.strategies import Composed, adjusted, as_strategy
from blockdiff.sampling.strategy import Canvases, Strategy
from blockdiff.sampling.trace import Recorder
from tests.support.canvases import canvases_of
from tests.support.scripted import ScriptedModel, sampler_for

pytestmark = pytest.mark.quick

L, V, MASK, EOS = 4, 12, 11, 10


def strategy(text: str) -> Strategy:
    return as_strategy(text, Generation(max_steps=L))


def masked(probabilities: list[float], tokens: list[int], best: Tensor | None = None, **given: object) -> Canvases:
    """A canvas of masks and other tokens, the best tokens of these probabilities at its places."""
    p_BL, tokens_BL = torch.tensor([probabilities]), torch.tensor([tokens])
    canvases = canvases_of(torch.zeros(1, len(tokens), V), tokens_BL=tokens_BL, steps_B=torch.tensor([len(tokens)]))
    is_masked_BL = tokens_BL == MASK
    best_BL = torch.full_like(tokens_BL, 7) if best is None else best
    stats = canvases.stats._replace(
        best=best_BL,
        argmax=best_BL.where(is_masked_BL, tokens_BL),
        sample=best_BL.where(is_masked_BL, tokens_BL),
        log_probability=p_BL.log() * is_masked_BL,
        best_log_probability=p_BL.log(),
    )
    values = dict(stats=stats, is_masked_BL=is_masked_BL, kept_BL=~is_masked_BL, noise_probability=0.0) | given
    return replace(canvases, **values)


def filled(canvases: Canvases, text: str) -> list[int]:
    """The masks that a step fills; what is visible has to stand."""
    decision = strategy(text).decide(canvases)
    assert (decision.kept_BL | canvases.is_masked_BL).all()
    return (decision.keep_BL & canvases.is_masked_BL)[0].nonzero().flatten().tolist()


def test_confident_fills_masks_above_the_threshold_and_at_least_so_many_of_the_likeliest():
    seen = masked([0.3, 0.95, 0.6, 0.91, 0.2], [MASK, MASK, 5, MASK, MASK])
    assert filled(seen, "confident:threshold=0.9") == [1, 3]
    assert filled(seen, "confident:threshold=0.99") == [1]  # a visible token is no new one
    assert filled(seen, "confident:threshold=0.93,least=3") == [0, 1, 3]
    certain = masked([1.0, 1.0, 0.1, 0.2], [MASK, 4, 4, MASK])
    assert filled(certain, "confident:threshold=0.9") == [0]


@pytest.mark.parametrize(
    ("steps", "text", "expected"),
    [
        (5, "quota", [[1], [1], [1], [1], [1]]),
        (2, "quota", [[1, 3, 4], [1, 3]]),  # 5 places in 2 steps: 3, then 2
        (3, "sequential", [[0, 1], [0, 1], [0]]),
        (9, "sequential", [[0], [0], [0], [0], [0]]),  # one at least
        (3, "quota:pace=cosine", [[1], [1, 3], [1, 3]]),
    ],
)
def test_quota_and_sequential_fill_so_many_masks_at_each_step(steps, text, expected):
    for step, places in enumerate(expected):
        seen = masked([0.3, 0.9, 0.4, 0.8, 0.5], [MASK] * 5)
        seen = replace(seen, step_B=torch.tensor([step]), steps_B=torch.tensor([steps]))
        assert filled(seen, text) == places
    begun = masked([1.0, 0.9, 0.4, 0.8, 0.5], [2, 2, MASK, MASK, MASK], steps_B=torch.tensor([5]))
    assert filled(begun, text) == ([3] if "quota" in text else [2])  # given tokens do not count


@pytest.mark.parametrize("text", ["confident:confidence=0", "quota:confidence=0", "sequential:confidence=0"])
def test_a_canvas_ends_where_no_mask_is_left_or_none_before_an_end(text):
    whole = masked([0.99, 0.99, 0.99], [MASK, 4, 4])
    decision = strategy(text).decide(whole)
    assert decision.stop_B.tolist() == [True] and decision.final_BL.tolist() == [[7, 4, 4]]
    open_ = masked([0.99, 0.2, 0.1], [MASK, 4, MASK], steps_B=torch.tensor([3]))
    assert strategy(text).decide(open_).stop_B.tolist() == [False]
    assert strategy(text).decide(replace(open_, end_ids=(4,))).stop_B.tolist() == [True]
    assert strategy(text).decide(replace(open_, end_ids=(7,))).stop_B.tolist() == [True]
    of_prompt = dict(end_ids=(4,), is_pinned_BL=torch.tensor([[False, True, False]]))
    assert strategy(text).decide(replace(open_, **of_prompt)).stop_B.tolist() == [False]
    before = masked([0.2, 0.1, 0.99], [MASK, MASK, 4], end_ids=(4,), steps_B=torch.tensor([3]))
    assert strategy(text).decide(before).stop_B.tolist() == [False]


def test_joint_threshold_edits_visible_tokens_that_were_not_given_and_ends_without_edits():
    text = "joint_threshold:threshold=0.8,edit_threshold=0.9,post_steps=3"
    given = dict(is_pinned_BL=torch.tensor([[True, False, False, False]]))
    seen = masked([0.95, 0.95, 0.85, 0.7], [3, 3, 3, MASK], **given)
    decision = strategy(text).decide(seen)
    assert decision.standing(seen)[decision.kept_BL].tolist() == [3, 7, 3, 7]  # the mask is the likeliest one
    assert decision.stop_B.tolist() == [False]  # the step saw a mask
    for whole, tokens, stops in ((1, [3, 3, 3, 7], False), (1, [3, 7, 3, 7], True), (3, [3, 3, 3, 7], True)):
        seen = masked([0.95, 0.95, 0.85, 0.99], tokens, whole_B=torch.tensor([whole]), **given)
        decision = strategy(text).decide(seen)
        assert decision.stop_B.tolist() == [stops] and decision.final_BL.tolist() == [[3, 7, 3, 7]]
    with pytest.raises(RequestError, match="joint_threshold"):
        strategy(text).decide(canvases_of(torch.zeros(1, L, V)))


def sampler(script: Tensor, text: str, max_steps: int = L):
    """A sampler of a mask model with the same logits [L, V] at every step."""
    generation = Generation(max_steps=max_steps, max_new_tokens=L, eos_ids=(EOS,))
    model = ScriptedModel(lambda *_: script, L, V)
    return sampler_for(
        model, None, generation, DiffusionSettings(corruption="mask", mask_id=MASK), strategy=strategy(text)
    )


def flat(peaks: list[tuple[int, float]]) -> Tensor:
    """Logits whose places have these likeliest tokens, so much above all others."""
    z = torch.zeros(len(peaks), V)
    for place, (token, height) in enumerate(peaks):
        z[place, token] = height
    return z


def test_greedy_takes_the_likeliest_token_by_its_probability_at_temperature_1():
    """At temperature 8 each of the tokens is nearly as likely as the others; the mask is never among them."""
    script = flat([(3, 5.0), (4, 2.5), (5, 5.0), (6, 1.0)])
    script[:, MASK] = 9.0
    for temperature in ("t_min=8,t_max=8", "t_min=1,t_max=1", "t_min=8,t_max=8,top_k=2"):
        asked = sampler(script, f"confident:threshold=0.9,confidence=0,{temperature},greedy=true")
        recorder = Recorder()
        [result] = asked.generate([Request(0, tokens=[1], seed=3)], on_step=recorder.step)
        assert result.tokens == [3, 4, 5, 6] and result.steps == [3]
        kept = [step.is_accepted for step in recorder.traces[0].steps]
        assert [sum(each) for each in kept] == [2, 3, 4] and kept[0] == [True, False, True, False]
    assert (
        sampler(script, "confident:confidence=0,t_min=8,t_max=8").generate(
            [Request(n, tokens=[1], seed=n) for n in range(4)]
        )
        != [result] * 4
    )


def test_masks_are_gone_after_as_many_steps_as_places_and_no_step_more_is_run():
    script = flat([(3, 1.0), (4, 1.1), (5, 1.2), (6, 1.3)])
    for text in ("confident", "quota", "sequential", "entropy_bound", "joint_threshold:edit_threshold=0.99"):
        one, last = sampler(script, f"{text.partition(':')[0]}:confidence=0,greedy=true", 9), text.startswith("joint")
        [result] = one.generate([Request(0, tokens=[1])])
        assert result.tokens == [3, 4, 5, 6] and result.steps == [L + last]


def test_a_canvas_that_ends_before_its_masks_do_has_the_tokens_up_to_the_end():
    script = flat([(3, 9.0), (EOS, 9.0), (5, 0.5), (6, 0.1)])
    [result] = sampler(script, "confident:confidence=0,greedy=true").generate([Request(0, tokens=[1])])
    assert result.tokens == [3, EOS] and result.steps == [1]


def test_greedy_under_a_control_takes_the_likeliest_of_what_may_stand():
    script = flat([(3, 5.0), (4, 2.5), (5, 5.0), (6, 1.0)])
    script[0, 8] = 5.0
    asked = sampler(script, "confident:threshold=0.9,confidence=0,t_min=8,t_max=8,greedy=true")
    drawn = "confident:threshold=0.3,confidence=0,t_min=8,t_max=8"  # by its own probabilities, all of about 0.1
    requests = [Request(0, tokens=[1], banned=(3,)), Request(1, tokens=[1], banned=(3,), strategy=drawn)]
    result, other = asked.generate(requests)
    assert result.tokens == [8, 4, 5, 6] and result.steps == [3]
    assert other.steps == [L] and 3 not in other.tokens


def test_temperature_0_is_greedy_and_another_one_is_not():
    model = Composed(t_min=0.4, t_max=0.8)
    assert adjusted(model, 0.0) == replace(model, greedy=True)
    assert adjusted(replace(model, greedy=True), 1.6) == adjusted(model, 1.6) != adjusted(model, 0.0)
    assert adjusted(adjusted(model, 0.0), top_k=3) == replace(model, greedy=True, top_k=3)
    assert strategy("confident:greedy=true").greedy and not strategy("confident:greedy=false").greedy
    with pytest.raises(RequestError, match="greedy takes one of true, false"):
        strategy("confident:greedy=1")
