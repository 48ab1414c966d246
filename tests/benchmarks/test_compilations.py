"""The number of compilations while rows come and go: each takes seconds, in the midst of requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST = {  # by kernel; the two kinds of layer have heads of two sizes
    "span_attention_forward": 6,  # in one part and in several, and once without pages, when these are made
    "span_attention_combine": 2,
    "attention_heads": 4,  # into pages and not
    "expert_mlp_gate_up": 3,  # a line of tiles for each number of rows of an expert
    "expert_mlp_product": 3,
    "gated_product": 3,
    "vocabulary_tiles": 3,  # without samples, with, and of filtered tokens
    "vocabulary_rows": 3,  # the same: only the likeliest of all tokens has its own probability
}


def test_rows_that_come_and_go_compile_few_kernels():
    """A process of its own counts them, for Triton interprets in this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.compilations", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert len(counts["canvases"]) >= 17 and len(counts["drafts"]) >= 9
    for of_walk in counts.values():
        assert {name for name, count in of_walk.items() if count > MOST.get(name, 2)} == set()
    # there are splits, so the walks are long enough; a drafter and its target have heads of one size
    assert (counts["canvases"]["span_attention_forward"], counts["drafts"]["span_attention_forward"]) == (6, 3)
