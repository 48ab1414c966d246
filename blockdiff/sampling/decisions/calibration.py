"""Calibration: a temperature for each type or question of a form, fitted on labelled rows and kept with the model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from blockdiff.sampling.decisions.form import VERSION, Form, labels_of
from blockdiff.sampling.decisions.question import Question

LOWEST, HIGHEST = 0.05, 20.0  # temperatures that a fit may find
FEW = 50  # rows under which a fit says that it cannot hold


def form_digest(question: Question, form: Form, settings: Mapping[str, Any]) -> str:
    """The digest of what the probabilities of a question depend on, beside the model's weights and the state.

    settings: what reads it: joint or alone, steps, draws, strategy, stored form of the weights.
    """
    described = [[*pair] for pair in zip(labels_of(question, form), map(asdict, question.options), strict=True)]
    said = [VERSION, form, question.type, question.instructions, described, dict(sorted(settings.items()))]
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Fit:
    """A temperature, the rows that it was fitted on, and their mean NLL before and after, in nats."""

    temperature: float
    rows: int
    before: float
    after: float

    @property
    def is_at_bound(self) -> bool:
        """True if the fit ended at a bound of the temperatures: more rows are needed."""
        return self.temperature in (LOWEST, HIGHEST)


def fit_temperature(scores: Sequence[Tensor], targets: Sequence[Tensor]) -> Fit:
    """The temperature with the least NLL, by golden-section search on its logarithm.

    scores: for each row the log-probabilities of its options, [X], of any of its draws [N, X], whose distributions are
    averaged; targets: the truth as a distribution, [X].
    """

    def loss(temperature: float) -> float:
        terms = []
        for score, target in zip(scores, targets, strict=True):
            p_X = (score.double().reshape(-1, score.shape[-1]) / temperature).softmax(-1).mean(0)
            terms.append(-(target.double() * p_X.clamp_min(1e-12).log()).sum())
        return float(torch.stack(terms).mean())

    low, high, ratio = math.log(LOWEST), math.log(HIGHEST), (math.sqrt(5) - 1) / 2
    while high - low > 1e-4:
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if loss(math.exp(left)) <= loss(math.exp(right)) else (left, high)
    best = min((LOWEST, math.exp((low + high) / 2), HIGHEST), key=loss)
    return Fit(best, len(scores), loss(1.0), loss(best))
