"""Calibration: a temperature per question or question type of a form, fitted on labelled rows, saved with the model."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdiff.decisions.form import VERSION, Asking
from blockdiff.decisions.question import Question
from blockdiff.models.stored import stored_layers
from blockdiff.sampling.decide import TemperatureOf

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.sampling.settings import SamplingSettings

LOWEST, HIGHEST = 0.05, 20.0  # temperatures that a fit may find
FEW = 50  # rows, below which a fit is unreliable


def key_of(asked: Question | str, asking: Asking, reader: Mapping[str, Any]) -> str:
    """Return the digest that identifies the fit of a question, or of all questions of a type.

    asked: the question, or the type; asking: the form in which it is read; reader: everything else that the
    probabilities depend on, from `reader_of`.
    """
    parts: list[Any] = [VERSION, asdict(asking), dict(sorted(reader.items()))]
    if isinstance(asked, str):
        parts.append(asked)
    else:
        parts += [asked.type, asked.instructions, [asdict(option) for option in asked.options]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def reader_of(model: BlockDiffusionModel, settings: SamplingSettings, asking: Asking) -> dict[str, Any]:
    """Return the properties of model and settings that a fit depends on: stored weight forms, and the strategy."""
    forms = sorted({type(module.stored).__name__ for module in stored_layers(model).values()})
    return {"stored": forms, "strategy": repr(settings.strategy) if asking.steps > 1 else None}


def temperatures(model: BlockDiffusionModel, settings: SamplingSettings, asking: Asking) -> TemperatureOf:
    """Return a function from a question to its temperature: its own fit's, else its type's, else None."""
    fits, reader = settings.diffusion.calibration, reader_of(model, settings, asking)

    def found(question: Question) -> float | None:
        for subject in (question, question.type):
            if (fit := fits.get(key_of(subject, asking, reader))) is not None:
                return float(fit["temperature"])
        return None

    return found


@dataclass(frozen=True)
class Fit:
    """A temperature, the number of rows that it was fitted on, and their mean NLL in nats before and after the fit."""

    temperature: float
    rows: int
    before: float
    after: float

    @property
    def is_at_bound(self) -> bool:
        """True if the fitted temperature is the lowest or highest allowed one: more rows are needed."""
        return self.temperature in (LOWEST, HIGHEST)


def fit_temperature(scores: Sequence[Tensor], targets: Sequence[Tensor]) -> Fit:
    """Fit the temperature with the least NLL, by golden-section search on its logarithm.

    scores: for each row the log-probabilities of its options, [X], or of N draws [N, X], whose distributions are
    averaged; targets: the true distribution of each row, [X].
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
