"""Sudoku puzzles, their splits, and the character tokenizer that goes with them."""

from __future__ import annotations

import json
from itertools import islice

import pytest
from transformers import AutoTokenizer

from blockdiff.data.sources import Source, read_rows
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import DataError
from blockdiff.recipes.sudoku import (
    alphabet,
    classes4,
    dig,
    groups,
    is_solved,
    make_splits,
    relabelled,
    solutions,
    to_row,
    write_splits,
)

pytestmark = pytest.mark.quick

SOLVED4 = (1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1)


def parse(row):
    puzzle = tuple(0 if cell == "." else int(cell) for cell in row["prompt"][:-1])
    return puzzle, tuple(map(int, row["response"]))


@pytest.fixture(scope="module")
def splits4():
    return make_splits(4, {"train": 600, "test": 120}, seed=5)


@pytest.fixture(scope="module")
def splits9():
    return make_splits(9, {"train": 30, "test": 10}, seed=5)


def test_there_are_288_grids_in_12_classes_of_24():
    assert [len(members) for members in classes4()] == [24] * 12
    assert len({grid for members in classes4() for grid in members}) == 288


def test_groups_are_rows_columns_and_boxes():
    assert groups(4)[0] == (0, 1, 2, 3)
    assert groups(4)[4] == (0, 4, 8, 12)
    assert groups(4)[8:] == ((0, 1, 4, 5), (2, 3, 6, 7), (8, 9, 12, 13), (10, 11, 14, 15))
    assert groups(9)[22] == (30, 31, 32, 39, 40, 41, 48, 49, 50)


@pytest.mark.parametrize("size", [4, 9])
def test_every_puzzle_has_exactly_its_solution(size, splits4, splits9):
    for rows in (splits4 if size == 4 else splits9).values():
        for row in rows[:60]:
            puzzle, solution = parse(row)
            assert list(islice(solutions(puzzle), 2)) == [solution]
            assert is_solved(row["prompt"], row["response"])


def test_test_grids_differ_from_training_grids_even_after_relabelling(splits4, splits9):
    for splits in (splits4, splits9):
        classes = [{relabelled(parse(row)[1]) for row in rows} for rows in splits.values()]
        assert not classes[0] & classes[1]
    three = make_splits(4, {"train": 90, "valid": 10, "test": 10})
    classes = [{relabelled(parse(row)[1]) for row in rows} for rows in three.values()]
    assert [len(each) for each in classes] == [8, 2, 2]
    assert len(set.union(*classes)) == 12


def test_puzzles_are_distinct_and_show_varying_numbers_of_givens(splits4, splits9):
    for splits in (splits4, splits9):
        prompts = [row["prompt"] for rows in splits.values() for row in rows]
        assert len(set(prompts)) == len(prompts)
        assert len({sum(cell.isdigit() for cell in prompt) for prompt in prompts}) >= 6


def test_the_seed_decides_the_puzzles(splits4):
    assert make_splits(4, {"train": 600, "test": 120}, seed=5) == splits4
    assert make_splits(4, {"train": 600, "test": 120}, seed=6) != splits4


def test_digging_stops_at_the_asked_number_or_where_a_second_solution_would_appear():
    puzzle = dig(SOLVED4, list(range(16)), 9)
    assert sum(map(bool, puzzle)) == 9
    minimal = dig(SOLVED4, list(range(16)), 0)
    for cell in range(16):
        if minimal[cell]:
            fewer = tuple(0 if place == cell else digit for place, digit in enumerate(minimal))
            assert len(list(islice(solutions(fewer), 2))) == 2


def test_the_checker_accepts_only_the_exact_solution():
    puzzle = tuple(digit if place % 2 else 0 for place, digit in enumerate(SOLVED4))
    row = to_row(puzzle, SOLVED4)
    prompt, solution = row["prompt"], row["response"]
    assert prompt == ".2.4.4.2.1.3.3.1="
    assert is_solved(prompt, solution) and is_solved(prompt, solution + "\n")
    assert not is_solved(prompt, solution[:-1])
    assert not is_solved(prompt, solution + "1")
    assert not is_solved(prompt, "." + solution[1:])
    assert not is_solved(prompt, "1111" * 4)
    swapped = solution.translate(str.maketrans("12", "21"))
    assert not is_solved(prompt, swapped), "a valid grid that changes the givens"
    assert is_solved("." * 16 + "=", swapped)
    with pytest.raises(DataError, match="sudoku prompt"):
        is_solved("12=", "12")


@pytest.mark.parametrize(
    "size, counts, reason",
    [
        (6, {"train": 3}, "size 6"),
        (4, {"train": 0}, "'train'.* 0"),
        (4, {}, "no split"),
        (4, dict.fromkeys("abcdefg", 5), "6 splits"),
    ],
)
def test_impossible_requests_are_refused_with_the_reason(size, counts, reason):
    with pytest.raises(DataError, match=reason):
        make_splits(size, counts)


def test_files_are_written_read_back_and_summed_up(tmp_path):
    train, test = write_splits(tmp_path, 4, {"train": 50, "test": 20}, seed=3)
    rows = list(read_rows(Source(str(tmp_path / "train.jsonl"))))
    assert len(rows) == 50
    assert json.loads((tmp_path / "test.jsonl").read_text().splitlines()[0]).keys() == {"prompt", "response"}
    assert train.startswith("train: 50 puzzles from ") and " givens, mean " in train
    assert " solved grids in 3 classes (modulo relabelling)" in test
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    prompt = tokenizer(rows[0].prompt)["input_ids"]
    assert len(prompt) == 18 and prompt[0] == tokenizer.bos_token_id == 2
    assert len(tokenizer(rows[0].response, add_special_tokens=False)["input_ids"]) == 16


def test_the_character_tokenizer_survives_saving_and_decodes_without_spaces(tmp_path):
    character_tokenizer(alphabet(9)).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert len(tokenizer) == 14
    tokens = tokenizer("1.3=42", add_special_tokens=False)["input_ids"]
    assert tokens == [5, 3, 7, 4, 8, 6]
    assert tokenizer.decode(tokens) == "1.3=42"
    assert tokenizer.decode([2, *tokens, 1, 0, 0], skip_special_tokens=True) == "1.3=42"
    with pytest.raises(Exception, match=r"(?i)unk"):
        tokenizer("x")
    with pytest.raises(ValueError, match="repeats"):
        character_tokenizer("aa")


def test_the_character_tokenizer_knows_line_breaks():
    tokenizer = character_tokenizer("ab\n ")
    tokens = tokenizer("a\n b", add_special_tokens=False)["input_ids"]
    assert tokens == [3, 5, 6, 4]
    assert tokenizer.decode(tokens) == "a\n b"
