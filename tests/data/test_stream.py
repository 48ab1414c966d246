"""A stream gives the same example at a place whenever and wherever it is asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import datasets
import pytest

from blockdiff.data.chat import Encoder
from blockdiff.data.order import StreamOrder
from blockdiff.data.sources import Files, Source
from blockdiff.data.stream import StreamedExamples
from blockdiff.errors import DataError
from tests.support.chat_tokenizer import chat_tokenizer

pytestmark = pytest.mark.quick

ENCODER = Encoder(chat_tokenizer(), eos_id=1, canvas_length=8)
TIGHT = Encoder(chat_tokenizer(), eos_id=1, canvas_length=8, max_length=14, too_long="drop")


@pytest.fixture
def path(tmp_path):
    """23 rows, every fifth of them longer than 14 tokens."""
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n:02}", "response": "x" * (30 if n % 5 == 4 else n % 7 + 1)} for n in range(23)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def stream(*paths, encoder=ENCODER, buffer=10, seed=0, **options):
    return StreamedExamples([Source(str(path), **options) for path in paths], encoder, buffer, seed)


def hub(monkeypatch, table, revision="a first one"):
    """A hub whose data sets all have the rows of a table."""
    built = SimpleNamespace(hash=revision, as_streaming_dataset=lambda split: table.to_iterable_dataset())
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *_: built)


def line(example):
    return int(example.where.rpartition(":")[2])


@pytest.mark.parametrize("buffer", [5, 10, 23, 10_000])
def test_every_epoch_has_every_row_once_and_reads_the_file_once(path, monkeypatch, buffer):
    opened = []
    rows = Files.rows
    monkeypatch.setattr(Files, "rows", lambda self, *_, **more: opened.append(1) or rows(self, *_, **more))
    streamed = stream(path, buffer=buffer)
    examples = [streamed[place] for place in range(46)]
    assert [example.sample_id for example in examples] == list(range(46))
    epochs = [[line(example) for example in examples[first : first + 23]] for first in (0, 23)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(1, 24))
    assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])
    assert all(isinstance(token, int) for token in examples[0].tokens) and type(examples[0].tokens) is list
    assert len(opened) == 2 and streamed.statistics[0][1].rows <= 46 + 10


def test_a_mixture_gives_each_source_epochs_of_its_own(path, tmp_path):
    small = tmp_path / "small.jsonl"
    small.write_text("".join(json.dumps({"prompt": str(n), "response": "y"}) + "\n" for n in range(4)))
    streamed = stream(path, small)
    found = {str(file): [] for file in (path, small)}
    for place in range(60):
        found[streamed[place].where.rpartition(":")[0]].append(line(streamed[place]))
    assert sorted(found[str(path)][:23]) == list(range(1, 24))
    of_small = found[str(small)]
    assert all(sorted(of_small[first : first + 4]) == [1, 2, 3, 4] for first in range(0, len(of_small) - 3, 4))


def test_rows_are_shuffled_within_their_window_by_an_order_of_its_own(path):
    orders = [[line(stream(path)[10 * window + place]) - 10 * window for place in range(10)] for window in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(1, 11)) and orders[0] != orders[1]
    assert orders[0] != [line(stream(path, seed=1)[place]) for place in range(10)]


@pytest.mark.parametrize(("encoder", "read"), [(ENCODER, 10), (TIGHT, 29)], ids=["rows skipped", "rows replayed"])
def test_what_a_run_waits_for_at_its_start_is_watched(path, encoder, read):
    watched = []
    sources = [Source(str(path))]
    rows = StreamedExamples(sources, encoder, 10, seed=0, watch=lambda them: (watched.append(0) or x for x in them))
    assert rows[57] and len(watched) == read  # an epoch, to know how long one is, and a window
    assert rows[77] and len(watched) == read


@pytest.mark.parametrize("encoder", [ENCODER, TIGHT], ids=["rows skipped", "rows replayed"])
@pytest.mark.parametrize("sources", [1, 2])
def test_a_restart_at_any_place_gives_the_same_examples(path, tmp_path, encoder, sources):
    small = tmp_path / "small.jsonl"
    small.write_text('{"prompt": "s", "response": "y"}\n{"prompt": "t", "response": "z"}\n')
    paths = (path, small)[:sources]
    whole = stream(*paths, encoder=encoder)
    expected = [whole[place] for place in range(120)]
    for place in (0, 9, 10, 57, 99, 119):
        assert stream(*paths, encoder=encoder)[place] == expected[place]
    forward = stream(*paths, encoder=encoder)
    assert [forward[place] for place in (5, 61, 62, 110)] == [expected[place] for place in (5, 61, 62, 110)]
    assert forward[5] == expected[5]  # backwards costs a restart, nothing else
    if encoder is TIGHT:
        assert all(len(example.tokens) <= 14 for example in expected)
        assert whole.statistics[-1][1].dropped > 0
    if sources == 2:
        shares = [example.where.startswith(str(small)) for example in expected]
        assert 40 < sum(shares) < 80


def test_a_restart_far_away_looks_at_no_row_it_does_not_need(path, monkeypatch):
    looked = []
    examples = Encoder.examples

    def counted(self, rows, statistics):
        return examples(self, (looked.append(row) or row for row in rows), statistics)

    monkeypatch.setattr(Encoder, "examples", counted)
    opened = []
    rows = Files.rows
    monkeypatch.setattr(Files, "rows", lambda self, skip=None: opened.append(1) or rows(self, skip))
    streamed = stream(path)
    begin = 1_000_000 // 23 * 23
    assert sorted(line(streamed[place]) for place in range(begin + 20, begin + 23)) == [21, 22, 23]
    assert len(looked) < 10 and len(opened) == 2


def test_a_batch_over_the_edge_of_a_window_may_be_taken_in_any_order(path):
    whole = stream(path)
    slots = [index for _, index in StreamOrder(6)(2)]
    assert slots == [6, 7, 8, 9, 10, 11]
    expected = [stream(path)[place] for place in slots]
    assert [whole[place] for place in (6, 10, 7, 11, 9, 8)] == [expected[place - 6] for place in (6, 10, 7, 11, 9, 8)]
    assert whole.statistics[0][1].rows == 20  # nothing was read twice


def test_a_stream_from_the_hub_is_skipped_and_passed_again(monkeypatch):
    table = datasets.Dataset.from_list([{"prompt": str(n), "response": "r"} for n in range(7)])
    hub(monkeypatch, table)
    whole = stream("owner/rows", buffer=4)
    expected = [whole[place] for place in range(40)]
    assert {line_of.where for line_of in expected} == {f"owner/rows:train:row {n}" for n in range(1, 8)}
    for place in (3, 8, 21, 39):
        assert stream("owner/rows", buffer=4)[place] == expected[place]
    assert whole.fingerprint == stream("owner/rows", buffer=9).fingerprint


def test_rows_in_memory_are_streamed_like_those_of_a_file(path):
    whole = stream(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for place in (0, 7, 45):
        found = StreamedExamples([Source(rows=rows)], ENCODER, 10, seed=0)[place]
        assert replace(found, where="") == replace(whole[place], where="")
        assert line(found) == line(whole[place])


def test_the_fingerprint_sees_other_options_and_a_corrected_row_is_the_same_stream(path, tmp_path):
    first = stream(path).fingerprint
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(path.read_bytes())
    assert stream(moved).fingerprint == first
    assert stream(path, encoder=TIGHT).fingerprint != first
    assert stream(path, weight=2.0).fingerprint != first
    assert stream(path, columns={"prompt": "response"}).fingerprint != first
    assert stream(path, moved).fingerprint != first
    moved.write_text(path.read_text().replace('"00"', '"first"').replace('"22"', '"the last"'))
    assert stream(moved).fingerprint == first


def test_the_fingerprint_sees_another_data_set_of_the_hub(monkeypatch):
    table = datasets.Dataset.from_list([{"prompt": "p", "response": "r"}])
    hub(monkeypatch, table)
    named = [("a/rows", {}), ("b/rows", {}), ("a/rows", {"subset": "x"}), ("a/rows", {"split": "test"})]
    assert len({stream(name, **options).fingerprint for name, options in named}) == 4
    first = stream("a/rows")
    assert stream("a/rows").content() == first.content()
    hub(monkeypatch, table, revision="a later one")
    assert stream("a/rows").fingerprint == first.fingerprint and stream("a/rows").content() != first.content()


def test_a_restart_among_rows_that_are_no_conversations_goes_on_like_the_whole_stream(tmp_path):
    file = tmp_path / "rows.jsonl"
    said = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    rows = [{"messages": said}, *({"prompt": "p", "response": "r"} for _ in range(39))]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = Encoder(chat_tokenizer(), eos_id=1, canvas_length=8, system="s")
    whole = stream(file, encoder=encoder)
    expected = [whole[place] for place in range(40)]
    assert stream(file, encoder=encoder)[35] == expected[35]


def test_a_stream_of_which_nothing_is_left_ends(path):
    none_fits = Encoder(chat_tokenizer(), eos_id=1, canvas_length=8, max_length=2)
    with pytest.raises(DataError, match=r"rows\.jsonl: .*23 rows"):
        stream(path, encoder=none_fits)[0]


def test_options_of_conversations_are_refused_where_there_are_none(path):
    with pytest.raises(DataError, match=r"^data\.system: "):
        stream(path, encoder=Encoder(chat_tokenizer(), eos_id=1, canvas_length=8, system="x"))[0]
