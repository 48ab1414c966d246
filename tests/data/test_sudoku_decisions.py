"""Decisions about sudoku cells: the posterior is that of enumeration, and a row becomes slots with the right labels."""

from __future__ import annotations

import json
from itertools import product

import pytest

from blockdiff.checkpoint import preset_config
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.data.chat import Encoder
from blockdiff.data.sources import Source, read_rows
from blockdiff.errors import DataError
from blockdiff.recipes.sudoku import is_valid
from blockdiff.recipes.sudoku_decisions import Puzzle, every_grid, write_splits

pytestmark = pytest.mark.quick


def test_the_posterior_is_the_share_of_the_solutions_with_each_digit():
    puzzle = Puzzle("1234..2121434...", "1234342121434312", 4)
    solutions = []
    blanks = [index for index, cell in enumerate(puzzle.cells) if cell == "."]
    for digits in product("1234", repeat=len(blanks)):
        cells = list(puzzle.cells)
        for index, digit in zip(blanks, digits, strict=True):
            cells[index] = digit
        if is_valid("." * 16 + "=", "".join(cells)):
            solutions.append(cells)
    assert solutions
    for index, shares in enumerate(puzzle.posterior()):
        assert shares == tuple(sum(cells[index] == digit for cells in solutions) / len(solutions) for digit in "1234")
    assert len(every_grid()) == 288


def test_rows_are_learnt_with_the_preset_and_no_split_repeats_another(tmp_path):
    lines = write_splits(tmp_path, {"train": 40, "test": 20}, seed=1)
    assert lines[0].startswith("train: ") and lines[0].endswith("decisions about 40 puzzles")
    read = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in ("train", "test")}
    asked = {name: {json.dumps([row["input"], row["questions"]]) for row in rows} for name, rows in read.items()}
    assert not asked["train"] & asked["test"]
    config, tokenizer = preset_config("sudoku-decisions"), load_tokenizer(tmp_path / "tokenizer")
    assert config.vocab_size == len(tokenizer)
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=config.canvas_length)
    examples = encoder.encode(list(read_rows(Source(str(tmp_path / "train.jsonl")))))[0]
    for row, example in zip(read["train"], examples, strict=True):
        labels = [tokenizer.decode([example.tokens[slot.column]]) for slot in example.slots]
        assert [" ABCD".index(label) for label in labels] == [int(answer) for answer in row["answers"]]
    with pytest.raises(DataError, match="asks for 0 rows"):
        write_splits(tmp_path, {"train": 0})
