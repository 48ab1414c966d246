"""Pictures of sudokus: they show the digits of their puzzles, and rows and pictures of a seed are always the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from blockdiff.data.rows import Row
from blockdiff.errors import DataError
from blockdiff.evals import task
from blockdiff.evals.run import evaluate
from blockdiff.recipes import sudoku
from blockdiff.recipes.pixel_sudoku import draw, write_splits
from tests.support.scripted_sampler import ScriptedSampler

pytestmark = pytest.mark.quick


def pixels(puzzle: str, seed: int = 0, number: int = 0) -> np.ndarray:
    return np.asarray(draw(puzzle, seed, 0, number)).astype(int)


def test_a_cell_of_the_picture_changes_where_and_only_where_its_digit_does():
    blank = "." * 16
    for cell in (0, 5, 15):
        shown = {digit: pixels(blank[:cell] + digit + blank[cell + 1 :]) for digit in "1234"}
        changed = [np.argwhere(picture != pixels(blank)) for picture in shown.values()]
        for places in changed:
            assert len(places) and (places.max(0) - places.min(0) < 15).all()  # within a cell of at most 15 pixels
        assert len({picture.tobytes() for picture in shown.values()}) == 4


def test_pictures_of_a_puzzle_differ_and_those_of_a_seed_and_place_do_not():
    assert (pixels("1" + "." * 15) == pixels("1" + "." * 15)).all()
    assert (pixels("1" + "." * 15) != pixels("1" + "." * 15, number=1)).mean() > 0.5
    assert (pixels("1" + "." * 15) != pixels("1" + "." * 15, seed=1)).mean() > 0.5


def test_written_rows_name_their_pictures_and_solve_their_puzzles(tmp_path):
    from transformers import AutoTokenizer

    said = write_splits(tmp_path, {"train": 12, "test": 5}, seed=1)
    assert said[1].startswith("test: 5 images of puzzles from ")
    rows = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in ("train", "test")}
    puzzles = {name: [row["response"].split("=") for row in rows[name]] for name in rows}
    for split, name in enumerate(rows):
        for number, (row, (puzzle, solution)) in enumerate(zip(rows[name], puzzles[name], strict=True)):
            assert sudoku.is_solved(puzzle + "=", solution)
            with Image.open(tmp_path / row["image"]) as picture:
                assert (np.asarray(picture) == np.asarray(draw(puzzle, 1, split, number))).all()
    kinds = [{sudoku.relabelled(tuple(map(int, solution))) for _, solution in puzzles[name]} for name in rows]
    assert not kinds[0] & kinds[1]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    test = [Row(f"f:{n}", prompt="", response=row["response"]) for n, row in enumerate(rows["test"])]
    (first, solved), (other, also) = puzzles["test"][:2]
    texts = [f"{first}={solved}", f"{'.' * 16}={also}", f"{first}={first}", solved, f"{other}=1"]
    report = evaluate(ScriptedSampler(tokenizer, [(text, [1]) for text in texts]), test, task("pixel_sudoku"))
    assert (report["solved"], report["facts"]) == (2, {"is_read": 1})
    with pytest.raises(DataError, match=r"f:3: .*sudoku"):
        evaluate(ScriptedSampler(tokenizer, []), [Row("f:3", prompt="", response=solved)], task("pixel_sudoku"))
