"""The script that measures what evaluating costs: it runs, and its shares add up."""

from __future__ import annotations

import pytest

from benchmarks.evaluation import measure


def test_the_shares_are_those_of_the_seconds():
    figures = measure(rows=6, prompts=2, every=10, steps=2, repeats=1, batch=4, max_steps=3)
    parts = {name: figures[name] for name in ("heldout_seconds", "sample_seconds")}
    total = 10 * figures["optimiser_step_seconds"] + sum(parts.values())
    assert figures["heldout_share"] == pytest.approx(parts["heldout_seconds"] / total)
    assert figures["sample_share"] == pytest.approx(parts["sample_seconds"] / total)
    assert all(value > 0 for value in parts.values())
    assert figures["sample_steps_per_canvas_untrained"] == 3  # nothing lets a random model stop early
