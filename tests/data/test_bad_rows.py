"""Every malformed file is one clear line, before anything is written, and no row is lost on the way to it."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from blockdiff.cli.main import app
from blockdiff.data import chat, formats
from blockdiff.data.chat import Encoder
from blockdiff.data.dataset import load_dataset
from blockdiff.data.rows import Row
from blockdiff.data.sources import Source, read_rows
from blockdiff.data.statistics import Statistics
from blockdiff.data.stream import StreamedExamples
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import DataError
from tests.support.bad_rows import CORPUS, GOOD
from tests.support.chat_tokenizer import chat_tokenizer

pytestmark = pytest.mark.quick

ENCODER = Encoder(chat_tokenizer(), eos_id=1, canvas_length=8)


@pytest.fixture(params=CORPUS)
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, str]:
    """The file, the beginning of its line, and a word of the reason."""
    name, content, place, reason = CORPUS[request.param]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path, f"{path}{place}", reason


def check(message: str, begin: str, reason: str) -> None:
    assert message.startswith(begin) and reason in message
    assert "\n" not in message and "; " in message.removeprefix(begin)
    assert len(message) < 600


def test_the_corpus_is_large_enough_to_mean_something() -> None:
    assert len(CORPUS) >= 40


def test_a_bad_file_is_one_line_and_leaves_no_cache(bad: tuple[Path, str, str], tmp_path: Path) -> None:
    path, begin, reason = bad
    good = tmp_path / "good.jsonl"
    good.write_text(GOOD + "\n")
    with pytest.raises(DataError) as caught:
        load_dataset([Source(str(path))], ENCODER, cache=tmp_path / "cache")
    check(str(caught.value), begin, reason)
    assert list(tmp_path.glob("cache/*")) == []
    with pytest.raises(DataError) as caught:
        StreamedExamples([Source(str(path))], ENCODER, 8, seed=0)[0]
    check(str(caught.value), begin, reason)


def test_a_bad_file_is_one_line_on_stderr(bad: tuple[Path, str, str], tmp_path: Path) -> None:
    path, begin, reason = bad
    words = ["data", "tokenizer", str(path), "--vocab-size", "300", "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    (said,) = result.stderr.splitlines()
    check(said.removeprefix("blockdiff: error: "), begin, reason)
    assert result.exit_code == 1 and result.stdout == "" and "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A file of two good rows and twelve that cannot be used, for reasons of three kinds."""
    path = tmp_path / "mixed.jsonl"
    unanswered = ['{"prompt": "a"}'] * 10
    path.write_text("\n".join([GOOD, "{", *unanswered, '{"prompt": "\\ud800", "response": "a"}', GOOD, ""]))
    return path


@pytest.mark.parametrize("in_memory", [False, True])
def test_all_bad_rows_are_named_together_the_first_ten_and_their_number(mixed: Path, in_memory: bool) -> None:
    rows = [json.loads(line) for line in mixed.read_text().splitlines() if line != "{"]
    with pytest.raises(DataError) as caught:
        load_dataset([Source(rows=rows) if in_memory else Source(str(mixed))], ENCODER, cache=None)
    message = str(caught.value)
    assert message.startswith(f"{11 if in_memory else 12} rows cannot be used: ") and "\n" not in message
    assert message.count("response is missing") == 1  # with the places of all
    assert ("2, 3, 4, 5, 6, 7, 8, 9, 10, 11: " if in_memory else "9, 10, 11: ") in message
    assert message.endswith(f" | {1 if in_memory else 2} more; correct them, or set data.on_bad_row: skip")


def test_rows_that_cannot_be_encoded_are_bad_rows_like_others() -> None:
    letters = Encoder(character_tokenizer("ab"), eos_id=1, canvas_length=4, max_length=5, too_long="refuse")
    rows = [{"prompt": prompt, "response": "b"} for prompt in ("a", "x", "ab", "abababab", "y")]
    with pytest.raises(DataError, match=r"^3 rows .*rows:2: .* \| .*rows:4: 1. tokens.* \| .*rows:5: "):
        load_dataset([Source(rows=rows)], letters, cache=None)
    found = load_dataset([Source(rows=rows)], replace(letters, skips_bad_rows=True), cache=None)
    assert [example.where for example in found.examples] == ["rows:1", "rows:3"] and found.total.bad == 3


def test_bad_rows_are_skipped_where_that_is_asked_for_and_never_taken_from_the_cache(mixed: Path) -> None:
    skipping, cache = replace(ENCODER, skips_bad_rows=True), mixed.parent / "cache"
    for _ in range(2):  # written, and read back
        found = load_dataset([Source(str(mixed)), Source(rows=[json.loads(GOOD)])], skipping, cache=cache)
        assert [example.where for example in found.examples][:2] == [f"{mixed}:1", f"{mixed}:14"]
        assert (len(found), found.total.bad, len(found.total.first_bad)) == (3, 12, 10)
        assert len({example.sample_id for example in found.examples}) == 3
    with pytest.raises(DataError, match="12 rows"):
        load_dataset([Source(str(mixed))], ENCODER, cache=cache)
    with pytest.raises(DataError, match=r"^\S*mixed\.jsonl:2: .*JSON"):
        StreamedExamples([Source(str(mixed))], ENCODER, 8, seed=0)[0]
    stream = StreamedExamples([Source(str(mixed))], skipping, 4, seed=0)
    assert {stream[place].where for place in range(4)} == {f"{mixed}:1", f"{mixed}:14"}
    again = StreamedExamples([Source(str(mixed))], skipping, 4, seed=0)
    assert again[9] == stream[9]  # whose first two windows were passed over
    mixed.write_text("{\n{\n")
    with pytest.raises(DataError, match=r"2 rows .*; no other row"):
        load_dataset([Source(str(mixed))], skipping, cache=None)


def test_a_reason_that_several_rows_share_is_said_once_with_their_places() -> None:
    counts = Statistics(1)
    for line in (3, 5, 9):
        counts.count_bad(DataError(f"a.jsonl:{line}: no prompt; add one"))
    counts.count_bad(DataError("b.parquet:row 2: no prompt; add one"))
    counts.count_bad(DataError("b.parquet:row 4: no prompt; add one"))
    said = "a.jsonl:3, 5, 9: no prompt; add one | b.parquet:row 2, 4: no prompt; add one"
    assert counts.bad_rows == f"5 rows cannot be used: {said}"


def packed(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content))
    return path


def test_lines_rows_of_csv_and_documents_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LINE", 1000)
    monkeypatch.setattr(formats, "DOCUMENT", 3000)
    monkeypatch.setattr(formats, "PARTS", 100)
    row = GOOD.encode()
    files = {
        packed(tmp_path / "a.jsonl.gz", row + b'\n{"prompt": "' + b"a" * 5000): ":2: ",
        packed(tmp_path / "b.jsonl.gz", row + b'\n{"x": [' + b"[]," * 50 + b"[]]}"): ":2: ",
        packed(tmp_path / "a.csv.gz", b'prompt,response\na,b\nc,"' + b"d\n" * 5000): ":3: ",
        packed(tmp_path / "b.csv.gz", b"prompt,response\na,b\n" + b"," * 500): ":3: ",
        packed(tmp_path / "c.csv.gz", b"prompt,response\na,b\n" + b"\n" * 500): ":",
        packed(tmp_path / "b.json.gz", b'{"data": [' + b"[]," * 50 + b"[]]"): ": ",
        packed(tmp_path / "c.json.gz", b'{"data":\n[' + b"[]," * 50 + b"[]]}"): ": ",
        packed(tmp_path / "a.json.gz", b"[" + row + b" " * 5000 + b"]"): ": ",
    }
    for path, place in files.items():
        with pytest.raises(DataError, match=r"more than .*;") as caught:
            list(read_rows(Source(str(path))))
        assert str(caught.value).startswith(f"{path}{place}")
    many = tmp_path / "many.json"  # objects one after the other, each of a few parts
    many.write_text(f"{GOOD}\n" * 70)
    assert len(list(read_rows(Source(str(many))))) == 70


@pytest.mark.parametrize("nested", [False, True], ids=["texts", "messages"])
def test_one_text_that_parquet_says_for_many_rows_takes_the_memory_of_a_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    monkeypatch.setattr(formats, "DECODED", 4 << 20)
    text, count = "a" * (1 << 20), 100
    row = {"messages": [{"role": "user", "content": text}]} if nested else {"prompt": text}
    pq.write_table(pa.Table.from_pylist([row] * count), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 100_000
    tracemalloc.start()
    seen = [place for place, value in formats.values(tmp_path / "a.parquet", formats.Skip(), list) if value]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == [f"row {number}" for number in range(1, count + 1)] and peak < 16 << 20
    monkeypatch.setattr(formats, "DECODED", 1 << 19)
    with pytest.raises(DataError, match=r"a\.parquet:row 1: more than"):
        list(read_rows(Source(str(tmp_path / "a.parquet"), columns={})))
    monkeypatch.setattr(formats, "VALUES", 99)
    with pytest.raises(DataError, match=r"row group 0: 100 values in (prompt|messages)"):
        list(read_rows(Source(str(tmp_path / "a.parquet"))))


def test_a_row_has_as_many_characters_as_can_be_tokenised_and_long_rows_go_together_as_far_as_they_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{GOOD}\n" + json.dumps({"prompt": "", "response": "a" * (2 << 20) + "b"}) + "\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2: 2,097,153 characters"):
        load_dataset([Source(str(path))], replace(ENCODER, max_length=64), cache=None)
    rows = [Row(f"f:{n}", prompt="a" * n, response="b" * n) for n in range(1, 9)]
    whole, _ = ENCODER.encode(rows)
    together: list[int] = []
    tokenise = Encoder._tokenise
    monkeypatch.setattr(
        Encoder, "_tokenise", lambda self, texts, *_: together.append(len(texts)) or tokenise(self, texts, *_)
    )
    monkeypatch.setattr(chat, "CHUNK_CHARACTERS", 12)
    assert ENCODER.encode(rows)[0] == whole
    assert together[::2] == [3, 1, 1, 1, 1, 1]
