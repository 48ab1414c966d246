"""Learning curves of reinforcement learning, beside supervised training on the same solved rows.

    python -m benchmarks.rl runs/rl --output FILE.json

Of each task 1,000 rows have solutions. A model is trained on them until the share of held-out problems that it solves
has stopped rising: the start. From there reinforcement learning goes on with 20,000 problems without solutions
(recipes/rl_countdown.yaml and rl_sudoku.yaml), and beside it supervised training with the 1,000 rows, for as many
seconds of training. Both keep the weights that solve most of 300 problems of a third split. All three then answer
1,000 test problems, as the task's policy is used: next tokens without a temperature, or canvases by the model's own
settings. Runs that the directory has are kept, and one that was stopped goes on. Where a case was measured with several
seeds, a last table has their mean and standard deviation.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import blockdiff
from benchmarks import machine
from benchmarks.forwards import interval
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.sources import Source, read_rows
from blockdiff.errors import BlockdiffError
from blockdiff.evals import task as task_of
from blockdiff.evals.run import evaluate
from blockdiff.recipes import countdown, sudoku
from blockdiff.sampling import Sampler

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
COUNTS = {"sft": 1000, "prompts": 20_000, "test": 1000, "tune": 300}


@dataclass(frozen=True)
class Case:
    """A task with its recipes, the overrides of the second, and the strategy that uses its policy (None: its own)."""

    name: str
    task: str
    start: str
    reinforced: str
    changes: tuple[str, ...] = ()
    strategy: str | None = None


STOPPING = ("evaluation.prompts_every=100", "evaluation.best=sample_accuracy", "evaluation.patience=4")
CASES = (
    Case("countdown, head", "countdown", "countdown3.yaml", "rl_countdown.yaml", strategy="next_token"),
    Case("sudoku, canvas", "sudoku", "quickstart.yaml", "rl_sudoku.yaml"),
    Case(
        "sudoku, canvas, steps have a price",
        "sudoku",
        "quickstart.yaml",
        "rl_sudoku.yaml",
        ("objective.reward={sudoku: 1.0, 'blockdiff.rl.reward:steps_per_canvas': -0.02}", "evaluation.best=none"),
    ),
)


def data_of(task: str, directory: Path) -> Path:
    """Return the directory of a task's rows and tokenizer; make them if they are missing."""
    found = directory / "data" / task
    if not (found / "test.jsonl").exists():
        if task == "countdown":
            countdown.write_splits(found, 3, COUNTS)
        else:
            sudoku.write_splits(found, 4, COUNTS)
    return found


def run_of(case: Case, seed: int, directory: Path, way: str, seconds: float = 0.0) -> blockdiff.Run:
    """Return the run of one way to train; train it if it is missing.

    way: "start", "sft" for supervised training continued for `seconds` seconds, or "rl".
    """
    data, start = data_of(case.task, directory), directory / f"{case.task}-{seed}-start"
    changes = [f"seed={seed}", f"evaluation.prompts={data / 'tune.jsonl'}", "evaluation.prompts_count=300"]
    changes += [f"evaluation.task={case.task}", *STOPPING]
    if case.strategy is not None:
        changes.append(f"evaluation.strategy={case.strategy}")
    if way == "rl":
        run = directory / f"{case.name.replace(', ', '-').replace(' ', '-')}-{seed}-rl"
        changes += [f"model.path={start / 'model'}", f"data.train={data / 'prompts.jsonl'}"]
        changes += ["evaluation.patience=none", *case.changes]
        if not (run / "model").exists():
            blockdiff.train(RECIPES / case.reinforced, changes, run, resume=True)
        return blockdiff.Run(run)
    changes += [f"data.train={data / 'sft.jsonl'}", "data.heldout=none", "train.eval_every=0"]
    changes.append(f"model.tokenizer={data / 'tokenizer'}")
    run = start
    if way == "sft":
        run, first = directory / f"{case.task}-{seed}-sft", blockdiff.Run(start).report
        steps = max(1, round(seconds * first["steps"] / first["seconds"]))
        # A tenth of the rate, with which the start ended: at the full rate it would first forget.
        changes += [f"model.path={start / 'model'}", "model.preset=null", "lora=none", "optim.lr=1.0e-3"]
        changes += [f"train.steps={steps}", "evaluation.patience=none"]
    if not (run / "model").exists():
        blockdiff.train(RECIPES / case.start, changes, run, resume=True)
    return blockdiff.Run(run)


def measured(case: Case, run: blockdiff.Run, directory: Path, count: int) -> dict[str, Any]:
    """Return the share of test problems that a run's model solves, and its denoising steps per canvas."""
    model = run.directory / "model"
    loaded = blockdiff.load(model, dtype="float32", device="cpu")
    sampler = Sampler(loaded, load_tokenizer(model), strategy=case.strategy)
    rows = list(read_rows(Source(str(data_of(case.task, directory) / "test.jsonl"))))[:count]
    report = evaluate(sampler, rows, task_of(case.task))
    low, high = interval(round(report["solved_share"] * len(rows)), len(rows))
    found = {"solved": report["solved_share"], "low": low, "high": high}
    found["steps_per_canvas"] = report["steps_per_canvas"]
    return found | {"steps": run.report["steps"], "seconds": run.report["seconds"]}


WORDS = {"start": "the start", "sft": "supervised, on the same rows", "rl": "reinforced"}


def table(run: dict[str, Any]) -> list[str]:
    """Return the lines of a run's table."""
    commit = str(run["machine"]["commit"])[:12]
    lines = [
        f"\n**{run['case']}**, seed {run['seed']}, commit {commit}\n",
        "| | right (95 %) | steps per canvas | optimiser steps | training s |",
    ]
    lines.append("|---" * 5 + "|")
    for way, each in run["results"].items():
        share = f"{each['solved']:.1%} ({each['low']:.1%} to {each['high']:.1%})"
        costs = f"{each['steps_per_canvas']:.2f} | {each['steps']} | {each['seconds']:.0f}"
        lines.append(f"| {WORDS[way]} | {share} | {costs} |")
    return lines


def means(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table over seeds, for every case with several; [] if no case has."""
    lines = []
    for case in dict.fromkeys(run["case"] for run in runs):
        of_seeds = [run["results"] for run in runs if run["case"] == case]
        if len(of_seeds) < 2:
            continue
        lines += [f"\n**{case}**, mean of {len(of_seeds)} seeds (standard deviation)\n"]
        lines += ["| | right | steps per canvas |", "|---" * 3 + "|"]
        for way, words in WORDS.items():
            solved, steps = ([found[way][key] for found in of_seeds] for key in ("solved", "steps_per_canvas"))
            share = f"{statistics.mean(solved):.1%} ({statistics.stdev(solved):.1%})"
            lines.append(f"| {words} | {share} | {statistics.mean(steps):.2f} ({statistics.stdev(steps):.2f}) |")
        gains = [found["rl"]["solved"] - max(found[way]["solved"] for way in ("start", "sft")) for found in of_seeds]
        points = [100 * gain for gain in gains]
        lines.append(
            f"| over the better of the two | {statistics.mean(points):+.1f} points ({statistics.stdev(points):.1f}; "
            f"{min(points):+.1f} to {max(points):+.1f}) | |"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is missing, print a table for each case and seed, and write them if an output is named."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rl", description=__doc__)
    parser.add_argument("directory", type=Path, help="of runs and data, made where it is missing")
    parser.add_argument("--cases", default="0,1,2", help="numbers of cases, with commas (default 0,1,2)")
    parser.add_argument("--seeds", default="0,1,2", help="of the models (default 0,1,2)")
    parser.add_argument("--count", type=int, default=1000, help="the most test rows (default 1000)")
    parser.add_argument("--output", type=Path, help="FILE.json; the tables go beside it as .md")
    given = parser.parse_args(arguments)
    record = machine.describe(torch.device("cpu"))
    text, found = [machine.place(record)], []
    print(text[0])
    try:
        directory = given.directory.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        for case in (CASES[int(number)] for number in given.cases.split(",") if number):
            for seed in map(int, filter(None, given.seeds.split(","))):
                runs = {"start": run_of(case, seed, directory, "start")}
                reinforced = run_of(case, seed, directory, "rl")
                runs["sft"] = run_of(case, seed, directory, "sft", reinforced.report["seconds"])
                runs["rl"] = reinforced
                results = {way: measured(case, run, directory, given.count) for way, run in runs.items()}
                found.append({"case": case.name, "seed": seed, "machine": record, "results": results})
                print("\n".join(table(found[-1])), flush=True)
    except (OSError, ValueError, IndexError, BlockdiffError) as error:
        print(f"benchmarks.rl: {error}", file=sys.stderr)
        return 1
    found.sort(key=lambda run: (run["case"], run["seed"]))
    lines = means(found)
    print("\n".join(lines))
    if given.output is not None:
        text += [line for run in found for line in table(run)] + lines
        machine.write(given.output, {"machine": record, "runs": found}, "\n".join(text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
