"""Decisions about four cells of 4x4 sudokus, with a posterior that is known exactly.

Grids are uniform over all 288 solved ones, and each cell is given with probability 0.3, so that most puzzles have many
solutions. The posterior of a cell is the share of solutions with each digit in it. So a model's probabilities for a
cell can be compared with the truth, not only with one label (benchmarks/honesty.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from blockdiff.decisions import Question, read_questions
from blockdiff.decisions.form import JOINTLY, ask_one
from blockdiff.errors import DataError
from blockdiff.files import write_text
from blockdiff.recipes import sudoku
from blockdiff.terminal import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GIVEN = 0.3  # the probability with which a cell is given
CELLS = "abcdefghijklmnop"  # the names of the cells
ASKED = (0, 5, 10, 15)  # the cells of questions: one of each row and column
DIGITS = "1234"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>{% endgeneration %}"
    "{% else %}<bos>{{ m.content }}={% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Puzzle:
    """A grid, its cells with a dot for each one that is not given, and the blank cell of a single question."""

    cells: str
    grid: str
    asked: int

    @property
    def state(self) -> str:
        """The text of the cells: the name of each, and its digit or a dot."""
        return "".join(map("".join, zip(CELLS, self.cells, strict=True)))

    def posterior(self) -> list[tuple[float, ...]]:
        """Return the probability of each digit in each of the 16 cells."""
        matching = [grid for grid in every_grid() if all(a in (".", b) for a, b in zip(self.cells, grid, strict=True))]
        return [
            tuple(column.count(digit) / len(matching) for digit in DIGITS) for column in zip(*matching, strict=True)
        ]

    def row(self, cells: Sequence[int], joint: bool) -> dict[str, Any]:
        """Return a row of decisions about these cells."""
        asked, answers = [question(cell) for cell in cells], [self.grid[cell] for cell in cells]
        return {"input": self.state, "questions": asked, "answers": answers, "joint": joint}


@cache
def every_grid() -> list[str]:
    """Return the digits of all 288 solved grids."""
    return ["".join(map(str, grid)) for grid in sudoku.solutions((0,) * 16)]


def draw_puzzle(draw: Random) -> Puzzle:
    """Draw a puzzle with at least one blank among the cells of questions."""
    while True:
        grid = draw.choice(every_grid())
        cells = "".join(cell if draw.random() < GIVEN else "." for cell in grid)
        if blanks := [index for index in ASKED if cells[index] == "."]:
            return Puzzle(cells, grid, draw.choice(blanks))


def question(cell: int) -> dict[str, Any]:
    """Return the question for the digit of a cell, as a row writes it."""
    return {"type": "choice", "instructions": CELLS[cell], "choices": [{"value": digit} for digit in DIGITS]}


@cache
def questions() -> tuple[Question, ...]:
    """Return the question about each cell."""
    return read_questions([question(cell) for cell in range(len(CELLS))])


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each cell of a state, and for each fixed text of questions and answers."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from blockdiff.data.tokenizer import SPECIAL_TOKENS

    options = ask_one(questions()[0], "decisions").text.removeprefix(f"Question: {CELLS[0]}")
    headings = ["Question: ", *(f"Question {number}: " for number in (1, 2, 3, 4))]
    lines = ["1:", *(f"\n{number}:" for number in (2, 3, 4))]
    states = [name + cell for name in CELLS for cell in f".{DIGITS}"]
    pieces = [options, JOINTLY, *headings, *lines, *states, "\n\n", "\n", " ", "=", *"ABCD", *CELLS]
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


def write_splits(directory: str | Path, counts: Mapping[str, int], seed: int = 0) -> list[str]:
    """Write NAME.jsonl for every split, and the tokenizer into `directory`/tokenizer.

    Half of the rows ask about one cell, half about all of `ASKED` jointly; no question about a state is in two splits.
    Returns a line per split. Raises DataError for a split without rows.
    """
    from blockdiff.data.tokenizer import write_tokenizer

    lines, taken, directory = [], set[tuple[str, int]](), Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, count in counts.items():
        if count < 1:
            raise DataError(f"split {name!r} asks for {count} rows; ask for at least 1")
        draw, rows, keys = Random(f"{seed} {name}"), list[dict[str, Any]](), set[tuple[str, int]]()
        while len(rows) < count:
            puzzle, joint = draw_puzzle(draw), len(rows) % 2 == 0
            key = puzzle.cells, -1 if joint else puzzle.asked
            if key not in taken:
                keys.add(key)
                rows.append(puzzle.row(ASKED if joint else [puzzle.asked], joint))
        taken |= keys
        write_text(directory / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        asked = sum(len(row["questions"]) for row in rows)
        lines.append(f"{name}: {counted(asked, 'decision')} about {counted(count, 'puzzle')}")
    write_tokenizer(tokenizer(), directory / "tokenizer")
    return lines
