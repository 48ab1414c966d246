"""Measures of probabilities: accuracy, NLL, Brier score, calibration error with its floor, coverage.

There are N answers: `probabilities` has the distribution of each over its own options, `targets` the true distribution
(a single 1 if the answer is known). All numbers are fp64 on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BINS = 15
RESAMPLED = 200  # number of redraws, of truths or of rows


@dataclass(frozen=True)
class Judged:
    """N answers: `p_NX`, the probabilities of X options, and `target_NX`, the true ones.

    Answers with fewer options than X are padded with zeros. row_N: the row from which each answer comes.
    """

    p_NX: Tensor
    target_NX: Tensor
    row_N: Tensor

    @classmethod
    def of(cls, probabilities: Sequence[Tensor], targets: Sequence[Tensor], rows: Sequence[int]) -> Judged:
        """Stack distributions of different lengths, padded with zeros."""
        padded = (torch.nn.utils.rnn.pad_sequence(list(each), batch_first=True) for each in (probabilities, targets))
        p_NX, target_NX = (each.double() for each in padded)
        return cls(p_NX, target_NX, torch.tensor(rows))

    @property
    def top_N(self) -> Tensor:
        """The probability of the likeliest option: the confidence of each answer."""
        return self.p_NX.amax(-1)

    @property
    def right_N(self) -> Tensor:
        """The true probability of the likeliest option: 1 or 0 for known answers."""
        return self.target_NX.gather(-1, self.p_NX.argmax(-1, keepdim=True))[:, 0]

    def some(self, places: Tensor) -> Judged:
        """Return the answers with these indices."""
        return Judged(self.p_NX[places], self.target_NX[places], self.row_N[places])


def accuracy(judged: Judged) -> float:
    """The share of answers whose likeliest option is the true one."""
    return float(judged.right_N.mean())


def nll(judged: Judged) -> float:
    """The mean of -log p, weighted by the true distribution, in nats."""
    terms = -judged.target_NX * judged.p_NX.clamp_min(1e-12).log()
    return float(terms.sum(-1).mean())


def brier(judged: Judged) -> float:
    """The mean squared distance between the two distributions, summed over options."""
    return float((judged.p_NX - judged.target_NX).square().sum(-1).mean())


def calibration_error(judged: Judged, bins: int = BINS) -> float:
    """The mean distance between confidence and accuracy over `bins` of equally many answers.

    Answers are sorted by confidence into the bins.
    """
    order = judged.top_N.argsort(stable=True)
    gaps = (judged.top_N - judged.right_N)[order]
    parts = gaps.tensor_split(min(bins, len(gaps)))
    return float(sum(part.sum().abs() for part in parts) / len(gaps))


def calibration_floor(judged: Judged, bins: int = BINS, seed: int = 0) -> float:
    """The calibration error that a perfect model with these probabilities has by sampling alone.

    This is the mean over `RESAMPLED` draws of answers from the probabilities.
    """
    generator = torch.Generator().manual_seed(seed)
    errors = []
    for _ in range(RESAMPLED):
        drawn_N1 = torch.multinomial(judged.p_NX.clamp_min(0), 1, generator=generator)
        truth = torch.zeros_like(judged.p_NX).scatter_(-1, drawn_N1, 1.0)
        errors.append(calibration_error(Judged(judged.p_NX, truth, judged.row_N), bins))
    return sum(errors) / len(errors)


def interval(judged: Judged, figure: Callable[[Judged], float], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a figure: rows are redrawn with replacement, each with all its answers."""
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
    """Return a threshold of confidence, and the share of answers at or above it.

    The threshold is the lowest at which at most `wanted_error` of the answers are wrong. (inf, 0.0) if there is none.
    """
    order = judged.top_N.argsort(descending=True, stable=True)
    wrong = (1 - judged.right_N[order]).cumsum(0) / torch.arange(1, len(order) + 1)
    meets = (wrong <= wanted_error).nonzero()[:, 0]
    if not len(meets):
        return float("inf"), 0.0
    last = int(meets[-1])
    return float(judged.top_N[order[last]]), (last + 1) / len(order)


def accuracy_at(judged: Judged, share: float) -> float:
    """The accuracy of the most confident `share` of the answers."""
    count = max(1, round(share * len(judged.p_NX)))
    return float(judged.right_N[judged.top_N.argsort(descending=True, stable=True)[:count]].mean())


def reliability(judged: Judged, bins: int = BINS) -> list[tuple[int, float, float]]:
    """Return for each bin of `calibration_error` its count, mean confidence and accuracy: a reliability diagram."""
    order = judged.top_N.argsort(stable=True)
    parts = order.tensor_split(min(bins, len(order)))
    return [(len(part), float(judged.top_N[part].mean()), float(judged.right_N[part].mean())) for part in parts]
