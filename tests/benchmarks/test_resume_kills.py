"""A run that is killed with -9 at random moments and resumed equals, to the bit, the run that nobody killed.

What was done to its files meanwhile is refused, noticed or healed. `python -m benchmarks.kills` does more of both.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from benchmarks import kills, rank_kills
from blockdiff.errors import RESUME
from tests.support.damage import SILENT, Damage, outcome
from tests.support.forked import run

KILLS = 3  # one of each kind


def test_kills_change_neither_metrics_nor_samples_nor_weights_and_damage_does_not_go_unnoticed(tmp_path):
    words = ["--count", str(KILLS), "--seed", "2", "--every", "10", "--output", str(tmp_path / "figures.json")]
    run(kills.main, words, log=tmp_path / "log")
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["kills"] == KILLS
    assert figures["runs_that_differ"] == []
    assert figures["kinds"].keys() == {"time", "file", "save"}
    assert figures["unnoticed"] == []
    assert figures["damages"] >= 8 and {"refused", "healed"} <= figures["outcomes"].keys()


@pytest.mark.quick
def test_only_what_names_the_file_or_changes_nothing_counts_as_noticed():
    case = Damage("log", "run/metrics.jsonl", "removed", Path.unlink)
    error, warning = "blockdiff: error: a/metrics.jsonl:3: no record", "blockdiff: warning: metrics.jsonl: was removed"
    assert outcome(case, 1, error, []) == "refused"
    assert outcome(case, 0, warning, ["metrics.jsonl"]) == "noticed"
    assert outcome(case, 0, "", []) == "healed"
    for code, said, differing in (
        (0, "", ["metrics.jsonl"]),
        (0, warning, ["model/model.safetensors"]),
        (1, "blockdiff: error: something else", []),
        (1, f"Traceback\n{error}", []),
        (1, f"{error} (run again with --debug for the traceback)", []),
        (-14, "", []),  # it hung
    ):
        assert outcome(case, code, said, differing) == SILENT


@pytest.mark.quick
def test_a_rank_whose_peer_was_killed_has_to_end_with_one_line():
    line = f"blockdiff: error: rank 1: another rank was lost during step 3; {RESUME}"
    for code, said, ending in (
        (1, line, "with a line"),
        (-signal.SIGTERM, "", "by SIGTERM outside of training"),
        (0, "run: 12 steps", "after its work"),
        (1, "", "otherwise"),
        (1, f"{line}\n{line}", "otherwise"),
        (1, f"Traceback (most recent call last):\n{line}", "otherwise"),
        (1, "blockdiff: error: RuntimeError: [gloo] timed out", "otherwise"),
        (-signal.SIGALRM, "", "otherwise"),  # it hung
    ):
        found = rank_kills.Kills("2 DDP")
        rank_kills.judge(found, rank_kills.Outcome([-signal.SIGKILL, code], ["", said]), 1, "rank 1")
        assert found.endings == {ending: 1}
        assert bool(found.wrong) == (ending == "otherwise")
