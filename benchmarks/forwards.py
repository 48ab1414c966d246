"""Model calls: what each way of sampling gets right on three tasks with known answers, and the forwards that it takes.

    python -m benchmarks.forwards runs/forwards --output FILE.json

Models that the directory lacks are trained there first, by recipes/forwards.yaml, and kept for the next time; a
training that was stopped goes on. Every way answers the same test rows with the same seeds. It is compared row by row
with the model's own settings: McNemar's exact test of whether both are right equally often, and a sign test of
whether one takes fewer forwards (denoising steps, encodes and verifications together). Where neither says that it is
better, the line says that nothing is gained. Times are of the processor, all threads together, for an answer that
runs alone, so what else runs on the machine is in them only as far as it slows the processor.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import blockdiff
from benchmarks import machine
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.sources import Source, read_rows
from blockdiff.errors import BlockdiffError
from blockdiff.evals import task as task_of
from blockdiff.evals.compare import compare
from blockdiff.evals.run import evaluate
from blockdiff.evals.summary import CALLS, costs
from blockdiff.recipes import addition, countdown, sudoku
from blockdiff.sampling import Sampler

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SURE = 0.05  # p-values below this are differences
TIMED = 20  # rows that are answered one at a time for a time


@dataclass(frozen=True)
class Task:
    """A task: its name in `blockdiff eval`, its model's canvas and window, and overrides of the training recipe.

    write: writes the rows of the splits and the tokenizer into a directory. has_distilled: whether a second model is
    distilled from the first; this is quick if its canvases settle in few steps.
    """

    name: str
    evaluated_as: str
    canvas_length: int
    write: Callable[[Path, dict[str, int]], object]
    training: tuple[str, ...]
    window: int = 64
    has_distilled: bool = False


TASKS = (
    Task(
        "sudoku", "sudoku", 17, lambda to, counts: sudoku.write_splits(to, 4, counts), ("train.steps=1000",),
        has_distilled=True,
    ),
    Task(
        "countdown", "countdown", 11, lambda to, counts: countdown.write_splits(to, 3, counts), ("train.steps=1500",),
    ),
    Task(
        "addition", "exact", 16, addition.write_splits,
        ("train.steps=1000", "train.batch_size=32", "data.canvases=2"), window=256,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A way of sampling: a strategy (None: the model's own settings), with the trained or the distilled model."""

    name: str
    strategy: str | None = None
    is_distilled: bool = False


OWN, NEXT = Way("the model's settings"), Way("next tokens", "next_token")
RELEASED = "entropy_bound:bound=0.1,t_min=0.4,t_max=0.8,stability=1,confidence=0.005"
EARLIER, EARLIEST = (f"entropy_bound:stability=0,confidence={confidence}" for confidence in (0.06, 0.12))
WAYS = (
    OWN,
    Way("transformers' settings", RELEASED),
    Way("an earlier stop", EARLIER),
    Way("the earliest stop", EARLIEST),
    NEXT,
    Way("verified after 1 step", "verified:steps=1"),
    Way("verified after 2 steps", "verified:steps=2"),
    Way("distilled", is_distilled=True),
    Way("distilled, an earlier stop", EARLIER, is_distilled=True),
    Way("distilled, the earliest stop", EARLIEST, is_distilled=True),
    Way("distilled, verified after 1 step", "verified:steps=1", is_distilled=True),
)


@dataclass
class Line:
    """The answers of a way to the rows of all seeds, and CPU milliseconds for an answer that runs alone."""

    way: Way
    records: list[dict[str, Any]]
    solved: list[float]  # share, for each seed
    milliseconds: float
    verdict: str = ""

    def to_record(self, task: str) -> dict[str, Any]:
        """Return everything except the answers as JSON values."""
        right = sum(record["is_solved"] for record in self.records)
        counts = {"right": right, "rows": len(self.records), "interval": interval(right, len(self.records))}
        own = {"task": task, **asdict(self.way), **counts, "right_by_seed": self.solved}
        return {**own, "milliseconds": self.milliseconds, **costs(self.records), "verdict": self.verdict}

    def cells(self) -> list[str]:
        """Return the cells of the table's line."""
        found = self.to_record("")
        (low, high), calls = found["interval"], found["forwards_per_row"]
        return [
            self.way.name,
            f"{found['right'] / found['rows']:.1%} ({low:.1%} to {high:.1%})",
            " / ".join(f"{share:.1%}" for share in self.solved),
            f"{calls['total']:.2f}",
            " + ".join(f"{calls[kind]:.2f}" for kind in CALLS),
            f"{found['tokens_per_forward']:.2f}",
            f"{self.milliseconds:.0f}",
            self.verdict,
        ]

    def same_as(self, head: Line) -> str:
        """Return in words how many answers of a verified way equal those of `head`, next tokens; "" for other ways."""
        if self.way.is_distilled or not str(self.way.strategy).startswith("verified"):
            return ""
        pairs = zip(self.records, head.records, strict=True)
        equal = sum((a["text"], a["length"]) == (b["text"], b["length"]) for a, b in pairs)
        return f"; {equal} of {len(self.records)} answers are those of next tokens"


HEADS = (
    *("way", "right (95 %)", "each seed", "forwards", "denoise + encode + verify", "tokens per forward"),
    *("CPU ms an answer", "beside the model's settings"),
)


def interval(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of a share (1927); z: the normal quantile, 1.96 for 95 %."""
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread * spread / 4) / (1 + spread)
    return middle - half, middle + half


def verdict(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Return a sentence on the gain of a way over the model's own settings, by the tests of `compare`.

    Fewer forwards are a gain only if most rows take fewer and the mean falls, since a few very long rows can outweigh
    the rest.
    """
    found = compare(own, other)
    forwards, rows = found["forwards"], len(found["records"])
    points = 100 * (found["only_second"] - found["only_first"]) / rows
    is_other, takes_others = found["p_value"] < SURE, forwards["p_value"] < SURE
    right = f"{points:+.1f} points right (p = {found['p_value']:.2g})"
    calls = f"{forwards['difference']:+.2f} forwards (p = {forwards['p_value']:.2g})"
    is_fewer = takes_others and forwards["fewer_in_second"] > forwards["more_in_second"] and forwards["difference"] < 0
    is_better = (is_other and points > 0, is_fewer)
    is_worse = (is_other and points < 0, takes_others and not is_fewer)
    word = "gains nothing" if not any(is_better) else "trades" if any(is_worse) else "gains"
    return f"**{word}**: {calls}, {right}"


def agreement(one: Line, other: Line) -> float:
    """Return the share of positions at which the answers of two lines have the same character."""
    pairs = [(a["text"], b["text"]) for a, b in zip(one.records, other.records, strict=True)]
    equal = sum(sum(x == y for x, y in zip(a, b, strict=False)) for a, b in pairs)
    return equal / max(1, sum(max(len(a), len(b)) for a, b in pairs))


def model_of(task: Task, seed: int, directory: Path) -> Path:
    """Return the directory of a task's trained model; train it if it is missing."""
    run, data = directory / f"{task.name}-{seed}", directory / "data" / task.name
    if not (data / "test.jsonl").exists():
        task.write(data, {"train": 60_000, "test": 1000})
    if not (run / "model").exists():
        preset = json.loads((RECIPES / "presets" / "sudoku4.json").read_text(encoding="utf-8"))
        preset["canvas_length"] = task.canvas_length
        preset["text_config"] |= {
            "vocab_size": len(load_tokenizer(data / "tokenizer") or ()),
            "sliding_window": task.window,
        }
        (directory / f"{task.name}.json").write_text(json.dumps(preset), encoding="utf-8")
        blockdiff.train(
            RECIPES / "forwards.yaml",
            [
                f"seed={seed}",
                f"model.preset={directory / task.name}.json",
                f"model.tokenizer={data / 'tokenizer'}",
                f"data.train={data / 'train.jsonl'}",
                f"data.heldout={data / 'test.jsonl'}",
                *task.training,
            ],
            run,
            resume=True,
        )
    return run / "model"


def distilled_of(model: Path) -> Path:
    """Return the directory of the model distilled from `model`; distil it if it is missing."""
    run, recipe = model.parent, model.parent / "recipe.yaml"
    distilled = run.with_name(f"{run.name}-distilled")
    if not (distilled / "model").exists():
        overrides = [f"model.path={model}", "model.preset=null", "model.tokenizer=null", "lora=none"]
        overrides += ["objective.kind=distil", "optim.lr=1.5e-3", "optim.ema=0.99", "train.steps=400"]
        blockdiff.train(recipe, overrides, distilled, resume=True)
    return distilled / "model"


def line_of(way: Way, task: Task, models: Sequence[Path], count: int) -> Line:
    """Return the line of a way, with the models of all seeds."""
    records, solved, seconds = [], [], []
    rows = list(read_rows(Source(str(models[0].parents[1] / "data" / task.name / "test.jsonl"))))[:count]
    for model in map(distilled_of, models) if way.is_distilled else models:
        loaded = blockdiff.load(model, dtype="float32", device="cpu")
        sampler = Sampler(loaded, load_tokenizer(model), strategy=way.strategy)
        report = evaluate(sampler, rows, task_of(task.evaluated_as))
        records += report["records"]
        solved.append(report["solved_share"])
        started = time.process_time()
        evaluate(sampler, rows[:TIMED], task_of(task.evaluated_as), batch_size=1)
        seconds.append((time.process_time() - started) / len(rows[:TIMED]))
    return Line(way, records, solved, 1e3 * sum(seconds) / len(seconds))


def section(task: Task, seeds: Sequence[int], directory: Path, count: int) -> tuple[list[Line], list[str]]:
    """Return the lines of a task, and their table."""
    models = [model_of(task, seed, directory) for seed in seeds]
    ways = [way for way in WAYS if task.has_distilled or not way.is_distilled]
    lines = [line_of(way, task, models, count) for way in ways]
    by_way = {line.way: line for line in lines}
    own, head = by_way[OWN], by_way[NEXT]
    for line in lines[1:]:
        line.verdict = verdict({"records": own.records}, {"records": line.records}) + line.same_as(head)
    reports = [blockdiff.Run(model.parent).report for model in models]
    trained = " and ".join(f"{each['steps']} optimiser steps in {each['seconds']:.0f} s" for each in reports)
    text = [
        f"\n**{task.name}**: {len(lines[0].records) // len(models)} test rows for each seed; trained for {trained}; "
        f"canvases and next tokens agree at {agreement(own, head):.1%} of places\n",
        f"| {' | '.join(HEADS)} |",
        "|---" * len(HEADS) + "|",
        *(f"| {' | '.join(line.cells())} |" for line in lines),
    ]
    print("\n".join(text), flush=True)
    return lines, text


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, print a table for each task, and write them where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forwards", description=__doc__)
    parser.add_argument("directory", type=Path, help="of the models and their data, made where it is missing")
    parser.add_argument("--tasks", default=",".join(task.name for task in TASKS), help="some of them, with commas")
    parser.add_argument("--seeds", default="0,1", help="of the models (default 0,1)")
    parser.add_argument("--count", type=int, default=1000, help="the most test rows (default 1000)")
    parser.add_argument("--output", type=Path, help="FILE.json; the tables go beside it as .md")
    given = parser.parse_args(arguments)
    record = machine.describe(torch.device("cpu"))
    text, found = [machine.place(record)], []
    print(text[0])
    try:
        given.directory.mkdir(parents=True, exist_ok=True)
        for task in (task for task in TASKS if task.name in given.tasks.split(",")):
            lines, said = section(task, list(map(int, given.seeds.split(","))), given.directory.resolve(), given.count)
            text += said
            found += [line.to_record(task.name) for line in lines]
    except (OSError, ValueError, BlockdiffError) as error:
        print(f"benchmarks.forwards: {error}", file=sys.stderr)
        return 1
    if given.output is not None:
        machine.write(given.output, {"machine": record, "lines": found}, "\n".join(text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
