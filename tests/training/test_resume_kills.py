"""A run that is killed with -9 at random moments and resumed equals, to the bit, the run that nobody killed.

`python -m benchmarks.kills --count 100` does the same with more kills.
"""

from __future__ import annotations

import json

from benchmarks import kills
from tests.forked import run

KILLS = 6


def test_kills_change_neither_metrics_nor_samples_nor_weights(tmp_path):
    words = ["--count", str(KILLS), "--seed", "2", "--output", str(tmp_path / "figures.json")]
    run(kills.main, words, log=tmp_path / "log")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["kills"] == KILLS
    assert figures["runs_that_differ"] == []
    assert figures["kinds"].keys() == {"time", "file", "save"}
