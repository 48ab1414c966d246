"""The best evaluation and early stopping, from the log alone."""

from __future__ import annotations

import pytest

from blockdiff.errors import RunError
from blockdiff.training.run import best_step, evaluations_since_best

pytestmark = pytest.mark.quick

RECORDS = [
    {"step": 0, "heldout_canvas_loss": 0.1, "sample_accuracy": 0.9},
    {"step": 1, "loss": 0.0},
    {"step": 2, "heldout_canvas_loss": 3.0, "sample_accuracy": 0.2},
    {"step": 4, "heldout_canvas_loss": 1.0, "sample_accuracy": 0.5},
    {"step": 6, "heldout_canvas_loss": 1.0, "sample_accuracy": 0.5},
    {"step": 8, "heldout_canvas_loss": 2.0, "sample_accuracy": 0.4},
]


def test_the_best_is_the_earliest_of_equals_and_never_the_start():
    assert best_step(RECORDS, "heldout_canvas_loss") == (4, 1.0)
    assert best_step(RECORDS, "sample_accuracy") == (4, 0.5)
    assert best_step(RECORDS[:2], "sample_accuracy") is None


def test_the_best_can_be_looked_for_among_some_steps():
    assert best_step(RECORDS, "heldout_canvas_loss", among={2, 8}) == (8, 2.0)
    assert best_step(RECORDS, "heldout_canvas_loss", among=()) is None


@pytest.mark.parametrize(
    ("metric", "step"),
    [
        ("heldout_canvas_loss", 1),
        ("heldout_corrupted_loss_no_signal", 1),
        ("heldout_corrupted_accuracy_no_signal", 2),
        ("sample_steps_per_canvas", 1),
        ("sample_tokens_per_forward", 2),
    ],
)
def test_the_table_of_metrics_says_whether_more_is_better(metric, step):
    assert best_step([{"step": 1, metric: 0.25}, {"step": 2, metric: 0.5}], metric)[0] == step


@pytest.mark.parametrize("metric", ["heldout_quality", "loss", "lr", "sample_count", "sample_seconds"])
def test_what_no_evaluation_measures_or_has_no_better_value_is_refused(metric):
    with pytest.raises(RunError, match=f"'{metric}'.*heldout_canvas_loss, "):
        best_step(RECORDS, metric)


def test_patience_counts_evaluations_after_the_best():
    assert [evaluations_since_best(RECORDS[:n], "sample_accuracy") for n in range(1, 7)] == [0, 0, 0, 0, 1, 2]
