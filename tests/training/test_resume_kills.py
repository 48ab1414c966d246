"""A run that is killed with -9 at random moments and resumed equals, to the bit, the run that nobody killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KILLS = 20


def test_twenty_kills_change_neither_metrics_nor_samples_nor_weights(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "benchmarks.kills", "--count", str(KILLS), "--output", str(tmp_path / "figures.json")],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["kills"] == KILLS
    assert figures["runs_that_differ"] == []
    assert min(figures["kinds"][kind] for kind in ("time", "file", "save")) >= 2
