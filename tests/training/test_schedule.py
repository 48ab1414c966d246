"""Learning rates by step: the corners of every schedule, and what they have in common."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from blockdiff.training.assemble import learning_rate
from blockdiff.training.schedule import WarmupConstant, WarmupCosine, WarmupLinear, WarmupStableDecay
from blockdiff.training.sections import OptimSection

SCHEDULES = [
    WarmupCosine(2.0, 110, 10, 0.1),
    WarmupLinear(2.0, 110, 10, 0.1),
    WarmupConstant(2.0, 10),
    WarmupStableDecay(2.0, 110, 10, 20, 0.1),
]


def rates(schedule, *steps):
    return [schedule.lr(step) for step in steps]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_rises_in_a_line_to_its_peak_and_never_rises_again(schedule):
    assert rates(schedule, 1, 5, 10) == pytest.approx([0.2, 1.0, 2.0])
    fall = rates(schedule, *range(10, 200))
    assert fall == sorted(fall, reverse=True)
    assert schedule.lr(110) == schedule.lr(10_000)


def test_the_cosine_is_half_way_down_in_the_middle():
    assert rates(SCHEDULES[0], 60, 110) == pytest.approx([2.0 * 0.55, 0.2])


def test_the_line_falls_by_the_same_amount_every_step():
    assert rates(SCHEDULES[1], 35, 60, 85, 110) == pytest.approx([1.55, 1.1, 0.65, 0.2])


def test_constant_stays_at_the_peak():
    assert rates(SCHEDULES[2], 11, 110, 10_000) == [2.0, 2.0, 2.0]


def test_wsd_stays_level_and_decays_over_its_last_steps():
    assert rates(SCHEDULES[3], 11, 50, 90) == [2.0, 2.0, 2.0]
    assert rates(SCHEDULES[3], 95, 100, 110) == pytest.approx([1.55, 1.1, 0.2])


def test_the_level_part_of_wsd_does_not_depend_on_how_long_the_run_is():
    longer = WarmupStableDecay(2.0, 1000, 10, 20, 0.1)
    assert rates(longer, *range(1, 91)) == rates(SCHEDULES[3], *range(1, 91))


def test_a_wsd_decay_longer_than_the_run_begins_after_the_warmup():
    schedule = WarmupStableDecay(1.0, 20, 10, 500, final_ratio=0.0)
    assert rates(schedule, 10, 15, 20) == pytest.approx([1.0, 0.5, 0.0])


def test_without_warmup_the_first_step_is_close_to_the_peak():
    for schedule in (WarmupCosine(1.0, 1000), WarmupLinear(1.0, 1000), WarmupConstant(1.0)):
        assert schedule.lr(1) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("kind", [WarmupCosine, WarmupLinear])
def test_a_run_shorter_than_its_warmup_still_has_a_learning_rate(kind):
    schedule = kind(1.0, 5, 10)
    assert rates(schedule, 1, 2, 3, 4, 5) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"schedule": "cosine"}, SCHEDULES[0]),
        ({"schedule": "linear"}, SCHEDULES[1]),
        ({"schedule": "constant"}, SCHEDULES[2]),
        ({"schedule": "wsd", "decay_steps": 20}, SCHEDULES[3]),
        ({"schedule": "wsd"}, WarmupStableDecay(2.0, 110, 10, 11, 0.1)),
    ],
)
def test_a_recipe_names_its_schedule(said, expected):
    optim = OptimSection(lr=2.0, warmup_steps=10, final_lr_ratio=0.1, **said)
    lr = learning_rate(SimpleNamespace(optim=optim, train=SimpleNamespace(steps=110)))
    assert [lr(step) for step in range(1, 130)] == rates(expected, *range(1, 130))
