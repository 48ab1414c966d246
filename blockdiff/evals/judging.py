"""Measures of probabilities: accuracy, NLL, Brier, calibration error beside its floor, coverage.

Rows are N answers: `probabilities` has one distribution each, over options of their own, `targets` the true one as a
distribution, too (a single 1 for a known answer). All numbers are fp64 on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 15
RESAMPLED = 200  # times that truths are drawn, or rows; the interval holds 95 % of them


@dataclass(frozen=True)
class Judged:
    """The answers to one question of many states: `p_NX`, the probabilities of X options, and `target_NX`, the truth.

    Rows with fewer options than others have zeros behind theirs. row_N: the number of the row that each belongs to.
    """

    p_NX: Tensor
    target_NX: Tensor
    row_N: Tensor

    @classmethod
    def of(cls, probabilities: Sequence[Tensor], targets: Sequence[Tensor], rows: Sequence[int]) -> Judged:
        """The answers with their distributions laid side by side."""
        padded = (torch.nn.utils.rnn.pad_sequence(list(each), batch_first=True) for each in (probabilities, targets))
        p_NX, target_NX = (each.double() for each in padded)
        return cls(p_NX, target_NX, torch.tensor(rows))

    @property
    def top_N(self) -> Tensor:
        """The probability of the likeliest option."""
        return self.p_NX.amax(-1)

    @property
    def right_N(self) -> Tensor:
        """The true probability of the likeliest option: 1 or 0 for known answers."""
        return self.target_NX.gather(-1, self.p_NX.argmax(-1, keepdim=True))[:, 0]

    def some(self, places: Tensor) -> Judged:
        """The answers in some places."""
        return Judged(self.p_NX[places], self.target_NX[places], self.row_N[places])


def accuracy(judged: Judged) -> float:
    """The share of answers whose likeliest option is the true one."""
    return float(judged.right_N.mean())


def nll(judged: Judged) -> float:
    """The mean of -log p of the truth, in nats."""
    terms = -judged.target_NX * judged.p_NX.clamp_min(1e-12).log()
    return float(terms.sum(-1).mean())


def brier(judged: Judged) -> float:
    """The mean squared distance of the distribution from the truth, summed over options."""
    return float((judged.p_NX - judged.target_NX).square().sum(-1).mean())


def calibration_error(judged: Judged, bins: int = BINS) -> float:
    """The mean distance of confidence and accuracy over bins with equally many answers, by confidence."""
    order = judged.top_N.argsort(stable=True)
    gaps = (judged.top_N - judged.right_N)[order]
    parts = gaps.tensor_split(min(bins, len(gaps)))
    return float(sum(part.sum().abs() for part in parts) / len(gaps))


def calibration_floor(judged: Judged, bins: int = BINS, seed: int = 0) -> float:
    """The calibration error that a perfect model with these very probabilities shows, by sampling alone.

    Truths are drawn from the probabilities `RESAMPLED` times; the mean of the errors.
    """
    generator = torch.Generator().manual_seed(seed)
    errors = []
    for _ in range(RESAMPLED):
        drawn_N1 = torch.multinomial(judged.p_NX.clamp_min(0), 1, generator=generator)
        truth = torch.zeros_like(judged.p_NX).scatter_(-1, drawn_N1, 1.0)
        errors.append(calibration_error(Judged(judged.p_NX, truth, judged.row_N), bins))
    return sum(errors) / len(errors)


def interval(judged: Judged, figure: Callable[[Judged], float], seed: int = 0) -> tuple[float, float]:
    """The interval of 95 % of a figure by drawing rows, with all answers of each, with replacement."""
    generator = torch.Generator().manual_seed(seed)
    _, row_N = judged.row_N.unique(return_inverse=True)
    order, counts = row_N.argsort(stable=True), row_N.bincount()
    ends, drawn = counts.cumsum(0), list[float]()
    for _ in range(RESAMPLED):
        rows = torch.randint(len(counts), (len(counts),), generator=generator)
        places = torch.cat([order[int(ends[row] - counts[row]) : int(ends[row])] for row in rows.tolist()])
        drawn.append(figure(judged.some(places)))
    low, high = torch.tensor(drawn, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)


def coverage(judged: Judged, wanted_error: float) -> tuple[float, float]:
    """The least confidence above which at most this share of answers is wrong, and the share that has it.

    The threshold is the lowest one; (inf, 0.0) if the surest answer is wrong too often.
    """
    order = judged.top_N.argsort(descending=True, stable=True)
    wrong = (1 - judged.right_N[order]).cumsum(0) / torch.arange(1, len(order) + 1)
    meets = (wrong <= wanted_error).nonzero()[:, 0]
    if not len(meets):
        return float("inf"), 0.0
    last = int(meets[-1])
    return float(judged.top_N[order[last]]), (last + 1) / len(order)


def accuracy_at(judged: Judged, share: float) -> float:
    """The accuracy of this share of the answers, the surest ones."""
    count = max(1, round(share * len(judged.p_NX)))
    return float(judged.right_N[judged.top_N.argsort(descending=True, stable=True)[:count]].mean())


def reliability(judged: Judged, bins: int = BINS) -> list[tuple[int, float, float]]:
    """The points of a reliability diagram: count, mean confidence and accuracy of each bin of `calibration_error`."""
    order = judged.top_N.argsort(stable=True)
    parts = order.tensor_split(min(bins, len(order)))
    return [(len(part), float(judged.top_N[part].mean()), float(judged.right_N[part].mean())) for part in parts]
