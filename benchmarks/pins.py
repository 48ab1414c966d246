"""What pinned cells and expressions do to a sudoku model.

    python -m benchmarks.pins runs/quickstart/model --data data/sudoku4/test.jsonl [--limit 200] [--output FILE.json]

First the puzzles as they are, free and with their givens pinned. Then puzzles that lost a given, so that they have two
solutions: how often a template or a regular expression that names one digit gives the solution which has it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from blockdiff.data import sudoku
from blockdiff.sampling import Request, Sampler

CELLS = 16
Options = dict[str, Any]


def all_grids() -> list[str]:
    """The 288 solved 4x4 grids."""
    return sorted("".join(map(str, grid)) for grid in sudoku.solutions((0,) * CELLS))


def template_of(cells: str) -> str:
    """A template that pins the digits of a puzzle."""
    return "".join(cell if cell.isdigit() else "<?1>" for cell in cells)


def with_two_solutions(puzzles: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Puzzles without the first given whose loss leaves two solutions, with these; others are left out."""
    grids, found = all_grids(), []
    for puzzle in puzzles:
        for place in (place for place, cell in enumerate(puzzle) if cell.isdigit()):
            fewer = puzzle[:place] + "." + puzzle[place + 1 :]
            solutions = [grid for grid in grids if sudoku.keeps_givens(fewer, grid)]
            if len(solutions) == 2:
                found.append((fewer, solutions))
                break
    return found


def measure(sampler: Sampler, puzzles: Sequence[str]) -> dict[str, Any]:
    """Shares of right answers and steps per puzzle."""

    def row(cells: Sequence[str], options: Sequence[Options], is_right: Callable[[int, str], bool]) -> dict[str, float]:
        requests = [
            Request(n, prompt=f"{puzzle}=", **own) for n, (puzzle, own) in enumerate(zip(cells, options, strict=True))
        ]
        results = sampler.generate(requests)
        right = sum(is_right(n, result.text) for n, result in enumerate(results))
        return {"right": right / len(results), "steps": sum(sum(result.steps) for result in results) / len(results)}

    def is_solved(n: int, text: str) -> bool:
        return sudoku.is_solved(puzzles[n], text)

    doubtful = with_two_solutions(puzzles)
    cells, asked = [puzzle for puzzle, _ in doubtful], [both[n % 2] for n, (_, both) in enumerate(doubtful)]
    places = [next(at for at in range(CELLS) if one[at] != two[at]) for _, (one, two) in doubtful]
    named = list(zip(places, asked, strict=True))

    def is_asked(n: int, text: str) -> bool:
        return text == asked[n]

    pinned: list[Options] = [{"template": template_of(puzzle)} for puzzle in puzzles]
    holes: list[Options] = [
        {"template": template_of("." * at + grid[at] + "." * (CELLS - at - 1))} for at, grid in named
    ]
    regexes: list[Options] = [{"regex": f"[1-4]{{{at}}}{grid[at]}[1-4]{{{CELLS - at - 1}}}"} for at, grid in named]
    table = {
        "free": row(puzzles, [{}] * len(puzzles), is_solved),
        "givens pinned": row(puzzles, pinned, is_solved),
        "two solutions, free": row(cells, [{}] * len(cells), is_asked),
        "two solutions, one digit in a template": row(cells, holes, is_asked),
        "two solutions, one digit in an expression": row(cells, regexes, is_asked),
    }
    return {"puzzles": len(puzzles), "puzzles with two solutions": len(doubtful), "table": table}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pins", description=str(__doc__).split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    lines = options.data.read_text(encoding="utf-8").splitlines()[: options.limit]
    sampler = Sampler.from_pretrained(options.model, dtype="float32")
    found = measure(sampler, [json.loads(line)["prompt"].removesuffix("=") for line in lines])
    found["machine"] = describe(sampler.model.device)
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{found['puzzles']} puzzles; {found['puzzles with two solutions']} have two solutions with a given less")
    for name, values in found["table"].items():
        print(f"{name:42} {values['right']:7.1%} right  {values['steps']:5.2f} steps")


if __name__ == "__main__":
    main()
