"""Learning rates by step: the corners of every schedule, what they have in common, and their formulas."""

from __future__ import annotations

import math
from functools import partial

import pytest

from blockdiff.training.schedule import (
    Constant,
    CosineDecay,
    LinearDecay,
    StableDecay,
    default_warmup,
    learning_rate,
)

pytestmark = pytest.mark.quick

SCHEDULES = [CosineDecay(), LinearDecay(), Constant(), StableDecay(decay_steps=20)]


def of(schedule, peak=2.0, steps=110, warmup_steps=10):
    return partial(learning_rate, schedule, peak=peak, steps=steps, warmup_steps=warmup_steps)


def rates(schedule, *steps, **run):
    return list(map(of(schedule, **run), steps))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_rises_in_a_line_to_its_peak_and_never_rises_again(schedule):
    assert rates(schedule, 1, 5, 10) == pytest.approx([0.2, 1.0, 2.0])
    fall = rates(schedule, *range(10, 200))
    assert fall == sorted(fall, reverse=True)
    assert rates(schedule, 110) == rates(schedule, 10_000)


def test_the_cosine_is_half_way_down_in_the_middle():
    assert rates(SCHEDULES[0], 60, 110) == pytest.approx([2.0 * 0.55, 0.2])


def test_the_line_falls_by_the_same_amount_every_step():
    assert rates(SCHEDULES[1], 35, 60, 85, 110) == pytest.approx([1.55, 1.1, 0.65, 0.2])


def test_constant_stays_at_the_peak():
    assert rates(SCHEDULES[2], 11, 110, 10_000) == [2.0, 2.0, 2.0]


def test_wsd_stays_level_and_decays_over_its_last_steps():
    assert rates(SCHEDULES[3], 11, 50, 90) == [2.0, 2.0, 2.0]
    assert rates(SCHEDULES[3], 95, 100, 110) == pytest.approx([1.55, 1.1, 0.2])


def test_wsd_decays_over_a_tenth_of_the_run_unless_told_otherwise():
    assert rates(StableDecay(), *range(1, 130)) == rates(StableDecay(decay_steps=11), *range(1, 130))
    assert rates(StableDecay(), 2, 3, steps=3, warmup_steps=0) == pytest.approx([2.0, 0.2])  # at least over one step


def test_the_level_part_of_wsd_does_not_depend_on_how_long_the_run_is():
    assert rates(SCHEDULES[3], *range(1, 91), steps=1000) == rates(SCHEDULES[3], *range(1, 91))


def test_a_wsd_decay_longer_than_the_run_begins_after_the_warmup():
    schedule = StableDecay(final_ratio=0.0, decay_steps=500)
    assert rates(schedule, 10, 15, 20, peak=1.0, steps=20) == pytest.approx([1.0, 0.5, 0.0])


def test_without_warmup_the_first_step_is_close_to_the_peak():
    for schedule in SCHEDULES:
        assert learning_rate(schedule, 1, 1.0, 1000) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_shorter_than_its_warmup_still_has_a_learning_rate(schedule):
    assert rates(schedule, 1, 2, 3, 4, 5, peak=1.0, steps=5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


def spelt_out(kind, step, peak, steps, warmup, final, decay):
    """The formulas as released runs used them, one expression each."""
    if step < warmup:
        return peak * step / warmup
    begin = max(warmup, steps - decay) if kind == "wsd" else warmup
    done = min(1.0, max(0, step - begin) / max(1, steps - begin))
    if kind == "cosine":
        return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * done)))
    return peak if kind == "constant" else peak * (1 - (1 - final) * done)


@pytest.mark.parametrize(
    "peak, steps, warmup, final", [(3e-3, 1400, 50, 0.01), (1.5e-4, 97, 25, 0.1), (0.7, 10, 30, 0.3)]
)
def test_learning_rates_are_the_same_to_the_last_bit_as_the_formulas_of_earlier_runs(peak, steps, warmup, final):
    schedules = {
        "cosine": CosineDecay(final),
        "linear": LinearDecay(final),
        "constant": Constant(),
        "wsd": StableDecay(final, decay_steps=37),
    }
    for kind, schedule in schedules.items():
        found = rates(schedule, *range(1, 2 * steps), peak=peak, steps=steps, warmup_steps=warmup)
        assert found == [spelt_out(kind, step, peak, steps, warmup, final, 37) for step in range(1, 2 * steps)]


@pytest.mark.parametrize("make", [lambda: CosineDecay(1.5), lambda: StableDecay(-0.1), lambda: StableDecay(0.1, -1)])
def test_a_schedule_that_would_rise_or_last_less_than_nothing_is_refused(make):
    with pytest.raises(ValueError, match="should"):
        make()


def test_the_default_warmup_ends_within_the_first_tenth_of_a_short_run():
    assert [default_warmup(steps) for steps in (1, 9, 20, 249, 250, 10_000)] == [0, 0, 2, 24, 25, 25]
