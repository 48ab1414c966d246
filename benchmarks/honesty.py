"""Honesty: probabilities of reads beside the true posterior, which is known by enumeration.

    python -m benchmarks.honesty runs/honesty --seeds 0 1 2 --output FILE.json

Grids are uniform over all 288 solved 4x4 sudokus, and each cell is given with probability 0.3; no grid is held out. The
posterior of a cell is the share of the grids that agree with the givens. The models of recipes/quickstart.yaml and
recipes/sudoku4_causal.yaml are trained on such rows, half of which ask for the whole grid and half for one cell; those
that the directory has already are kept. Then other prompts are read: one cell alone (single), all blank cells in one
canvas (joint), by the shares of full samples, and by the next-token head.

TV: the total variation to the posterior; excess: the NLL above the posterior's entropy, in nats; ECE: over 15 bins of
equal mass, beside the error that a perfect model with these probabilities shows. Temperatures are fitted on 1,000
other prompts.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import blockdiff
from benchmarks import machine
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.tokenizer import character_tokenizer, write_tokenizer
from blockdiff.errors import BlockdiffError
from blockdiff.evals import judging
from blockdiff.evals.judging import Judged
from blockdiff.recipes import sudoku
from blockdiff.sampling import Engine, Request, Result, RunningRead, Sampler
from blockdiff.sampling.calibration import fit_temperature

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
GIVEN = 0.3  # the probability with which a cell is given
CELLS = "abcdefghijklmnop"  # what asks for one cell
DIGITS = "1234"
STEPS, DRAWS = (1, 2, 4), (1, 2, 4)
FITTED, SAMPLED, SAMPLES, TOGETHER = 1000, 250, 64, 500
MODELS = {"quickstart": "denoiser", "sudoku4_causal": "next tokens"}


@dataclass(frozen=True)
class Puzzle:
    """A grid, and the cells of it that are given."""

    cells: str
    grid: str

    @property
    def blanks(self) -> list[int]:
        """The cells that are not given."""
        return [place for place, cell in enumerate(self.cells) if cell == "."]

    def posterior(self) -> Tensor:
        """The probability of each digit in each cell, fp64 [16, 4]."""
        grids = every_grid()
        given = torch.tensor([0 if cell == "." else int(cell) for cell in self.cells])
        matching = grids[((grids == given) | (given == 0)).all(-1)]
        return torch.stack([(matching == digit).double().mean(0) for digit in (1, 2, 3, 4)], -1)


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    model: str
    seed: int
    way: str
    steps: int
    draws: int
    count: int
    variation: float
    excess: float
    calibration_error: float
    floor: float
    temperature: float | None
    milliseconds: float


@cache
def every_grid() -> Tensor:
    """All solved grids, int64 [288, 16]."""
    return torch.tensor(list(sudoku.solutions((0,) * 16)))


def puzzles(count: int, seed: int) -> list[Puzzle]:
    """So many puzzles with a blank cell."""
    draw, found = random.Random(seed), list[Puzzle]()
    grids = every_grid().tolist()
    while len(found) < count:
        grid = "".join(map(str, draw.choice(grids)))
        cells = "".join(cell if draw.random() < GIVEN else "." for cell in grid)
        if "." in cells:
            found.append(Puzzle(cells, grid))
    return found


def write_data(directory: Path, train: int, test: int) -> None:
    """Write the rows to learn from, those that are held out, and the tokenizer."""
    write_tokenizer(character_tokenizer(sudoku.alphabet(4) + CELLS), directory / "tokenizer")
    for name, count, seed in (("train", train, 1), ("heldout", test, 2)):
        draw, rows = random.Random(seed), list[dict[str, str]]()
        for puzzle in puzzles(count, seed):
            cell = draw.choice(puzzle.blanks)
            whole = {"prompt": f"{puzzle.cells}=", "response": puzzle.grid}
            single = {"prompt": f"{puzzle.cells}{CELLS[cell]}=", "response": puzzle.grid[cell]}
            rows.append(draw.choice((whole, single)))
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def trained(directory: Path, recipe: str, seed: int) -> Path:
    """The model of a recipe and a seed, trained if it is not there."""
    run = directory / f"{recipe}-{seed}"
    if not (run / "model").is_dir():
        data = directory / "data"
        overrides = [f"model.tokenizer={data / 'tokenizer'}", f"data.train={data / 'train.jsonl'}", f"seed={seed}"]
        overrides.append(f"data.heldout={data / 'heldout.jsonl'}")
        blockdiff.train(RECIPES / f"{recipe}.yaml", overrides, run, resume=(run / "checkpoints").is_dir())
    return run / "model"


@dataclass
class Answers:
    """The log-probabilities [N, 4] of digits by draw, the posteriors and the true digits of some cells."""

    scores: list[Tensor]
    posteriors: list[Tensor]
    digits: list[int]
    rows: list[int]

    def line(self, others: Answers | None, **about: Any) -> Iterator[Line]:
        """The line of the table, and with others to fit on the one with their temperature."""
        yield self._line(None, **about)
        if others is not None:
            targets = [torch.eye(4, dtype=torch.float64)[digit] for digit in others.digits]
            yield self._line(fit_temperature(others.scores, targets).temperature, **about)

    def _line(self, temperature: float | None, **about: Any) -> Line:
        p_NX = torch.stack([(score / (temperature or 1.0)).softmax(-1).mean(0) for score in self.scores])
        truth_NX, target_NX = torch.stack(self.posteriors), torch.eye(4, dtype=torch.float64)[self.digits]
        judged = Judged(p_NX, target_NX, torch.tensor(self.rows))
        variation = float((p_NX - truth_NX).abs().sum(-1).mean() / 2)
        excess = judging.nll(Judged(p_NX, truth_NX, judged.row_N)) - judging.nll(
            Judged(truth_NX, truth_NX, judged.row_N)
        )
        errors = judging.calibration_error(judged), judging.calibration_floor(judged)
        return Line(
            count=len(self.scores), variation=variation, excess=excess, calibration_error=errors[0], floor=errors[1],
            temperature=temperature, **about,
        )  # fmt: skip


def read(sampler: Sampler, asked: Sequence[Puzzle], joint: bool, steps: int, draws: int) -> tuple[Answers, float]:
    """The reads of the puzzles, and the milliseconds of a read."""
    found, began = Answers([], [], [], []), time.perf_counter()
    for first in range(0, len(asked), TOGETHER):
        engine, readings = Engine(sampler.model, settings=sampler.settings), []
        for number, puzzle in enumerate(asked[first : first + TOGETHER], first):
            cells = puzzle.blanks if joint else [cell_of(puzzle, number)]
            holes = {place: f"<?c{place}>" for place in cells}
            template = "".join(holes.get(place, cell) for place, cell in enumerate(puzzle.cells)) if joint else "<?c>"
            prompt = f"{puzzle.cells}=" if joint else f"{puzzle.cells}{CELLS[cells[0]]}="
            names = [f"c{place}" for place in cells] if joint else ["c"]
            request = Request(number, prompt=prompt)
            choices = {name: list(DIGITS) for name in names}
            given = request, template, choices, sampler.model, sampler.settings
            readings.append((number, puzzle, cells, names, RunningRead.prepare(*given, steps=steps, draws=draws)))
            engine.submit(request, draws=readings[-1][-1].sequences)
        while engine.step():
            pass
        if failed := [event for event in engine.events() if isinstance(event, Result) and event.error is not None]:
            raise BlockdiffError(f"prompt {failed[0].id}: {failed[0].error}")
        for number, puzzle, cells, names, reading in readings:
            for cell, name in zip(cells, names, strict=True):
                _add(found, puzzle, cell, reading.scores(name), number)
    return found, 1e3 * (time.perf_counter() - began) / len(asked)


def sampled(sampler: Sampler, asked: Sequence[Puzzle]) -> tuple[Answers, float]:
    """The shares of the digits in full samples, each digit counted half a time more than it was seen."""
    found, began = Answers([], [], [], []), time.perf_counter()
    requests = [Request(f"{n}/{k}", prompt=f"{each.cells}=") for n, each in enumerate(asked) for k in range(SAMPLES)]
    texts = [result.text for result in sampler.generate(requests, batch_size=256)]
    for number, puzzle in enumerate(asked):
        own = texts[number * SAMPLES : (number + 1) * SAMPLES]
        for cell in puzzle.blanks:
            seen = [sum(text[cell : cell + 1] == digit for text in own) + 0.5 for digit in DIGITS]
            _add(found, puzzle, cell, (torch.tensor([seen], dtype=torch.float64) / sum(seen)).log(), number)
    return found, 1e3 * (time.perf_counter() - began) / len(asked)


def next_tokens(sampler: Sampler, asked: Sequence[Puzzle]) -> tuple[Answers, float]:
    """The next-token head's probabilities of the digits of one cell."""
    found, began = Answers([], [], [], []), time.perf_counter()
    prompts = [f"{each.cells}{CELLS[cell_of(each, number)]}=" for number, each in enumerate(asked)]
    requests = [
        Request(number, prompt=prompt, scores=True, top_logprobs=20, max_new_tokens=1)
        for number, prompt in enumerate(prompts)
    ]
    tokens = [sampler.settings.tokenizer.convert_tokens_to_ids(digit) for digit in DIGITS]  # type: ignore[union-attr]
    for number, result in enumerate(sampler.generate(requests, batch_size=256)):
        assert result.top_logprobs is not None
        known = dict(result.top_logprobs[0])
        scores = torch.tensor([[known[token] for token in tokens]], dtype=torch.float64)
        _add(found, asked[number], cell_of(asked[number], number), scores, number)
    return found, 1e3 * (time.perf_counter() - began) / len(asked)


def cell_of(puzzle: Puzzle, number: int) -> int:
    """The blank cell that is asked for of a puzzle."""
    return random.Random(number).choice(puzzle.blanks)


def _add(found: Answers, puzzle: Puzzle, cell: int, scores_NX: Tensor, row: int) -> None:
    found.scores.append(scores_NX)
    found.posteriors.append(puzzle.posterior()[cell])
    found.digits.append(int(puzzle.grid[cell]) - 1)
    found.rows.append(row)


def lines_of(directory: Path, recipe: str, seed: int, count: int) -> Iterator[Line]:
    """The lines of a model."""
    place = trained(directory, recipe, seed)
    sampler = Sampler(blockdiff.load(place, dtype="float32", device="cpu"), load_tokenizer(place))
    asked, others = puzzles(count, 3), puzzles(FITTED, 4)
    about: dict[str, Any] = dict(model=MODELS[recipe], seed=seed)
    if not sampler.settings.denoises:
        found, milliseconds = next_tokens(sampler, asked)
        own = dict(way="next-token head", steps=0, draws=1, milliseconds=milliseconds)
        yield from found.line(next_tokens(sampler, others)[0], **about, **own)
        return
    for joint in (False, True):
        for steps, draws in [*((1, draws) for draws in DRAWS), *((steps, DRAWS[-1]) for steps in STEPS[1:])]:
            found, milliseconds = read(sampler, asked, joint, steps, draws)
            own = dict(way="joint" if joint else "single", steps=steps, draws=draws, milliseconds=milliseconds)
            yield from found.line(read(sampler, others, joint, steps, draws)[0], **about, **own)
    found, milliseconds = sampled(sampler, asked[:SAMPLED])
    own = dict(way=f"{SAMPLES} full samples", steps=0, draws=SAMPLES, milliseconds=milliseconds)
    yield from found.line(None, **about, **own)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table line by line, and write it where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.honesty", description=__doc__)
    parser.add_argument("directory", type=Path, help="where data and runs are, or are made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=5000, help="the prompts that are read (default 5000)")
    parser.add_argument("--rows", type=int, default=60_000, help="the rows to learn from (default 60000)")
    parser.add_argument("--output", type=Path, help="FILE.json; the table goes beside it as .md")
    given = parser.parse_args(arguments)
    record = machine.describe(torch.device("cpu"))
    head = "| model | seed | way | steps | draws | answers | TV | excess | ECE | floor | temperature | ms a prompt |"
    text, found = [machine.place(record), "", head, "|---" * 12 + "|"], list[Line]()
    print("\n".join(text))
    try:
        if not (data := given.directory / "data").is_dir():
            data.mkdir(parents=True)
            write_data(data, given.rows, 512)
        for recipe in MODELS:
            for seed in given.seeds:
                for line in lines_of(given.directory, recipe, seed, given.prompts):
                    found.append(line)
                    text.append(_row(line))
                    print(text[-1], flush=True)
    except (OSError, ValueError, BlockdiffError) as error:
        print(f"benchmarks.honesty: {error}", file=sys.stderr)
        return 1
    if given.output is not None:
        contents = {"machine": record, "lines": [asdict(line) for line in found]}
        machine.write(given.output, contents, "\n".join(text) + "\n")
    return 0


def _row(line: Line) -> str:
    temperature = "-" if line.temperature is None else f"{line.temperature:.2f}"
    errors = f"{line.variation:.4f} | {line.excess:.4f} | {line.calibration_error:.4f} | {line.floor:.4f}"
    way = f"{line.model} | {line.seed} | {line.way} | {line.steps or '-'} | {line.draws} | {line.count}"
    return f"| {way} | {errors} | {temperature} | {line.milliseconds:.1f} |"


if __name__ == "__main__":
    sys.exit(main())
