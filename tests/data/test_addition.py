"""Additions with their working: every column is right, and no two rows are the same."""

from __future__ import annotations

import re

import pytest

from blockdiff.errors import DataError
from blockdiff.recipes.addition import ALPHABET, COLUMNS, make_splits, write_splits

pytestmark = pytest.mark.quick


def test_the_working_of_every_row_is_that_of_its_sum() -> None:
    splits = make_splits({"train": 300, "test": 40}, seed=3)
    rows = [row for split in splits.values() for row in split]
    assert [len(split) for split in splits.values()] == [300, 40] and len({row["prompt"] for row in rows}) == 340
    assert splits == make_splits({"train": 300, "test": 40}, seed=3)
    for row in rows:
        numbers = [
            int("".join(reversed(digits))) for digits in zip(*re.findall("[a-l](.)(.)", row["prompt"]), strict=True)
        ]
        working = re.findall(r"([a-l])(.)\+(.)\+(.)=(.)(.);", row["response"])
        names, first, second, carried, carries, digits = ("".join(column) for column in zip(*working, strict=True))
        assert int(carries[-1] + digits[::-1]) == sum(numbers) and carried == "0" + carries[:-1]
        assert [int(first[::-1]), int(second[::-1])] == numbers and names == COLUMNS[: len(names)]
        assert len(row["response"]) == 10 * len(names) and set(row["prompt"] + row["response"]) <= set(ALPHABET)
    assert {len(row["response"]) for row in rows} == {10 * count for count in range(6, 13)}


def test_splits_are_written_with_their_tokenizer(tmp_path) -> None:
    assert write_splits(tmp_path, {"test": 3}) == ["test: 3 additions of 6 to 12 columns"]
    assert len((tmp_path / "test.jsonl").read_text().splitlines()) == 3 and (tmp_path / "tokenizer").is_dir()
    with pytest.raises(DataError, match="split"):
        make_splits({})
