"""`python -m benchmarks.kills`: kill -9 a tiny training run again and again, and damage its files: what becomes of it?

A chain is one run directory: `blockdiff train --resume` is started and killed up to five times, then left to end. Its
metrics, samples and weights must equal those of a run that nobody killed, to the bit. A third of the kills come after
a random time, a third at a random file operation of the run (logs, samples, export, token cache), a third at one in
the folder of the checkpoints. Then the cases of `benchmarks.damage` are tried. One table says what became of all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from blockdiff.metrics import FILE_NAME
from blockdiff.training.checkpoint_content import FOLDER, steps_saved
from tests.support.damage import PROMPT, SILENT, Damage, all_damages, copy_to, outcome
from tests.support.tiny_run import Kill, differences, ended, in_child, make_inputs, make_recipe, stage_of, train_words

IN_A_CHAIN = 5


@dataclass
class Chain:
    """The fate of one run directory."""

    kills: list[Kill] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)  # differences from the undisturbed run; empty: none


def main(words: list[str] | None = None) -> int:
    """Run all; return 1 if a killed run differs from the undisturbed one or a damage is not noticed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="kills (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments to kill at")
    parser.add_argument("--every", type=int, default=1, help="take every n-th damage (default 1: all; 0: none)")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        whole = Whole.trained(Path(directory))
        chains = list(kill_many(whole, options.count, options.seed))
        damages = list(all_damages())[:: options.every] if options.every else []
        outcomes = [(damage, damaged(whole, damage, number)) for number, damage in enumerate(damages)]
    kills = [kill for chain in chains for kill in chain.kills]
    silent = [f"{damage.part}: {damage.what}" for damage, found in outcomes if found == SILENT]
    figures = {
        "kills": len(kills),
        "runs": len(chains),
        "runs_that_differ": [chain.differs for chain in chains if chain.differs],
        "stages": dict(Counter(kill.stage for kill in kills).most_common()),
        "kinds": dict(Counter(kill.kind for kill in kills)),
        "damages": len(damages),
        "outcomes": dict(Counter(found for _, found in outcomes)),
        "unnoticed": silent,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print("\n".join(table(chains, outcomes)))
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    return 1 if figures["runs_that_differ"] or silent else 0


def table(chains: list[Chain], outcomes: list[tuple[Damage, str]]) -> list[str]:
    """Return lines that say what was done, how often, and with what result."""
    rows = []
    for stage, count in Counter(kill.stage for chain in chains for kill in chain.kills).most_common():
        spoilt = sum(bool(chain.differs) for chain in chains if stage in {kill.stage for kill in chain.kills})
        rows.append((f"kill -9 {stage}", count, f"{spoilt} runs differ" if spoilt else "every run equal to the bit"))
    for part in dict.fromkeys(damage.part for damage, _ in outcomes):
        found = Counter(word for damage, word in outcomes if damage.part == part)
        rows.append((f"damage to {part}", found.total(), ", ".join(f"{n} {word}" for word, n in found.items())))
    widths = [max(len(str(row[column])) for row in rows) for column in (0, 1)] if rows else []
    lines = [f"{what:<{widths[0]}}  {times:>{widths[1]}}  {became}" for what, times, became in rows]
    return lines + [f"UNNOTICED {damage.part}: {damage.what}" for damage, word in outcomes if word == SILENT]


@dataclass(frozen=True)
class Whole:
    """An undisturbed run in `folder`/whole, with its inputs beside it."""

    folder: Path
    seconds: float
    operations: dict[str, int]
    answer: str  # its model's answer to PROMPT

    @property
    def run(self) -> Path:
        """The run's directory."""
        return self.folder / "whole"

    @classmethod
    def trained(cls, folder: Path) -> Whole:
        """Make the inputs and the run; print on stderr how long it took."""
        make_inputs(folder)
        attempt(folder, folder / "first", None)
        for name in (folder / "modules").read_text().split():
            with suppress(ImportError):
                importlib.import_module(name)  # once here instead of in every child
        began = time.perf_counter()
        operations = attempt(folder, folder / "whole", None) or {}
        seconds = time.perf_counter() - began
        _, answer = ended(folder, sample_words(folder / "whole"))
        print(f"nobody kills: {seconds:.1f} s, file operations: {operations}", file=sys.stderr, flush=True)
        return cls(folder, seconds, operations, answer)


def sample_words(run: Path) -> list[str]:
    """Return the command that samples from the model of a run."""
    return ["sample", str(run / "model"), "--prompt", PROMPT, "--steps", "2", "--dtype", "auto"]


def damaged(whole: Whole, damage: Damage, number: int) -> str:
    """Damage a copy of everything, resume or use it, and return the outcome in words."""
    place = whole.folder / f"damaged-{number}"
    place.mkdir()
    copy_to(whole.folder, whole.run, place)
    make_recipe(place)
    if not damage.is_model:  # as a kill after step 6 leaves it
        for path in (place / "run").iterdir():
            if path.name not in (FOLDER, FILE_NAME, "samples.jsonl", "recipe.yaml", "data.json"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for step, path in steps_saved(place / "run").items():
            if step != 6:
                shutil.rmtree(path)
    for file in sorted(place.glob(damage.file)):
        damage.change(file)
    words = sample_words(place / "run") if damage.is_model else train_words(place, place / "run")
    code, said = ended(place, words)
    differing = []
    if code == 0:
        is_other = damage.is_model and whole.answer not in said
        differing = ["answer"] * is_other if damage.is_model else differences(whole.run, place / "run")
    found = outcome(damage, code, said, differing)
    told = " | ".join(line for line in said.splitlines() if "blockdiff: " in line or found == SILENT)
    print(f"{damage.part}: {damage.what}: {found} {differing or ''} {told[-300:]}", file=sys.stderr, flush=True)
    shutil.rmtree(place)
    return found


def kill_many(whole: Whole, count: int, seed: int) -> Iterator[Chain]:
    """Run and kill chains until there were `count` kills; print on stderr how each ended."""
    draw, done, number = random.Random(seed), 0, 0
    folder, seconds, operations = whole.folder, whole.seconds, whole.operations
    while done < count:
        number += 1
        chain, run = Chain(), folder / f"run-{number}"
        for _ in range(min(IN_A_CHAIN, count - done)):
            kind = ("time", *operations)[done % 3]
            at = draw.uniform(0, 0.8 * seconds) if kind == "time" else draw.randint(1, operations[kind])
            kill = Kill(kind, at)
            if attempt(folder, run, kill) is not None:
                break  # it ended before the kill
            kill.stage = stage_of(run)
            chain.kills.append(kill)
            done += 1
        attempt(folder, run, None)
        chain.differs = differences(whole.run, run)
        told = ", ".join(f"{kill.kind} {kill.at:.3g} ({kill.stage})" for kill in chain.kills)
        print(f"{'DIFFERS ' * bool(chain.differs)}{done}/{count}: {told}", file=sys.stderr, flush=True)
        yield chain


def attempt(folder: Path, run: Path, kill: Kill | None) -> dict[str, int] | None:
    """Run `blockdiff train --resume` until it ends or is killed.

    Returns counts of its file operations, None if it was killed. Raises RuntimeError with the process's output if it
    failed.
    """
    return in_child(folder, train_words(folder, run), kill)


if __name__ == "__main__":
    sys.exit(main())
