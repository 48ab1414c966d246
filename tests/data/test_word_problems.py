"""Word problems: every step of the working is right, goes on from the one before, and ends in the answer."""

from __future__ import annotations

import json
import re

import pytest

from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.errors import DataError
from blockdiff.recipes.word_problems import rows, write_splits

pytestmark = pytest.mark.quick


def test_the_working_is_right_from_the_first_number_to_the_answer():
    for row in rows(200, 0):
        at = int(re.findall(r"\d+", row["prompt"])[0])
        for a, sign, b, total in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", row["response"]):
            assert int(a) == at
            at = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
            assert at == int(total) > 0
        assert row["response"].endswith(f"#### {at}")
        assert "  " not in row["prompt"] + row["response"] and row["prompt"].endswith("?\n")


def test_splits_differ_the_seed_decides_and_the_tokenizer_has_a_mask(tmp_path):
    told = write_splits(tmp_path, {"train": 300, "test": 1}, seed=1)
    assert told == ["train: 300 word problems", "test: 1 word problem"]
    read = {name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()] for name in ("train", "test")}
    assert read["train"] == rows(300, "1 train") and not any(row in read["train"] for row in read["test"])
    assert load_tokenizer(tmp_path / "tokenizer").mask_token_id is not None
    with pytest.raises(DataError, match="split"):
        write_splits(tmp_path, {})
