"""Honesty: the probabilities of decisions compared with the true posterior, which is known by enumeration.

    python -m benchmarks.honesty runs/honesty --seeds 0 1 2 --output FILE.json

Grids are uniform over all 288 solved 4x4 sudokus, and each cell is given with probability 0.3; no grid is held out. The
posterior of a cell is the share of the grids that agree with the givens. The models of recipes/quickstart.yaml and
recipes/sudoku4_causal.yaml are trained on rows of three kinds, drawn at random: a decision about one blank cell, the
decisions about all blank cells jointly, and the whole grid as text. Models that the directory has already are kept.
Other prompts are then read: one cell (single), all blank cells in one canvas (joint), by the shares of full samples,
and by the next-token head.

TV: the total variation to the posterior; excess: the NLL above the posterior's entropy, in nats; ECE: over 15 bins of
equal mass, beside the error that a perfect model with these probabilities shows. Temperatures are fitted on 1,000
other prompts. Joint decisions have eleven answers a prompt, so a fifth of the prompts is read for them.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import blockdiff
from benchmarks import machine
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.decision_rows import DecisionRow
from blockdiff.data.tokenizer import SPECIAL_TOKENS, write_tokenizer
from blockdiff.decisions import Asking, Question, read_questions
from blockdiff.decisions.form import JOINTLY, ask_one, with_question
from blockdiff.errors import BlockdiffError
from blockdiff.evals import judging
from blockdiff.evals.decisions import decide_rows
from blockdiff.evals.judging import Judged
from blockdiff.recipes import sudoku
from blockdiff.sampling import Request, Sampler
from blockdiff.sampling.calibration import fit_temperature

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
GIVEN = 0.3  # the probability with which a cell is given
CELLS = "abcdefghijklmnop"  # the names of the cells
DIGITS = "1234"
CANVAS = 32  # tokens, which hold the answers about 15 cells: two for each, and the end
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}<bos>{{ m.content }}={% endif %}{% endfor %}"
)
WAYS = [(steps, draws) for steps in (1, 2, 4) for draws in (1, 4)]
FITTED, SAMPLED, SAMPLES, BATCH = 1000, 100, 64, 256
MODELS = {"quickstart": ("denoiser", "sudoku4"), "sudoku4_causal": ("next tokens", "sudoku4-causal")}


@dataclass(frozen=True)
class Puzzle:
    """A grid, its cells with a dot for each that is not given, and the blank cell that a single question asks for."""

    cells: str
    grid: str
    asked: int

    @property
    def blanks(self) -> list[int]:
        """The indices of the cells that are not given."""
        return [index for index, cell in enumerate(self.cells) if cell == "."]

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
    """Draw `count` puzzles that have a given cell and a blank one."""
    draw, drawn = random.Random(seed), list[Puzzle]()
    grids = every_grid().tolist()
    while len(drawn) < count:
        grid = "".join(map(str, draw.choice(grids)))
        cells = "".join(cell if draw.random() < GIVEN else "." for cell in grid)
        blanks = [index for index, cell in enumerate(cells) if cell == "."]
        if 0 < len(blanks) < len(cells):
            drawn.append(Puzzle(cells, grid, draw.choice(blanks)))
    return drawn


def question(cell: int) -> dict[str, Any]:
    """The question for the digit of a cell, as a row writes it."""
    return {"type": "choice", "instructions": CELLS[cell], "choices": [{"value": digit} for digit in DIGITS]}


@cache
def questions() -> tuple[Question, ...]:
    """The question about each cell."""
    return read_questions([question(cell) for cell in range(len(CELLS))])


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in which the fixed texts of questions and of answer lines are single tokens."""
    options = ask_one(questions()[0], "decisions").text.removeprefix(f"Question: {CELLS[0]}")
    headings = ["Question: ", *(f"Question {number}: " for number in range(1, 17))]
    lines = ["1:", *(f"\n{number}:" for number in range(2, 17))]
    pieces = [options, JOINTLY, *headings, *lines, "\n\n", "\n", " ", ".", "=", *DIGITS, *"ABCD", *CELLS]
    vocabulary = {piece: index for index, piece in enumerate((*SPECIAL_TOKENS, *pieces))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    longest_first = sorted(pieces, key=len, reverse=True)
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(map(re.escape, longest_first))), "isolated")
    backend.decoder = decoders.Fuse()
    pad, eos, bos = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=pad, eos_token=eos, bos_token=bos, chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def write_data(directory: Path, train: int, heldout: int) -> None:
    """Write the rows to learn from, those that are held out, the tokenizer and the presets that have its vocabulary."""
    made = tokenizer()
    write_tokenizer(made, directory / "tokenizer")
    for _, preset in MODELS.values():
        config = json.loads((RECIPES / "presets" / f"{preset}.json").read_text(encoding="utf-8"))
        config.get("text_config", config)["vocab_size"] = len(made)
        config |= {"canvas_length": CANVAS} if "canvas_length" in config else {}
        (directory / f"{preset}.json").write_text(json.dumps(config), encoding="utf-8")
    for name, count, seed in (("train", train, 1), ("heldout", heldout, 2)):
        draw, rows = random.Random(seed), list[dict[str, Any]]()
        for puzzle in puzzles(count, seed):
            turns = [{"role": "user", "content": puzzle.cells}, {"role": "assistant", "content": puzzle.grid}]
            whole = {"messages": turns}
            rows.append(draw.choice((whole, _row(puzzle, [puzzle.asked], False), _row(puzzle, puzzle.blanks, True))))
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _row(puzzle: Puzzle, cells: Sequence[int], joint: bool) -> dict[str, Any]:
    asked, answers = [question(cell) for cell in cells], [puzzle.grid[cell] for cell in cells]
    return {"input": puzzle.cells, "questions": asked, "answers": answers, "joint": joint}


def trained(directory: Path, recipe: str, seed: int, changes: Sequence[str]) -> Path:
    """The model of a recipe and a seed, trained if it is not there."""
    run = directory / f"{recipe}-{seed}"
    if not (run / "model").is_dir():
        data = directory / "data"
        overrides = [f"model.preset={data / MODELS[recipe][1]}.json", f"model.tokenizer={data / 'tokenizer'}"]
        overrides += [f"data.{name}={data / name}.jsonl" for name in ("train", "heldout")]
        if recipe == "quickstart":
            overrides.append("objective.normalisation=example")  # a slot counts as much as a whole grid
        overrides += [f"seed={seed}", *changes]
        blockdiff.train(RECIPES / f"{recipe}.yaml", overrides, run, resume=(run / "checkpoints").is_dir())
    return run / "model"


@dataclass
class Answers:
    """The answers about some cells: by draw the log-probabilities [N, 4] of the digits, the posteriors, the digits."""

    scores: list[Tensor]
    posteriors: list[Tensor]
    digits: list[int]
    rows: list[int]

    @classmethod
    def empty(cls) -> Answers:
        """No answers yet."""
        return cls([], [], [], [])

    def add(self, puzzle: Puzzle, cell: int, scores_NX: Tensor, row: int) -> None:
        """Add the answer about a cell of a puzzle."""
        self.scores.append(scores_NX)
        self.posteriors.append(puzzle.posterior()[cell])
        self.digits.append(int(puzzle.grid[cell]) - 1)
        self.rows.append(row)

    def lines(self, others: Answers | None, **about: Any) -> Iterator[Line]:
        """The line of the table, and with `others` the line after their temperature, too."""
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
    """The answers to decisions about the puzzles, and the milliseconds of a prompt."""
    answers, began, rows, cells = Answers.empty(), time.perf_counter(), [], []
    for number, puzzle in enumerate(asked):
        cells.append(puzzle.blanks if asking.joint else [puzzle.asked])
        state = ({"role": "user", "content": puzzle.cells},)
        rows.append(DecisionRow(f"puzzle {number}", state, tuple(questions()[cell] for cell in cells[-1])))
    for row, decisions in enumerate(decide_rows(sampler, rows, asking, batch_size=BATCH, is_calibrated=False)):
        for cell, decision in zip(cells[row], decisions, strict=True):
            answers.add(asked[row], cell, decision.scores_NX, row)
    return answers, 1e3 * (time.perf_counter() - began) / len(asked)


def sampled(sampler: Sampler, asked: Sequence[Puzzle]) -> tuple[Answers, float]:
    """The shares of the digits in full samples, each digit counted half a time more than it was seen."""
    answers, began = Answers.empty(), time.perf_counter()
    requests = [
        Request(f"{row}/{number}", messages=({"role": "user", "content": puzzle.cells},))
        for row, puzzle in enumerate(asked)
        for number in range(SAMPLES)
    ]
    texts = [result.text for result in sampler.generate(requests, batch_size=BATCH)]
    for row, puzzle in enumerate(asked):
        samples = texts[row * SAMPLES : (row + 1) * SAMPLES]
        for cell in puzzle.blanks:
            counts = [sum(text[cell : cell + 1] == digit for text in samples) + 0.5 for digit in DIGITS]
            answers.add(puzzle, cell, (torch.tensor([counts], dtype=torch.float64) / sum(counts)).log(), row)
    return answers, 1e3 * (time.perf_counter() - began) / len(asked)


def next_tokens(sampler: Sampler, asked: Sequence[Puzzle]) -> tuple[Answers, float]:
    """The next-token head's probabilities of the labels of one cell's question."""
    answers, began, requests = Answers.empty(), time.perf_counter(), []
    for row, puzzle in enumerate(asked):
        state = [{"role": "user", "content": puzzle.cells}]
        messages = tuple(with_question(state, ask_one(questions()[puzzle.asked], "decisions")))
        requests.append(Request(row, messages=messages, scores=True, top_logprobs=20, max_new_tokens=1))
    tokens = [sampler.settings.tokenizer.convert_tokens_to_ids(label) for label in "ABCD"]  # type: ignore[union-attr]
    for row, result in enumerate(sampler.generate(requests, batch_size=BATCH)):
        assert result.top_logprobs is not None
        known = dict(result.top_logprobs[0])
        scores = torch.tensor([[known[token] for token in tokens]], dtype=torch.float64)
        answers.add(asked[row], asked[row].asked, scores, row)
    return answers, 1e3 * (time.perf_counter() - began) / len(asked)


def lines_of(directory: Path, recipe: str, seed: int, count: int, changes: Sequence[str]) -> Iterator[Line]:
    """The lines of a model."""
    path = trained(directory, recipe, seed, changes)
    sampler = Sampler(blockdiff.load(path, dtype="float32", device="cpu"), load_tokenizer(path))
    asked, others = puzzles(count, 3), puzzles(FITTED, 4)
    about: dict[str, Any] = dict(model=MODELS[recipe][0], seed=seed)
    if not sampler.settings.denoises:
        answers, milliseconds = next_tokens(sampler, asked)
        about |= dict(way="next-token head", steps=0, draws=1, milliseconds=milliseconds)
        yield from answers.lines(next_tokens(sampler, others)[0], **about)
        return
    for joint in (False, True):
        for steps, draws in WAYS:
            asking = Asking(joint=joint, steps=steps, draws=draws)
            answers, milliseconds = decided(sampler, asked[: count // 5] if joint else asked, asking)
            way = dict(way="joint" if joint else "single", steps=steps, draws=draws, milliseconds=milliseconds)
            yield from answers.lines(decided(sampler, others, asking)[0], **about, **way)
    answers, milliseconds = sampled(sampler, asked[:SAMPLED])
    way = dict(way=f"{SAMPLES} full samples", steps=0, draws=SAMPLES, milliseconds=milliseconds)
    yield from answers.lines(None, **about, **way)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table line by line, and write it where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.honesty", description=__doc__)
    parser.add_argument("directory", type=Path, help="where data and runs are, or are made")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=list(MODELS), choices=list(MODELS), help="default: both")
    parser.add_argument("--prompts", type=int, default=5000, help="the prompts that are read (default 5000)")
    parser.add_argument("--rows", type=int, default=60_000, help="the rows to learn from (default 60000)")
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
            write_data(data, given.rows, 512)
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
