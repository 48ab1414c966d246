"""`python -m benchmarks.rank_kills`: kill -9 a random rank at a random moment, on every mesh: what becomes of it all?

A chain is one run directory that several ranks train into, with `blockdiff train --resume` on each. Up to five times
one of them is killed: after a random time, or before a random file operation of its own. The parent then does what a
launcher does: it sends SIGTERM to the others, and 30 seconds later SIGKILL. They have to end by themselves before, each
with one line that says that a rank was lost (or by SIGTERM where training had not begun or was over). Then the run goes
on from its last checkpoint, and at its end metrics, samples and weights equal, to the bit, those of a run that nobody
killed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks import machine
from benchmarks.kills import IN_A_CHAIN
from tests.support.meeting import meeting
from tests.support.tiny_run import Kill, become, differences, make_inputs, stage_of, train_words

PATIENCE = 30.0  # seconds that torchrun gives the others
LOST = re.compile(
    r"^blockdiff: error: rank \d: another rank (was lost|hung for \d+ s) during .*; go on with --resume \(from Python "
    r"resume=True\)$|^blockdiff: error: another rank failed.*$|^blockdiff: error: the \d processes did not all join.*$"
)


@dataclass(frozen=True)
class Mesh:
    """A number of ranks, and the parallel settings of their recipe."""

    name: str
    world: int
    overrides: tuple[str, ...] = ()


MESHES = (
    Mesh("2 DDP", 2),
    Mesh("2 FSDP2", 2, ("parallel.shard=full",)),
    Mesh("2 EP", 2, ("parallel.experts=2",)),
    Mesh("4 DDP", 4),
    Mesh("4 FSDP2", 4, ("parallel.shard=full",)),
    Mesh("2x2 DDP x EP", 4, ("parallel.experts=2",)),
    Mesh("2x2 FSDP2 x EP", 4, ("parallel.shard=full", "parallel.experts=2")),
)


@dataclass
class Outcome:
    """The outcome of an attempt: how each rank ended, its last words, and the time the others took after a kill."""

    codes: list[int]
    said: list[str]
    seconds: float = 0.0
    operations: list[dict[str, int]] = field(default_factory=list)


@dataclass
class Kills:
    """The figures of one mesh."""

    mesh: str
    kills: int = 0
    runs: int = 0
    slowest: float = 0.0  # seconds from a kill until the last rank had ended
    moments: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)  # ranks that ended in another way, and runs that differ


def main(words: list[str] | None = None) -> int:
    """Run all; return 1 if a rank did not end as it should or a run differs from the undisturbed one, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rank_kills", description=__doc__)
    parser.add_argument("--count", type=int, default=105, help="kills, over all meshes (default 105)")
    parser.add_argument("--seed", type=int, default=0, help="of ranks and moments")
    parser.add_argument("--meshes", type=int, default=len(MESHES), help="only the first so many meshes")
    parser.add_argument("--output", type=Path, help="FILE.json; the table goes beside it as .md")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    began, meshes = time.perf_counter(), MESHES[: options.meshes]
    found = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make_inputs(folder)
        for number, mesh in enumerate(meshes):
            count = options.count // len(meshes) + (number < options.count % len(meshes))
            found.append(kill_ranks(folder, mesh, count, random.Random(options.seed * 100 + number)))
    print("\n".join(table(found)))
    if options.output:
        record = machine.describe(torch.device("cpu"))
        figures = {"machine": record, "count": options.count, "seconds": round(time.perf_counter() - began, 1)}
        counted = [vars(each) | {"moments": dict(each.moments), "endings": dict(each.endings)} for each in found]
        lines = [f"{machine.place(record)}; seed {options.seed}", "", *table(found)]
        machine.write(options.output, figures | {"meshes": counted}, "\n".join(lines) + "\n")
    return 1 if any(each.wrong for each in found) else 0


def table(found: list[Kills]) -> list[str]:
    """Return a line per mesh, and one for each failure."""
    heads = ("mesh", "kills", "ends of the other ranks", "slowest end (s)", "runs", "equal to the bit")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for each in found:
        ends = ", ".join(f"{count} {ending}" for ending, count in each.endings.most_common())
        equal = each.runs - sum("differs in" in line or "did not go on" in line for line in each.wrong)
        cells = (each.mesh, each.kills, ends, f"{each.slowest:.1f}", each.runs, equal)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines + [f"WRONG {line}" for each in found for line in each.wrong]


def kill_ranks(folder: Path, mesh: Mesh, count: int, draw: random.Random) -> Kills:
    """Run and kill chains on one mesh until there were `count` kills; print on stderr how each ended."""
    found, whole = Kills(mesh.name), folder / f"whole {mesh.name}"
    attempt(folder, folder / f"first {mesh.name}", mesh)  # its imports are inherited by later children
    for name in (folder / "modules").read_text().split():
        with suppress(ImportError):
            importlib.import_module(name)
    began = time.perf_counter()
    usual = attempt(folder, whole, mesh)
    seconds = time.perf_counter() - began
    if any(usual.codes):
        raise RuntimeError(f"{mesh.name}: {usual.codes}: {usual.said}")
    while found.kills < count:
        found.runs += 1
        run = folder / f"{mesh.name} {found.runs}"
        for _ in range(min(IN_A_CHAIN, count - found.kills)):
            victim = draw.randrange(mesh.world)
            kind = ("time", "file", "save")[found.kills % 3]
            most = usual.operations[victim].get(kind, 0)
            at = draw.randint(1, most) if most else draw.uniform(0, 0.8 * seconds)
            kill = Kill(kind if most else "time", at)
            ended = attempt(folder, run, mesh, victim, kill)
            if ended.codes[victim] != -signal.SIGKILL:
                break  # it ended before the kill
            found.kills += 1
            found.slowest = max(found.slowest, ended.seconds)
            found.moments[stage_of(run)] += 1
            for rank in range(mesh.world):
                if rank != victim:
                    judge(found, ended, rank, f"{mesh.name}: rank {rank} after {kill} of rank {victim}")
        ended = attempt(folder, run, mesh)
        if any(ended.codes):
            found.wrong.append(f"{run.name}: did not go on: {ended.codes}: {ended.said}")
        elif names := differences(whole, run):
            found.wrong.append(f"{run.name}: differs in {names}, by {distance(whole, run):.1e}")
        print(f"{mesh.name}: {found.kills}/{count} {dict(found.endings)} {found.wrong}", file=sys.stderr, flush=True)
    return found


def distance(whole: Path, run: Path) -> float:
    """Return the largest relative distance, by norm, of a tensor in the exported weights of two runs."""
    expected, got = (load_file(each / "model" / "model.safetensors") for each in (whole, run))
    return max(float((got[name] - tensor).norm() / (tensor.norm() + 1e-12)) for name, tensor in expected.items())


def judge(found: Kills, ended: Outcome, rank: int, what: str) -> None:
    """Count how a rank ended after one of its peers was killed."""
    code, lines = ended.codes[rank], [line for line in ended.said[rank].splitlines() if "blockdiff: error" in line]
    if code == 1 and len(lines) == 1 and LOST.match(lines[0]) and "Traceback" not in ended.said[rank]:
        found.endings["with a line"] += 1
    elif code == -signal.SIGTERM and not lines:
        found.endings["by SIGTERM outside of training"] += 1
    elif code == 0 and not lines:
        found.endings["after its work"] += 1
    else:
        found.endings["otherwise"] += 1
        found.wrong.append(f"{what}: code {code}: {ended.said[rank][-600:]!r}")


def attempt(folder: Path, run: Path, mesh: Mesh, victim: int = -1, kill: Kill | None = None) -> Outcome:
    """Run `blockdiff train --resume` on all ranks of a mesh, until they end, or one is killed and the others end."""
    words = [*train_words(folder, run), *(word for each in mesh.overrides for word in ("--set", each))]
    with meeting(mesh.world) as variables:
        children = {
            be_rank(folder, words, rank, own, kill if rank == victim else None): rank
            for rank, own in enumerate(variables)
        }
        return outcome(folder, children)


def outcome(folder: Path, children: dict[int, int]) -> Outcome:
    """Wait for the ranks with these process ids; after the first failure end the others as a launcher does."""
    world = len(children)
    codes, lost = [0] * world, 0.0
    impatient = threading.Timer(PATIENCE, end_all, [children])
    for _ in range(world):
        child, status = os.wait()
        codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        if os.waitstatus_to_exitcode(status) and not lost:
            lost = time.perf_counter()
            time.sleep(0.1)  # as often as torchrun looks
            for other in children:
                os.kill(other, signal.SIGTERM)
            impatient.start()
    impatient.cancel()
    seconds = time.perf_counter() - lost if lost else 0.0
    said = [(folder / f"said-{rank}").read_text(errors="replace") for rank in range(world)]
    files = [folder / f"operations-{rank}" for rank in range(world)]
    counted = [json.loads(file.read_text()) for file in files if file.exists()]
    return Outcome(codes, said, seconds, counted)


def end_all(children: dict[int, int]) -> None:
    """End the children that still run, as a launcher does."""
    for child in list(children):
        os.kill(child, signal.SIGKILL)


def be_rank(folder: Path, words: list[str], rank: int, variables: dict[str, str], kill: Kill | None) -> int:
    """Fork a rank and return its process id. variables: added to its environment."""
    counted = folder / f"operations-{rank}"
    counted.unlink(missing_ok=True)
    (folder / f"said-{rank}").write_text("")
    child = os.fork()
    if not child:
        os.environ |= {**variables, "OMP_NUM_THREADS": "1"}
        become(folder, words, folder / f"said-{rank}", counted, kill)
    return child


if __name__ == "__main__":
    sys.exit(main())
