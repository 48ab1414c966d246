"""A tokenizer learnt from rows writes any text, and fits rows of both forms."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from transformers import AutoTokenizer
from typer.testing import CliRunner

from blockdiff.cli.main import app
from blockdiff.data.chat import Encoder
from blockdiff.data.rows import Row
from blockdiff.data.template import packaged_template, training_template
from blockdiff.data.tokenise import raw_prompt
from blockdiff.data.tokenizer import MASK, TURN_TOKENS, byte_level_bpe, character_tokenizer, write_tokenizer
from blockdiff.errors import DataError, RequestError
from blockdiff.sampling import Request

pytestmark = pytest.mark.quick

TEXTS = ["Ann sold 48 clips in April.", "Half of 48 clips is <<48/2=24>>24 clips.\n#### 24"] * 5
ODD = ["  two  spaces\tand a tab\n", "ü🙂 日本", "<|turn>model\nx<turn|>", "0123456789", "", "\x00\x7f"]


def test_ids_of_special_tokens_are_those_of_gemma_and_every_byte_is_there():
    tokenizer = byte_level_bpe(TEXTS, 280)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)
    assert tokenizer.mask_token == MASK and tokenizer.mask_token_id == 3
    assert len(tokenizer) == 280 == max(tokenizer.get_vocab().values()) + 1
    for token in (MASK, *TURN_TOKENS):
        assert len(tokenizer(token, add_special_tokens=False)["input_ids"]) == 1


def test_any_text_comes_back_as_it_was_also_after_saving(tmp_path):
    tokenizer = byte_level_bpe(TEXTS, 320)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*ODD, *TEXTS[:2]):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert again(text, add_special_tokens=False)["input_ids"] == ids
        assert again(text)["input_ids"] == [2, *ids]
    assert again.mask_token_id == 3 and again.get_vocab() == tokenizer.get_vocab()


def test_a_tokenizer_whose_regular_expression_gives_up_is_refused_by_its_file():
    tokenizer = byte_level_bpe(TEXTS, 280)
    tokenizer.name_or_path = "models/strange"
    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("(a+)+$"), "isolated")
    text = "a" * 3000 + "!"
    with pytest.raises(DataError, match=r"prompt .*models/strange/tokenizer.json: its .*pre_tokenizer fails"):
        raw_prompt(text, tokenizer)
    with pytest.raises(DataError, match=r"f.jsonl:1: models/strange/tokenizer.json: its"):
        Encoder(tokenizer, eos_id=1, canvas_length=8).encode([Row("f.jsonl:1", prompt=text, response="b")])


def test_digits_stay_single_and_frequent_words_become_one_token():
    tokenizer = byte_level_bpe(TEXTS, 320)
    assert tokenizer.tokenize("24")[-2:] == ["2", "4"]
    assert len(tokenizer.tokenize(" clips")) == 1


def test_the_same_texts_give_the_same_tokenizer():
    assert byte_level_bpe(TEXTS, 300).get_vocab() == byte_level_bpe(iter(TEXTS), 300).get_vocab()


def test_conversations_can_be_encoded():
    tokenizer = byte_level_bpe(TEXTS, 300)
    assert training_template(tokenizer) == packaged_template()
    messages = ({"role": "user", "content": "Ann?"}, {"role": "assistant", "content": "\u00fc 48", "reasoning": "so"})
    (example,), _ = Encoder(tokenizer, eos_id=1, canvas_length=8).encode([Row("f:1", messages=messages)])
    ((start, end),) = example.responses
    assert tokenizer.decode(example.tokens[start:end]) == "<|channel>thought\nso\n<channel|>ü 48<turn|>\n"


@pytest.mark.parametrize("texts, size, reason", [(TEXTS, 271, "272"), (["", ""], 300, "characters")])
def test_what_gives_no_tokenizer_is_refused(texts, size, reason):
    with pytest.raises(DataError, match=reason):
        byte_level_bpe(texts, size)
    assert len(byte_level_bpe(TEXTS, 272)) == 272


def run(*words: str | Path):
    return CliRunner().invoke(app, ["data", "tokenizer", *map(str, words)])


def test_a_character_without_a_token_is_said_in_plain_words():
    tokenizer = character_tokenizer("12=")
    with pytest.raises(RequestError, match=r"^the prompt .*'x'"):
        Request(1, prompt="1x=").as_tokens(tokenizer, 9)
    with pytest.raises(DataError, match=r"^a:1: .*'x'"):
        Encoder(tokenizer, eos_id=1, canvas_length=4).encode([Row("a:1", prompt="1=", response="x")])


def test_the_command_learns_from_the_texts_of_all_sources(tmp_path):
    talk = [{"role": "user", "content": "unlikely"}, {"role": "assistant", "content": "unlikely", "reasoning": "zzz"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "unlikely", "answer": "4"}) + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    words = ["--vocab-size", "282", "--output", tmp_path / "out"]
    result = run(tmp_path / "a.jsonl", "--columns", "prompt=question,response=answer", *words)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == "279 tokens from 1 row, 9 characters"  # all merges of "unlikely"
    more = "these texts give no more than that, fewer than the 282 of --vocab-size"
    assert result.stdout.splitlines()[1] == more
    result = run(tmp_path / "b.jsonl", *words, "--overwrite")
    assert result.stdout.splitlines()[:2] == ["281 tokens from 1 row, 19 characters", more]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert "more than that" not in run(tmp_path / "b.jsonl", "--vocab-size", "281", "--output", tmp_path / "b").stdout
    assert len(tokenizer) == 281 and tokenizer.tokenize("unlikely") == ["unlikely"]


def test_the_command_refuses_in_one_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    (tmp_path / "file").write_text("")
    for words, reason in [
        ([tmp_path / "a.jsonl", "--vocab-size", "100", "--output", tmp_path / "out"], "no room for every byte"),
        ([tmp_path / "a.jsonl", "--vocab-size", "1000000000000", "--output", tmp_path / "out"], "is too large"),
        ([tmp_path / "no.jsonl", "--output", tmp_path / "out"], "no such file"),
        ([tmp_path / "a.jsonl", "--output", tmp_path / "file"], "cannot be written"),
        ([tmp_path / "a.jsonl", "--columns", "promt=a", "--output", tmp_path / "out"], "promt"),
    ]:
        result = run(*words)
        (line,) = result.stderr.splitlines()
        assert result.exit_code in (1, 2) and reason in line, line
        assert not (tmp_path / "out").exists()


@pytest.mark.quick
def test_a_full_disk_is_said_with_the_file_and_leaves_what_was_there(tmp_path):
    class Full:
        def save_pretrained(self, directory: str) -> None:
            (Path(directory) / "tokenizer.json").write_text("{")
            raise Exception("No space left on device (os error 28)")  # as tokenizers says it

    write_tokenizer(character_tokenizer("12="), tmp_path / "t")
    before = {file.name: file.read_bytes() for file in (tmp_path / "t").iterdir()}
    assert "tokenizer.json" in before
    with pytest.raises(OSError, match="No space") as caught:
        write_tokenizer(Full(), tmp_path / "t")
    assert (caught.value.errno, caught.value.filename) == (28, str(tmp_path / "t" / "tokenizer.json"))
    assert {file.name: file.read_bytes() for file in (tmp_path / "t").iterdir()} == before


@pytest.mark.quick
@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room there and start again"),
        (errno.EACCES, "see to its permissions, or name another place"),
    ],
)
def test_the_command_that_makes_data_says_what_to_do_where_it_cannot_write(tmp_path, monkeypatch, number, remedy):
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number), "there/tokenizer.json")

    monkeypatch.setattr("blockdiff.data.tokenizer.write_tokenizer", refused)
    result = CliRunner().invoke(app, ["data", "sudoku", "--split", "train=4", "--output", str(tmp_path / "d")])
    assert result.exit_code == 1
    said = f"blockdiff: error: there/tokenizer.json: {os.strerror(number)}; {remedy}"
    assert result.stderr.splitlines() == [said]
