"""Which evaluation was the best one: read off the metrics log alone, so that a resumed run agrees."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from blockdiff.errors import RunError
from blockdiff.metrics import METRICS, Record, decisive_metrics
from blockdiff.training.state import steps_saved


def check(metric: str) -> None:
    """Raises RunError for a metric that cannot decide which weights are the best."""
    if metric not in (known := decisive_metrics()):
        raise RunError(
            f"evaluation.best: no metric {metric!r}; choose one of {', '.join(known)} "
            "(one of your own goes into blockdiff.metrics.METRICS)"
        )


def values_of(records: Sequence[Record], metric: str) -> list[tuple[int, float]]:
    """(step, value) of every record that has the metric, in the log's order; step 0 has no checkpoint."""
    return [(record["step"], float(record[metric])) for record in records if metric in record and record["step"] > 0]


def best_of(
    records: Sequence[Record], metric: str | None, among: Collection[int] | None = None
) -> tuple[int, float] | None:
    """The step with the best value of a metric, the earliest of equals, and the value.

    among: the steps that count, such as those with a checkpoint; None = all. Returns None without a metric and where no
    record has it. Raises RunError as `check` does.
    """
    if metric is None:
        return None
    check(metric)
    values = [pair for pair in values_of(records, metric) if among is None or pair[0] in among]
    sign = -1 if METRICS[metric].better == "higher" else 1
    return min(values, key=lambda pair: sign * pair[1], default=None)


def evaluations_since_best(records: Sequence[Record], metric: str | None) -> int:
    """How many times the metric was measured after its best value: early stopping compares it with its patience."""
    best = best_of(records, metric)
    return 0 if best is None or metric is None else sum(step > best[0] for step, _ in values_of(records, metric))


def best_saved(run: Path, records: Sequence[Record], metric: str | None) -> tuple[int, float] | None:
    """The best step of a metric among the checkpoints of a run directory, and its value, or None as `best_of` gives."""
    return best_of(records, metric, among=steps_saved(run))
