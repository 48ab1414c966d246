"""Encoded examples are mapped from disk, found again by content, and never half there."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest

from blockdiff.data import cache as cache_files
from blockdiff.data import examples as examples_file
from blockdiff.data.chat import Encoder
from blockdiff.data.dataset import Dataset, load_dataset
from blockdiff.data.example import Example
from blockdiff.data.examples import Examples, read_table, write_examples
from blockdiff.data.sources import Source, read_rows
from blockdiff.data.statistics import Statistics
from blockdiff.data.template import packaged_template
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import DataError
from blockdiff.recipes.sudoku import alphabet
from tests.support.chat_tokenizer import chat_tokenizer

pytestmark = pytest.mark.quick

ENCODER = Encoder(chat_tokenizer(), eos_id=1, canvas_length=8, max_length=60)
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
ROWS = [
    {"prompt": "a", "response": "b" * 5},
    {"messages": [*TALK, *TALK]},
    {"prompt": "a" * 70, "response": "b"},  # no room
    {"prompt": "c", "response": "d" * 80},  # cut
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def load(*paths: Path, cache: Path | None = None, encoder: Encoder = ENCODER, **options) -> Dataset:
    return load_dataset([Source(str(path)) for path in paths], encoder, cache=cache, **options)


@contextmanager
def forbidden(monkeypatch: pytest.MonkeyPatch):
    """Encoding anything is an error in here."""

    def refuse(*_: object) -> None:
        raise AssertionError("encoded again")

    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "examples", refuse)
        yield


def test_examples_are_those_of_the_encoder_with_and_without_a_cache(rows, tmp_path, monkeypatch):
    expected, statistics = ENCODER.encode(list(read_rows(Source(str(rows)))))
    assert len(expected) == 3 and statistics.dropped == statistics.truncated == 1
    for _ in range(2):
        for cache in (None, tmp_path / "cache"):
            found = load(rows, cache=cache)
            assert list(found.examples) == expected == found.examples[:]
            assert found.examples[-1] == expected[-1] and len(found) == 3
            assert found.lengths.tolist() == [len(example.tokens) for example in expected]
            assert found.lengths.dtype == np.int64
            assert found.statistics == [("rows.jsonl", statistics)]
            with pytest.raises(IndexError):
                found.examples[3]


def test_a_second_start_encodes_nothing_and_follows_a_file_that_moved(rows, tmp_path, monkeypatch):
    first = load(rows, cache=tmp_path / "cache")
    moved = rows.rename(tmp_path / "elsewhere.jsonl")
    with forbidden(monkeypatch):
        again = load(moved, cache=tmp_path / "cache")
    assert again.fingerprint == first.fingerprint
    assert [example.where for example in again.examples] == [f"{moved}:{line}" for line in (1, 2, 4)]
    assert load(moved).fingerprint == first.fingerprint


def test_tokens_that_were_kept_with_other_columns_are_not_read(rows, tmp_path, monkeypatch):
    now = load(rows).fingerprint
    monkeypatch.setattr(cache_files, "SCHEMA", examples_file.SCHEMA.remove(0))  # as that of an earlier version
    assert load(rows).fingerprint != now


def test_rows_in_memory_become_the_same_examples_as_those_of_a_file(rows, tmp_path, monkeypatch):
    expected = load(rows)
    for cache in (None, tmp_path / "cache"):
        found = load_dataset([Source(rows=ROWS)], ENCODER, cache=cache)
        assert [example.where for example in found.examples] == ["rows:1", "rows:2", "rows:4"]
        assert [replace(example, where="") for example in found.examples] == [
            replace(example, where="") for example in expected.examples
        ]
        assert found.total == replace(expected.total, first_dropped="rows:3")
    with forbidden(monkeypatch):
        load_dataset([Source(rows=ROWS)], ENCODER, cache=tmp_path / "cache")


def test_whatever_changes_the_tokens_changes_the_fingerprint(rows, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text(rows.read_text().replace("hello", "hallo"))
    tagged = chat_tokenizer(packaged_template().replace("model\\n", "robot\\n"))
    variants = [
        replace(ENCODER, eos_id=0),
        replace(ENCODER, canvas_length=4),
        replace(ENCODER, max_length=50),
        replace(ENCODER, enable_thinking=True),
        replace(ENCODER, turns="last"),
        replace(ENCODER, system="x"),
        replace(ENCODER, too_long="drop"),
        replace(ENCODER, tokenizer=tagged),
    ]
    found = [load(rows), load(other), *(load(rows, encoder=encoder) for encoder in variants)]
    columns = Source(str(rows), columns={"id": "prompt"})
    with pytest.raises(DataError, match=r"columns\.id.*'prompt'"):
        load_dataset([columns], ENCODER, cache=None)
    assert len({data.fingerprint for data in found}) == len(found)
    assert load(rows, encoder=replace(ENCODER, tokenizer=chat_tokenizer())).fingerprint == found[0].fingerprint
    weighted = load_dataset([Source(str(rows), weight=2.0)], ENCODER, cache=None)
    assert weighted.fingerprint != found[0].fingerprint


def test_the_fingerprint_outlives_the_calls_of_the_tokenizer(rows):
    tokenizer = chat_tokenizer()
    before = Encoder(tokenizer, eos_id=1, canvas_length=8).fingerprint
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding()
    tokenizer.chat_template = packaged_template()  # what training leaves in it
    assert Encoder(tokenizer, eos_id=1, canvas_length=8).fingerprint == before


def test_sample_ids_go_on_from_one_source_to_the_next(rows, tmp_path):
    for _ in range(2):
        found = load(rows, rows, cache=tmp_path / "cache")
        assert [example.sample_id for example in found.examples] == [0, 1, 3, 4, 5, 7]
        assert found.examples[4].tokens == found.examples[1].tokens and found.examples[-6] == found.examples[0]
        assert found.sizes == [3, 3] and len(found) == len(found.lengths) == 6
    with pytest.raises(IndexError):
        found.examples[6]


def test_sources_are_told_apart_and_summed_up(rows, tmp_path):
    other = tmp_path / "sub" / "rows.jsonl"
    other.parent.mkdir()
    other.write_text('{"prompt": "a", "response": "b"}\n')
    specs = [Source(str(rows), weight=3.0), Source(str(other)), Source(str(other), name="b")]
    found = load_dataset(specs, ENCODER, cache=None)
    assert [name for name, _ in found.statistics] == [str(rows), str(other), "b", "total"]
    assert found.total.rows == 6 and found.total.examples == 5 and found.total.conversations == 1
    assert found.total.longest == max(found.lengths) and found.weights == [3.0, 1.0, 1.0]
    record = json.loads(json.dumps(found.to_record()))
    assert [source["share"] for source in record["sources"]] == [0.6, 0.2, 0.2]
    assert record["sources"][0]["lengths"] == {"p50": 35, "p90": 58, "p99": 58, "p100": 58}
    assert record["sources"][0]["dropped"] == record["total"]["dropped"] == 1
    assert record["total"]["fill_share"] == found.total.fill_share


def test_statistics_of_other_canvases_do_not_add_up():
    one = Statistics(canvas_length=4, rows=1, responses=1, canvases=1, response_tokens=3, clean_tokens=5, longest=5)
    two = Statistics(canvas_length=4, rows=2, responses=2, canvases=2, response_tokens=6, clean_tokens=10, longest=5)
    assert one + one == two
    with pytest.raises(ValueError, match="differ"):
        one + replace(one, canvas_length=8)


def test_datasets_opens_what_is_cached(rows, tmp_path):
    load(rows, cache=tmp_path / "cache")
    (file,) = tmp_path.glob("cache/*/tokens.arrow")
    opened = datasets.Dataset.from_file(str(file))
    expected = ENCODER.encode(list(read_rows(Source(str(rows)))))[0]
    assert opened["tokens"][:] == [example.tokens for example in expected]
    assert opened["responses"][1] == [edge for span in expected[1].responses for edge in span]


def test_writing_holds_a_part_of_the_examples_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(examples_file, "BATCH", 10)
    with (tmp_path / "e.arrow").open("wb") as file:

        def stream():
            for number in range(100):
                if number % 10 == 5:
                    written.append(file.tell())
                yield Example(number, [number] * (number % 7 + 1), [(0, 1)], number % 3 == 0, f"f:{number}")

        written: list[int] = []
        assert write_examples(file, stream(), ["f"]) == 100
    assert len(set(written)) == 10
    with (tmp_path / "e.arrow").open("rb") as file:
        examples = Examples([read_table(file)], [["g"]], [1000])
    (tmp_path / "e.arrow").unlink()
    assert [example.sample_id for example in examples] == list(range(1000, 1100))
    assert examples[37] == Example(1037, [37] * 3, [(0, 1)], False, "g:37")


def test_without_a_cache_no_file_stays_behind(rows, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    data = load(rows)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert len(data.examples[0].tokens) == 8


def entry_of(cache: Path) -> Path:
    (entry,) = cache.iterdir()
    assert re.fullmatch(r"[0-9a-f]{32}", entry.name)
    assert {file.name for file in entry.iterdir()} == {"tokens.arrow", "facts.json"}
    return entry


@pytest.mark.parametrize("damage", ["cut", "no facts", "half facts", "zeros", "old facts", "other ids"])
def test_a_damaged_entry_is_made_again_with_one_warning(rows, tmp_path, damage):
    cache = tmp_path / "cache"
    expected = list(load(rows, cache=cache).examples)
    tokens, facts = entry_of(cache) / "tokens.arrow", entry_of(cache) / "facts.json"
    content = tokens.read_bytes()
    if damage == "cut":
        tokens.write_bytes(content[:-8])
    elif damage == "zeros":
        tokens.write_bytes(b"\0" * len(content))
    elif damage == "other ids":
        ids = np.array(expected[0].tokens, np.int32).tobytes()
        assert ids in content
        tokens.write_bytes(content.replace(ids, ids[::-1]))
    elif damage == "no facts":
        facts.unlink()
    elif damage == "half facts":
        facts.write_text(facts.read_text()[:20])
    else:
        facts.write_text(facts.read_text().replace("canvases", "pictures"))
    with pytest.warns(UserWarning, match="has changed since it was written; the rows are encoded again") as caught:
        assert list(load(rows, cache=cache).examples) == expected
    assert tokens.read_bytes() == content and entry_of(cache) and len(caught) == 1


def test_a_cache_can_be_trusted_without_reading_all_of_it(rows, tmp_path, monkeypatch):
    expected = load(rows, cache=tmp_path / "cache")
    monkeypatch.setenv("BLOCKDIFF_CACHE_TRUSTED", "1")
    monkeypatch.setattr("blockdiff.data.cache.digest", lambda _: pytest.fail("read"))
    assert list(load(rows, cache=tmp_path / "cache").examples) == list(expected.examples)


@pytest.mark.parametrize("place", [1, 2], ids=["nothing synced", "one file synced"])
def test_a_process_killed_while_writing_leaves_nothing_that_is_taken_for_complete(rows, tmp_path, place):
    cache = tmp_path / "cache"
    child = os.fork()
    if not child:
        try:
            calls = itertools.count(1)
            os.fsync = lambda _: next(calls) == place and os.kill(os.getpid(), signal.SIGKILL)
            load(rows, cache=cache)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = cache.iterdir()
    assert left.name.startswith(".") and (left / "tokens.arrow").exists()
    assert list(load(rows, cache=cache).examples) == ENCODER.encode(list(read_rows(Source(str(rows)))))[0]
    assert left.exists()  # its process might still be at work
    for path in (left, *left.iterdir()):
        os.utime(path, (0, 0))  # a day later it cannot be
    load(rows, rows, cache=cache, encoder=replace(ENCODER, max_length=None))
    assert not left.exists()


@pytest.mark.parametrize("moment", ["before it looks", "after it looked"])
def test_of_two_processes_that_write_the_same_one_wins_and_both_read(rows, tmp_path, monkeypatch, moment):
    cache = tmp_path / "cache"
    owner, name = (os, "fsync") if moment == "before it looks" else (Path, "rename")
    original = getattr(owner, name)

    def late(*arguments):
        monkeypatch.setattr(owner, name, original)
        load(rows, cache=cache)  # the other process is done first
        return original(*arguments)

    monkeypatch.setattr(owner, name, late)
    assert len(load(rows, cache=cache)) == 3 and entry_of(cache)


def test_an_entry_that_another_process_may_be_reading_stays_where_it_is(rows, tmp_path, monkeypatch):
    cache, written = tmp_path / "cache", list[int]()
    original = examples_file.write_examples

    def late(*arguments):
        monkeypatch.setattr("blockdiff.data.dataset.write_examples", original)
        load(rows, cache=cache)  # the other process is done first
        written.extend(path.stat().st_ino for path in cache.glob("[0-9a-f]*/tokens.arrow"))
        return original(*arguments)

    monkeypatch.setattr("blockdiff.data.dataset.write_examples", late)
    assert len(load(rows, cache=cache)) == 3
    assert [(entry_of(cache) / "tokens.arrow").stat().st_ino] == written


def test_a_cache_that_cannot_be_written_is_said_in_one_line(rows, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file.*cache.*data\.cache"):
        load(rows, cache=tmp_path / "file")


def test_the_work_is_done_inside_first_and_only_where_there_is_a_cache_to_share(rows, tmp_path, monkeypatch):
    entered = []

    @contextmanager
    def first():
        entered.append(sorted(tmp_path.glob("cache/*")))
        yield
        entered.append(sorted(tmp_path.glob("cache/*")))

    load(rows, cache=tmp_path / "cache", first=first())
    assert entered[0] == [] and len(entered[1]) == 1
    load(rows, first=first())
    assert len(entered) == 2


@pytest.mark.parametrize("option, key", [({"system": "be kind"}, "system"), ({"enable_thinking": True}, "thinking")])
def test_options_of_conversations_are_refused_where_there_are_none(tmp_path, option, key):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "1=", "response": "1"}\n')
    encoder = Encoder(character_tokenizer(alphabet(4)), eos_id=1, canvas_length=4, **option)
    with pytest.raises(DataError, match=rf"^data\.{key}: "):
        load(path, encoder=encoder)


def test_a_source_of_which_nothing_is_left_is_named(rows, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text('{"prompt": "' + "a" * 99 + '", "response": "b"}\n')
    with pytest.raises(DataError, match=r"long\.jsonl: .*1 rows.*canvas of 8"):
        load(rows, path)
    with pytest.raises(DataError, match=r"long\.jsonl: .*1 rows.*short.*max_length 60"):
        load(path, encoder=replace(ENCODER, too_long="drop"))
