"""Which evaluation was the best one: read off the metrics log alone, so that a resumed run agrees."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from blockdiff.errors import RunError
from blockdiff.metrics import Record

HIGHER_IS_BETTER = ("accuracy", "solved", "share", "tokens_per")
LOWER_IS_BETTER = ("loss", "steps", "error")


def is_higher_better(metric: str) -> bool:
    """By the words in a metric's name. Raises RunError for a name that has none of them."""
    # "sample_accuracy", "heldout_ar_loss": the last word that is known decides ("loss_no_signal" is a loss).
    found = {max(metric.rfind(word) for word in words): words for words in (HIGHER_IS_BETTER, LOWER_IS_BETTER)}
    if max(found) < 0:
        known = ", ".join((*HIGHER_IS_BETTER, *LOWER_IS_BETTER))
        raise RunError(
            f"evaluation.best: whether more or less of {metric} is better is not known; names say so by {known}"
        )
    return found[max(found)] is HIGHER_IS_BETTER


def values_of(records: Sequence[Record], metric: str) -> list[tuple[int, float]]:
    """(step, value) of every record that has the metric, in the log's order; step 0 has no checkpoint."""
    return [(record["step"], float(record[metric])) for record in records if metric in record and record["step"] > 0]


def best_of(records: Sequence[Record], metric: str, among: Collection[int] | None = None) -> tuple[int, float] | None:
    """The step with the best value of a metric, the earliest of equals, and the value; None if no record has it.

    among: the steps that count, such as those with a checkpoint; None = all.
    """
    values = [pair for pair in values_of(records, metric) if among is None or pair[0] in among]
    sign = -1 if is_higher_better(metric) else 1
    return min(values, key=lambda pair: sign * pair[1], default=None)


def evaluations_since_best(records: Sequence[Record], metric: str) -> int:
    """How many times the metric was measured after its best value: early stopping compares it with its patience."""
    best = best_of(records, metric)
    return 0 if best is None else sum(step > best[0] for step, _ in values_of(records, metric))
