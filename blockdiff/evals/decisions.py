"""The evaluation of typed decisions on labelled rows, and temperatures fitted on such rows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdiff.data.decision_rows import DecisionRow, decision_row
from blockdiff.data.sources import Source, open_source
from blockdiff.decisions.form import Asking
from blockdiff.decisions.question import Question
from blockdiff.errors import DataError, RequestError
from blockdiff.evals import judging
from blockdiff.evals.judging import Judged
from blockdiff.sampling.calibration import FEW, Fit, fit_temperature, key_of, reader_of, temperatures
from blockdiff.sampling.decide import Answer, RunningDecision, uncalibrated
from blockdiff.sampling.request import Request

if TYPE_CHECKING:
    from blockdiff.sampling.sampler import Sampler

TOGETHER = 256  # rows prepared together
COVERAGES, ERRORS = (0.5, 0.8, 0.9), (0.01, 0.05, 0.1)


@dataclass(frozen=True)
class Decided:
    """One answered question of row number `row`.

    target: the true probabilities of its options, () without a label. scores_NX: the log-probabilities of its X labels
    in each of N draws.
    """

    row: int
    question: Question
    target: tuple[float, ...]
    scores_NX: Tensor
    answer: Answer


def read_decision_rows(path: str, *, has_answers: bool, split: str = "test") -> Iterator[DecisionRow]:
    """Read the rows of a file; DataError, which names the place, for a bad row."""
    for where, value in open_source(Source(path, split=split)).values():
        yield decision_row(value, where, has_answers=has_answers)


def decide_rows(
    sampler: Sampler,
    rows: Sequence[DecisionRow],
    asking: Asking,
    *,
    seed: int = 0,
    batch_size: int = 32,
    is_calibrated: bool = True,
) -> Iterator[list[Decided]]:
    """Yield the answers to the questions of each row, in order.

    `seed` and the index of a row key its draws. Raises DataError, which names the place, if a row's questions cannot be
    asked.
    """
    model, settings = sampler.model, sampler.settings
    fitted = temperatures(model, settings, asking) if is_calibrated else uncalibrated
    for first in range(0, len(rows), TOGETHER):
        running = []
        for index, row in enumerate(rows[first : first + TOGETHER], first):
            request = Request(index, messages=row.messages)
            try:
                running.append(RunningDecision.prepare(request, row.questions, model, settings, asking, seed))
            except RequestError as error:
                raise DataError(f"{row.where}: {error}") from None
        sampler.run(running, batch_size)
        for index, each in enumerate(running, first):
            answers, row = each.answers(fitted), rows[index]
            targets = row.targets or ((),) * len(answers)
            yield [
                Decided(index, question, target, scores_NX, answer)
                for question, target, scores_NX, answer in zip(
                    row.questions, targets, each.scores, answers, strict=True
                )
            ]


def evaluate(
    sampler: Sampler,
    rows: Sequence[DecisionRow],
    asking: Asking,
    *,
    seed: int = 0,
    batch_size: int = 32,
    is_calibrated: bool = True,
) -> dict[str, Any]:
    """Report on labelled rows: all questions, those of each type, and each question that several rows share.

    `parts` has the figures of `part_of` by name. `milliseconds`: the time per decision, total time divided by
    decisions.
    """
    began = time.perf_counter()
    options = dict(seed=seed, batch_size=batch_size, is_calibrated=is_calibrated)
    decided = [each for row in decide_rows(sampler, rows, asking, **options) for each in row]  # type: ignore[arg-type]
    seconds = time.perf_counter() - began
    parts = {"all": decided}
    for each in decided:
        parts.setdefault(f"type {each.question.type}", []).append(each)
    by_question: dict[Question, list[Decided]] = {}
    for each in decided:
        by_question.setdefault(replace(each.question, images=()), []).append(each)
    for question, of_it in by_question.items():
        if 1 < len(of_it) < len(decided):
            parts[question.name or question.instructions[:60]] = of_it
    return {
        "rows": len(rows),
        "decisions": len(decided),
        "milliseconds": 1000 * seconds / max(1, len(decided)),
        "calibrated": sum(each.answer.is_calibrated for each in decided) / max(1, len(decided)),
        "asking": asdict(asking),
        "seed": seed,
        "parts": {name: part_of(of_it) for name, of_it in parts.items()},
        "records": [_record(each) for each in decided],
    }


def part_of(decided: Sequence[Decided]) -> dict[str, Any]:
    """Return the figures of some answers, with intervals by row.

    If all questions have the same options, `confusion` is added: options x answers, in counts.
    """
    judged = _judged(decided)
    figures: dict[str, Any] = {"count": len(decided)}
    for name in ("accuracy", "nll", "brier"):
        figure = getattr(judging, name)
        figures[name], figures[f"{name}_interval"] = figure(judged), judging.interval(judged, figure)
    figures |= {
        "calibration_error": judging.calibration_error(judged),
        "calibration_floor": judging.calibration_floor(judged),
        "bins": min(judging.BINS, len(decided)),
        "label_mass": sum(each.answer.label_mass for each in decided) / len(decided),
        "accuracy_at_coverage": {str(share): judging.accuracy_at(judged, share) for share in COVERAGES},
        "coverage_at_error": {str(error): judging.coverage(judged, error) for error in ERRORS},
        "reliability": judging.reliability(judged),
    }
    first = decided[0].question
    if all(each.question.options == first.options for each in decided):
        counts = torch.zeros(len(first.options), len(first.options), dtype=torch.float64)
        for each in decided:
            counts[:, each.answer.place] += torch.tensor(each.target, dtype=torch.float64)
        figures["confusion"] = {"options": [option.text for option in first.options], "counts": counts.tolist()}
    return figures


def fit(
    sampler: Sampler, rows: Sequence[DecisionRow], asking: Asking, *, seed: int = 0, batch_size: int = 32
) -> dict[str, dict[str, Any]]:
    """Return temperatures by key, one for each type of question and for each question with at least `FEW` answers."""
    decided = [each for row in decide_rows(sampler, rows, asking, seed=seed, batch_size=batch_size) for each in row]
    reader = reader_of(sampler.model, sampler.settings, asking)
    groups: dict[str, tuple[str, list[Decided]]] = {}
    for each in decided:
        question = each.question
        for subject, name in ((question.type, question.type), (question, question.name or question.instructions)):
            groups.setdefault(key_of(subject, asking, reader), (name[:60], []))[1].append(each)
    fits = {}
    for key, (name, of_it) in groups.items():
        if name in ("predicate", "choice", "score") or len(of_it) >= FEW:
            fitted: Fit = fit_temperature(
                [each.scores_NX for each in of_it], [torch.tensor(each.target) for each in of_it]
            )
            fits[key] = {"of": name, **asdict(fitted)}
    return fits


def require_other_rows(rows: Sequence[DecisionRow], others: Sequence[DecisionRow]) -> None:
    """Raise DataError if one of the rows to fit on (`others`) is also among `rows`, which judge the fit."""
    known = {row.digest: row.where for row in rows}
    for other in others:
        if (where := known.get(other.digest)) is not None:
            raise DataError(f"{other.where}: is the row at {where}, and what is fitted on it says nothing; take others")


def lines(report: dict[str, Any]) -> list[str]:
    """Return the report as lines for a person: a table of the parts, then coverage, and the time of a decision."""
    heads = ["", "count", "right", "95 %", "NLL", "Brier", "ECE", "floor", "mass"]
    table = [heads]
    for name, part in report["parts"].items():
        low, high = part["accuracy_interval"]
        figures = [f"{part[figure]:.4f}" for figure in ("nll", "brier", "calibration_error", "calibration_floor")]
        shares = [f"{part['accuracy']:.1%}", f"{low:.1%}-{high:.1%}"]
        table.append([name, str(part["count"]), *shares, *figures, f"{part['label_mass']:.3f}"])
    widths = [max(len(row[column]) for row in table) for column in range(len(heads))]
    output = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    whole = report["parts"]["all"]
    right = ", ".join(f"{accuracy:.1%} of the surest {share}" for share, accuracy in _percent(whole))
    output.append(f"right: {right}")
    for error, (threshold, share) in whole["coverage_at_error"].items():
        words = f"above {threshold:.3f}, {share:.1%} of the answers" if share else "no threshold holds"
        output.append(f"at most {float(error):.0%} wrong: {words}")
    return [*output, f"{report['milliseconds']:.1f} ms a decision; ECE over {whole['bins']} bins of equal mass"]


def _percent(part: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for share, accuracy in part["accuracy_at_coverage"].items():
        yield f"{float(share):.0%}", accuracy


def _judged(decided: Sequence[Decided]) -> Judged:
    probabilities = [torch.tensor(each.answer.probabilities, dtype=torch.float64) for each in decided]
    targets = [torch.tensor(each.target, dtype=torch.float64) for each in decided]
    return Judged.of(probabilities, targets, [each.row for each in decided])


def _record(each: Decided) -> dict[str, Any]:
    return {"row": each.row, "target": list(each.target), **each.answer.to_record(), **each.answer.facts}
