"""Judging probabilities: figures by hand, a calibration error at its floor for honest ones and above it for others."""

from __future__ import annotations

import math

import pytest
import torch

from blockdiff.evals import judging
from blockdiff.evals.judging import Judged


def honest(count: int, sharpened: float = 1.0) -> Judged:
    """Answers whose truths are drawn from the probabilities, which are then told at another temperature."""
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(count, 3, dtype=torch.float64, generator=generator)
    drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
    truth = torch.zeros(count, 3, dtype=torch.float64).scatter_(1, drawn, 1.0)
    return Judged((sharpened * logits).softmax(-1), truth, torch.arange(count))


def test_figures_are_those_by_hand():
    p, truth = torch.tensor([[0.5, 0.5], [0.9, 0.1]]), torch.tensor([[1.0, 0], [0, 1.0]])
    judged = Judged.of(list(p), [*truth], [0, 1])
    assert judging.accuracy(judged) == 0.5
    assert judging.nll(judged) == pytest.approx(-(math.log(0.5) + math.log(0.1)) / 2, rel=1e-6)
    assert judging.brier(judged) == pytest.approx((0.5 + 1.62) / 2, rel=1e-6)
    assert judging.calibration_error(judged, bins=2) == pytest.approx((0.5 + 0.9) / 2, rel=1e-6)
    assert judging.accuracy_at(judged, 0.5) == 0.0
    assert judging.coverage(judged, 0.5) == (pytest.approx(0.5), 1.0)
    assert judging.coverage(judged, 0.1) == (math.inf, 0.0)


def test_honest_probabilities_show_the_error_of_the_floor_and_sharpened_ones_more():
    for count in (200, 5000):
        judged = honest(count)
        floor = judging.calibration_floor(judged)
        assert judging.calibration_error(judged) < 1.6 * floor
        sharp = honest(count, 2.0)
        assert judging.calibration_error(sharp) > 2 * judging.calibration_floor(sharp)
    assert judging.calibration_floor(honest(5000)) < 0.02 < judging.calibration_floor(honest(200))


def test_an_interval_draws_rows_with_all_their_answers():
    one = honest(400)
    several = Judged(one.p_NX, one.target_NX, torch.arange(400) // 100)
    low, high = judging.interval(one, judging.accuracy)
    assert low < judging.accuracy(one) < high and high - low < 0.12
    assert len(several.some(torch.tensor([0, 3])).row_N) == 2
    copies = Judged(one.p_NX.repeat(4, 1), one.target_NX.repeat(4, 1), torch.arange(400).repeat(4))
    low_of_copies, high_of_copies = judging.interval(copies, judging.accuracy)
    assert high_of_copies - low_of_copies > 0.7 * (high - low)  # four answers of a row are not four rows


def test_options_of_different_numbers_lie_side_by_side():
    judged = Judged.of(
        [torch.tensor([0.5, 0.5]), torch.tensor([0.2, 0.3, 0.5])], [torch.ones(2), torch.ones(3)], [0, 1]
    )
    assert judged.p_NX.shape == (2, 3) and judged.p_NX[0, 2] == 0
