"""Small talk: what is asked is answered by the facts, names are remembered, and rows are the seed's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from blockdiff.errors import DataError
from blockdiff.recipes.small_talk import CAPITALS, NAMES, SYSTEM, make_conversations, write_conversations

pytestmark = pytest.mark.quick


def test_the_same_seed_gives_the_same_rows_and_no_row_is_in_two_splits() -> None:
    splits = make_conversations({"train": 300, "test": 50})
    assert splits == make_conversations({"train": 300, "test": 50})
    assert splits != make_conversations({"train": 300, "test": 50}, seed=1)
    texts = [str(row) for rows in splits.values() for row in rows]
    assert len(set(texts)) == len(texts) == 350


def test_answers_are_right_names_are_remembered_and_capital_letters_are_for_those_who_ask() -> None:
    sums = capitals = recalled = 0
    for row in make_conversations({"train": 2000})["train"]:
        messages = row["messages"]
        is_loud = messages[0] == {"role": "system", "content": SYSTEM}
        name = None
        for question, answer in zip(messages[is_loud::2], messages[is_loud + 1 :: 2], strict=True):
            assert (question["role"], answer["role"]) == ("user", "assistant")
            asked, said = question["content"], answer["content"]
            assert said == said.upper() or not is_loud
            if found := re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)\.", said):
                a, sign, b, result = found.groups()
                assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
                sums += 1
            if found := re.fullmatch(r"The capital of (\w+) is ([\w ]+)\.", said):
                assert CAPITALS[found[1]] == found[2]
                capitals += 1
            if found := re.fullmatch(r"(?:my name is|i am) (\w+)\.?", asked, re.I):
                name = next(each for each in NAMES if each.lower() == found[1].lower())
            if found := re.fullmatch(r"your name is (\w+)\.", said, re.I):
                assert name is not None and found[1].lower() == name.lower()
                recalled += 1
    assert min(sums, capitals, recalled) > 20


def test_splits_and_a_tokenizer_of_the_stated_size_are_written(tmp_path: Path) -> None:
    lines = write_conversations(tmp_path, {"train": 2000, "test": 10})
    assert lines[1].startswith("test: 10 conversations with ")
    assert len((tmp_path / "test.jsonl").read_text().splitlines()) == 10
    assert len(AutoTokenizer.from_pretrained(tmp_path / "tokenizer")) <= 1024
    with pytest.raises(DataError, match=r"'test'.* 0 "):
        make_conversations({"test": 0})
