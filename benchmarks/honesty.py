"""Honesty: the probabilities of decisions compared with the true posterior, which is known by enumeration.

    python -m benchmarks.honesty runs/honesty --seeds 0 1 2 --output FILE.json

Grids are uniform over all 288 solved 4x4 sudokus, and each cell is given with probability 0.3. The posterior of a cell
is the share of the grids that agree with the givens (recipes/sudoku_decisions.py). Four ways say what is in a blank
cell of four: a decision about it alone (single), decisions about all four in one canvas (joint), the shares of 64
sampled grids, and the next-token head. recipes/decisions_cpu.yaml is trained for the first two, recipes/quickstart.yaml
on whole grids for the third, and recipes/sudoku4_causal.yaml on conversations that ask for a cell by a label for the
last. Models that the directory has already are kept.

TV: the total variation to the posterior; excess: the NLL above the posterior's entropy, in nats; ECE: over 15 bins of
equal mass, beside the error that a perfect model with these probabilities shows. Temperatures are fitted on other
prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import blockdiff
from benchmarks import machine
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.decision_rows import DecisionRow
from blockdiff.data.tokenizer import character_tokenizer, write_tokenizer
from blockdiff.decisions import Asking
from blockdiff.decisions.form import ask_one, with_question
from blockdiff.errors import BlockdiffError
from blockdiff.evals import judging
from blockdiff.evals.decisions import decide_rows
from blockdiff.evals.judging import Judged
from blockdiff.recipes import sudoku
from blockdiff.recipes.sudoku_decisions import ASKED, DIGITS, Puzzle, draw_puzzle, questions, write_splits
from blockdiff.sampling import Request, Sampler
from blockdiff.sampling.calibration import fit_temperature
from blockdiff.sampling.scores import score

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
WAYS = [(steps, draws) for steps in (1, 2, 4) for draws in (1, 4)]
SAMPLED, SAMPLES, BATCH = 100, 64, 256
LABELS = "ABCD"  # of the four digits, in the form `decisions`
MODELS = {"decisions_cpu": "decisions", "quickstart": "grids", "sudoku4_causal": "next tokens"}


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


def puzzles(count: int, seed: int) -> list[Puzzle]:
    """Draw `count` puzzles."""
    draw = Random(seed)
    return [draw_puzzle(draw) for _ in range(count)]


def write_data(directory: Path, rows: int) -> None:
    """Write the rows of the three models and the tokenizers."""
    heldout = max(1, rows // 40)
    write_splits(directory, {"train": rows, "heldout": heldout})
    write_tokenizer(character_tokenizer(sudoku.alphabet(4)), directory / "grids")
    config = json.loads((RECIPES / "presets" / "sudoku4-causal.json").read_text(encoding="utf-8"))
    vocabulary = json.loads((RECIPES / "presets" / "sudoku-decisions.json").read_text(encoding="utf-8"))["text_config"]
    config |= {"vocab_size": vocabulary["vocab_size"]}
    (directory / "causal.json").write_text(json.dumps(config), encoding="utf-8")
    for name, count, seed in (("train", rows, 1), ("heldout", heldout, 2)):
        drawn = puzzles(count, seed)
        grids = [{"prompt": f"{puzzle.cells}=", "response": puzzle.grid} for puzzle in drawn]
        answers = [{"role": "assistant", "content": LABELS[int(puzzle.grid[puzzle.asked]) - 1]} for puzzle in drawn]
        single = [{"messages": [*_asking(puzzle), answer]} for puzzle, answer in zip(drawn, answers, strict=True)]
        for kind, made in (("grids", grids), ("single", single)):
            text = "".join(json.dumps(row) + "\n" for row in made)
            (directory / f"{kind}-{name}.jsonl").write_text(text, encoding="utf-8")


def trained(directory: Path, recipe: str, seed: int, changes: Sequence[str]) -> Path:
    """Return the model of a recipe and a seed; train it if it is missing."""
    run, data = directory / f"{recipe}-{seed}", directory / "data"
    if not (run / "model").is_dir():
        of_recipe = {
            "decisions_cpu": ["model.tokenizer=tokenizer", "data.train=train.jsonl", "data.heldout=heldout.jsonl"],
            "quickstart": ["model.tokenizer=grids", "data.train=grids-train.jsonl", "data.heldout=grids-heldout.jsonl"],
            "sudoku4_causal": [
                *("model.preset=causal.json", "model.tokenizer=tokenizer"),
                *("data.train=single-train.jsonl", "data.heldout=single-heldout.jsonl"),
            ],
        }[recipe]
        overrides = [change.replace("=", f"={data}/") for change in of_recipe]
        overrides += [f"seed={seed}", *changes]
        blockdiff.train(RECIPES / f"{recipe}.yaml", overrides, run, resume=(run / "checkpoints").is_dir())
    return run / "model"


@dataclass
class Answers:
    """Answers about cells, a list entry each: scores by draw [N, 4], posterior, true digit, row.

    scores: log-probabilities of the four digits; digits count from 0.
    """

    scores: list[Tensor]
    posteriors: list[Tensor]
    digits: list[int]
    rows: list[int]

    @classmethod
    def empty(cls) -> Answers:
        """Return a list of no answers."""
        return cls([], [], [], [])

    def add(self, puzzle: Puzzle, cell: int, scores_NX: Tensor, row: int) -> None:
        """Add the answer about a cell of a puzzle."""
        self.scores.append(scores_NX)
        self.posteriors.append(torch.tensor(puzzle.posterior()[cell], dtype=torch.float64))
        self.digits.append(int(puzzle.grid[cell]) - 1)
        self.rows.append(row)

    def lines(self, others: Answers | None, **about: Any) -> Iterator[Line]:
        """Yield the line of the table, and with `others` a second line with the temperature fitted on them."""
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


def decided(sampler: Sampler, asked: Sequence[Puzzle], asking: Asking) -> tuple[Answers, float]:
    """Return the answers of decisions about the puzzles, and milliseconds per prompt."""
    answers, began, rows, cells = Answers.empty(), time.perf_counter(), [], list[tuple[int, ...]]()
    for number, puzzle in enumerate(asked):
        cells.append(ASKED if asking.joint else (puzzle.asked,))
        state = ({"role": "user", "content": puzzle.state},)
        rows.append(DecisionRow(f"puzzle {number}", state, tuple(questions()[cell] for cell in cells[-1])))
    for row, decisions in enumerate(decide_rows(sampler, rows, asking, batch_size=BATCH, is_calibrated=False)):
        for cell, decision in zip(cells[row], decisions, strict=True):
            if asked[row].cells[cell] == ".":
                answers.add(asked[row], cell, decision.scores_NX, row)
    return answers, 1e3 * (time.perf_counter() - began) / len(asked)


def sampled(sampler: Sampler, asked: Sequence[Puzzle]) -> tuple[Answers, float]:
    """Return the shares of digits in full samples, and milliseconds per prompt.

    Half a count is added for each digit, so that no share is 0.
    """
    answers, began = Answers.empty(), time.perf_counter()
    requests = [
        Request(f"{row}/{number}", prompt=f"{puzzle.cells}=")
        for row, puzzle in enumerate(asked)
        for number in range(SAMPLES)
    ]
    texts = [result.text for result in sampler.generate(requests, batch_size=BATCH)]
    for row, puzzle in enumerate(asked):
        samples = texts[row * SAMPLES : (row + 1) * SAMPLES]
        for cell in (each for each in ASKED if puzzle.cells[each] == "."):
            counts = [sum(text[cell : cell + 1] == digit for text in samples) + 0.5 for digit in DIGITS]
            answers.add(puzzle, cell, (torch.tensor([counts], dtype=torch.float64) / sum(counts)).log(), row)
    return answers, 1e3 * (time.perf_counter() - began) / len(asked)


def next_tokens(sampler: Sampler, asked: Sequence[Puzzle]) -> tuple[Answers, float]:
    """Return the next-token head's scores of the labels of one cell's question, and milliseconds per prompt."""
    answers, began, tokenizer = Answers.empty(), time.perf_counter(), sampler.tokenizer
    assert tokenizer is not None
    contexts = [tokenizer.apply_chat_template(list(_asking(puzzle)), return_dict=False) for puzzle in asked]
    labels = [[token] for token in tokenizer.convert_tokens_to_ids(list(LABELS))]
    scored = score(sampler.model, [context for context in contexts for _ in labels], labels * len(asked), BATCH)
    for row, puzzle in enumerate(asked):
        of_labels = scored[row * len(labels) : (row + 1) * len(labels)]
        scores_NX = torch.tensor([[sum(each.logprobs) for each in of_labels]], dtype=torch.float64)
        answers.add(puzzle, puzzle.asked, scores_NX, row)
    return answers, 1e3 * (time.perf_counter() - began) / len(asked)


def _asking(puzzle: Puzzle) -> tuple[dict[str, Any], ...]:
    """Return the messages that ask for the puzzle's blank cell by a label."""
    state = [{"role": "user", "content": puzzle.state}]
    return tuple(with_question(state, ask_one(questions()[puzzle.asked], "decisions")))


def lines_of(directory: Path, recipe: str, seed: int, count: int, changes: Sequence[str]) -> Iterator[Line]:
    """Yield the lines of a model."""
    path = trained(directory, recipe, seed, changes)
    sampler = Sampler(blockdiff.load(path, dtype="float32", device="cpu"), load_tokenizer(path))
    asked, others = puzzles(count, 3), puzzles(max(1, count // 5), 4)
    about: dict[str, Any] = dict(model=MODELS[recipe], seed=seed)
    if recipe == "sudoku4_causal":
        answers, milliseconds = next_tokens(sampler, asked)
        about |= dict(way="next-token head", steps=0, draws=1, milliseconds=milliseconds)
        yield from answers.lines(next_tokens(sampler, others)[0], **about)
    elif recipe == "quickstart":
        answers, milliseconds = sampled(sampler, asked[:SAMPLED])
        about |= dict(way=f"{SAMPLES} full samples", steps=0, draws=SAMPLES, milliseconds=milliseconds)
        yield from answers.lines(None, **about)
    else:
        for joint in (False, True):
            for steps, draws in WAYS:
                asking = Asking(joint=joint, steps=steps, draws=draws)
                answers, milliseconds = decided(sampler, asked, asking)
                way = dict(way="joint" if joint else "single", steps=steps, draws=draws, milliseconds=milliseconds)
                yield from answers.lines(decided(sampler, others, asking)[0], **about, **way)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table line by line, and write it where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.honesty", description=__doc__)
    parser.add_argument("directory", type=Path, help="where data and runs are, or are made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=list(MODELS), choices=list(MODELS), help="default: all")
    parser.add_argument("--prompts", type=int, default=5000, help="the prompts that are read (default 5000)")
    parser.add_argument("--rows", type=int, default=20_000, help="the rows to learn from (default 20000)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of the recipes")
    parser.add_argument("--output", type=Path, help="FILE.json; the table goes beside it as .md")
    given = parser.parse_args(arguments)
    record = machine.describe(torch.device("cpu"))
    head = "| model | seed | way | steps | draws | answers | TV | excess | ECE | floor | temperature | ms a prompt |"
    text, lines = [machine.place(record), "", head, "|---" * 12 + "|"], list[Line]()
    print("\n".join(text))
    try:
        if not (data := given.directory / "data").is_dir():
            data.mkdir(parents=True)
            write_data(data, given.rows)
        for recipe in given.recipes:
            for seed in given.seeds:
                for line in lines_of(given.directory, recipe, seed, given.prompts, given.set):
                    lines.append(line)
                    text.append(_table_row(line))
                    print(text[-1], flush=True)
    except (OSError, ValueError, BlockdiffError) as error:
        print(f"benchmarks.honesty: {error}", file=sys.stderr)
        return 1
    if given.output is not None:
        contents = {"machine": record, "lines": [asdict(line) for line in lines]}
        machine.write(given.output, contents, "\n".join(text) + "\n")
    return 0


def _table_row(line: Line) -> str:
    temperature = "-" if line.temperature is None else f"{line.temperature:.2f}"
    errors = f"{line.variation:.4f} | {line.excess:.4f} | {line.calibration_error:.4f} | {line.floor:.4f}"
    way = f"{line.model} | {line.seed} | {line.way} | {line.steps or '-'} | {line.draws} | {line.count}"
    return f"| {way} | {errors} | {temperature} | {line.milliseconds:.1f} |"


if __name__ == "__main__":
    sys.exit(main())
