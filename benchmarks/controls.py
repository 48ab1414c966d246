"""The share of answers that are right as a whole when one digit of it is held by a template or a regular expression.

    python -m benchmarks.controls runs/quickstart/model data/sudoku4/test.jsonl

A given is taken away from each 4x4 puzzle that then has two solutions, and one of these is asked for by one of its
digits, that of the first cell in which the two differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import blockdiff
from benchmarks import machine
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.errors import BlockdiffError
from blockdiff.recipes import sudoku
from blockdiff.sampling import Request, Sampler


@dataclass(frozen=True)
class Puzzle:
    """A puzzle with two solutions: its prompt, the one that is asked for, and a cell in which they differ."""

    prompt: str
    wanted: str
    cell: int

    def is_held(self, text: str) -> bool:
        """True for a text that has the digit of the cell."""
        return text[self.cell : self.cell + 1] == self.wanted[self.cell]

    def requests(self, number: int) -> dict[str, Request]:
        """The request that leaves the model free, and those that hold the digit of the cell."""
        digit, before, after = self.wanted[self.cell], self.cell, len(self.wanted) - self.cell - 1
        template = f"<?{before}>" * (before > 0) + digit + f"<?{after}>" * (after > 0)
        regex = f"[1-4]{{{before}}}{digit}[1-4]{{{after}}}"
        return {
            "nothing held": Request(number, prompt=self.prompt),
            "template": Request(number, prompt=self.prompt, template=template),
            "regex": Request(number, prompt=self.prompt, regex=regex),
        }


def ambiguous(prompts: Iterable[str]) -> list[Puzzle]:
    """The puzzles that have two solutions without one of their givens, the first such given."""
    found = []
    for prompt in prompts:
        for place in range(16):
            cells = prompt[:place] + "." + prompt[place + 1 : 16]
            both = list(sudoku.solutions(tuple(int(cell) if cell.isdigit() else 0 for cell in cells)))
            if prompt[place] != "." and len(both) == 2:
                one, other = ("".join(map(str, grid)) for grid in both)
                found.append(Puzzle(cells + "=", one, next(n for n in range(16) if one[n] != other[n])))
                break
    return found


@dataclass(frozen=True)
class Counts:
    """The answers of one kind: how many have the digit that was asked for, are a solution, and how many there are."""

    kind: str
    held: int
    solved: int
    answers: int


def counted(sampler: Sampler, puzzles: Sequence[Puzzle], seed: int = 0) -> list[Counts]:
    """The counts without a control, with a template, and with an expression."""
    found = []
    for kind in ("nothing held", "template", "regex"):
        requests = [puzzle.requests(number)[kind] for number, puzzle in enumerate(puzzles)]
        texts = [result.text for result in sampler.generate(requests, seed=seed)]
        held = [puzzle.is_held(text) for puzzle, text in zip(puzzles, texts, strict=True)]
        solved = [sudoku.is_solved(puzzle.prompt, text) for puzzle, text in zip(puzzles, texts, strict=True)]
        found.append(Counts(kind, sum(held), sum(solved), len(texts)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts as a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.controls", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("puzzles", type=Path, help="a JSONL file of `blockdiff data sudoku`")
    parser.add_argument("--count", type=int, default=1000, help="the most puzzles (default 1000)")
    given = parser.parse_args(arguments)
    try:
        rows = [json.loads(line) for line in given.puzzles.read_text(encoding="utf-8").splitlines()[: given.count]]
        sampler = Sampler(blockdiff.load(given.model, dtype="float32", device="cpu"), load_tokenizer(given.model))
    except (OSError, ValueError, BlockdiffError) as error:
        print(f"benchmarks.controls: {error}", file=sys.stderr)
        return 1
    print(machine.place(machine.describe(torch.device("cpu"))))
    print("\n| | the digit is held | the whole is a solution | puzzles |\n|---|---|---|---|")
    for each in counted(sampler, ambiguous(row["prompt"] for row in rows)):
        print(f"| {each.kind} | {each.held} | {each.solved} | {each.answers} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
