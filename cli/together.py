"""`--tensor-parallel`: a command that several processes run together, of which one writes and speaks."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from blockdiff.parallel.mesh import Mesh


def join(count: int, device: str) -> Mesh | None:
    """The mesh of the `count` processes that run one model, as this one sees it; None for one process.

    Where no launcher has started them, this process becomes their launcher and does not return. All but the first
    say nothing from here on. Raises typer.BadParameter where another number of processes was started.
    """
    if count == 1:
        return None
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started == 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        os.execv(sys.executable, [*launcher, "-m", "blockdiff", *sys.argv[1:]])
    if started != count:
        raise typer.BadParameter(f"{started} processes were started for {count}", param_hint="--tensor-parallel")
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    from blockdiff.parallel.mesh import Mesh
    from blockdiff.parallel.ranks import from_accelerate

    ranks = replace(from_accelerate(), alike=count)
    if not ranks.is_main:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (to the end of the process)
    return Mesh.of(ranks, tensor=count)
