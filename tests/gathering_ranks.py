"""What `benchmarks/test_small_runs.py` runs in two processes: the benchmark of what sharded ranks send."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gathers import MESHES, gathers_less, measured
from benchmarks.models import Size
from blockdiff.parallel.ranks import Ranks

SMALL = Size("small", "tiny", rows=2, prompt=5, steps=(1, 2), text={"vocab_size": 300})


def gathers(ranks: Ranks, directory: Path) -> None:
    """One step over every mesh, both ways."""
    found = measured(ranks, SMALL, recomputation=False, repeats=1)
    assert len(found) == 2 * len(MESHES) and gathers_less(found)
    assert [bool(line["bytes"]["exchanged"]) for line in found] == [False, False, True, True]
