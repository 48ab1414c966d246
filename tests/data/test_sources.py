"""Rows come from files of every kind, directories, patterns and hub ids, in the same form and with their place."""

from __future__ import annotations

import csv
import gzip
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blockdiff.data.formats import Skip
from blockdiff.data.sources import Source, open_source, read_rows, titles
from blockdiff.errors import DataError

pytestmark = pytest.mark.quick

PAIRS = [{"prompt": f"{n}+{n}=", "response": f'{2 * n}, "said"\nhe'} for n in range(1, 6)]
QUESTIONS = [{"question": row["prompt"], "answer": row["response"], "extra": 1} for row in PAIRS]
MAPPED = {"prompt": "question", "response": "answer"}


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path: Path, rows) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
        return path
    if path.suffix == ".arrow":
        with pa.ipc.new_stream(str(path), pa.Table.from_pylist(rows).schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows), 2)
        return path
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    with gzip.open(path, "wt", newline="") if path.suffix == ".gz" else path.open("w", newline="") as file:
        if kind in ("csv", "tsv"):
            writer = csv.DictWriter(file, rows[0], delimiter="," if kind == "csv" else "\t")
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.write(json.dumps(rows, indent=1) if kind == "json" else json_lines(rows))
    return path


NAMES = ["a.jsonl", "a.ndjson", "a.json", "a.csv", "a.tsv", "a.parquet", "a.arrow"]
NAMES += ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.tsv.gz"]
ROWS_OF_LINES = [1, 2, 3, 4, 5]
PLACES = {"csv": [2, 4, 6, 8, 10], "tsv": [2, 4, 6, 8, 10], "jsonl": ROWS_OF_LINES, "ndjson": ROWS_OF_LINES}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows, columns", [(PAIRS, {}), (QUESTIONS, MAPPED)], ids=["own names", "columns"])
def test_every_kind_of_file_gives_the_same_rows_and_their_places(tmp_path, name, rows, columns):
    path = write(tmp_path / name, rows)
    found = list(read_rows(Source(str(path), columns=columns)))
    assert [(row.prompt, row.response) for row in found] == [(row["prompt"], row["response"]) for row in PAIRS]
    kind = name.removesuffix(".gz").rpartition(".")[2]
    places = PLACES.get(kind) or [f"row {row}" for row in ROWS_OF_LINES]
    assert [row.where for row in found] == [f"{path}:{place}" for place in places]


@pytest.mark.parametrize("name", NAMES)
def test_skipping_goes_on_where_reading_would_have_been(tmp_path, name):
    for part in ("1", "2"):
        write(tmp_path / f"{part}{name}", PAIRS)
    source = open_source(Source(str(tmp_path / f"?{name}")))
    whole = list(source.rows())
    assert len(whole) == 10
    for count in range(13):
        skip = Skip(count)
        assert list(source.rows(skip)) == whole[count:]
        assert skip.remaining == max(0, count - 10)


def test_json_documents_may_be_lists_wrapped_or_one_object_after_the_other(tmp_path):
    path = tmp_path / "a.json"
    for text in (
        json.dumps(PAIRS),
        json.dumps({"version": 1, "data": PAIRS}, indent=2),
        "\n" + json_lines(PAIRS),
        "\ufeff" + json.dumps(PAIRS),
    ):
        path.write_text(text, encoding="utf-8")
        assert [row.prompt for row in read_rows(Source(str(path)))] == [row["prompt"] for row in PAIRS]
    path.write_text(json.dumps(PAIRS[0]))
    (row,) = read_rows(Source(str(path)))
    assert (row.prompt, row.where) == (PAIRS[0]["prompt"], f"{path}:row 1")


def test_conversations_survive_parquet_and_csv(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "c"}]
    write(tmp_path / "a.parquet", [{"messages": talk, "id": 3}])
    write(tmp_path / "a.csv", [{"messages": json.dumps(talk), "id": 3}])
    for name in ("a.parquet", "a.csv"):
        (row,) = read_rows(Source(str(tmp_path / name)))
        assert (row.messages, row.id) == (tuple(talk), "3")


def test_a_pattern_reads_its_files_in_order_and_a_literal_name_goes_before_a_pattern(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for index, name in enumerate(["b.jsonl", "a.jsonl", "deep/er/c.jsonl", "[x].jsonl"]):
        write(tmp_path / name, [{"prompt": name, "response": str(index)}])
    found = [row.prompt for row in read_rows(Source(str(tmp_path / "**" / "[abc].jsonl")))]
    assert found == ["a.jsonl", "b.jsonl", "deep/er/c.jsonl"]
    assert [row.prompt for row in read_rows(Source(str(tmp_path / "[x].jsonl")))] == ["[x].jsonl"]
    with pytest.raises(DataError, match=r"no file.*pattern"):
        list(read_rows(Source(str(tmp_path / "*.parquet"))))


def test_a_directory_gives_the_files_of_the_split_and_never_mixes_test_rows_into_training(tmp_path):
    for name in ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test.jsonl", "README.md"):
        write(tmp_path / name, [{"prompt": name, "response": "b"}])
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "._train-00000-of-00002.jsonl").write_bytes(b"\0 what an editor or macOS leaves")
    path = str(tmp_path)
    train = ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    assert [row.prompt for row in read_rows(Source(path))] == train
    assert [row.prompt for row in read_rows(Source(path, split="test"))] == ["test.jsonl"]
    with pytest.raises(DataError, match=r"test, train.*'validation'"):
        list(read_rows(Source(path, split="validation")))
    for file in tmp_path.glob("t*.jsonl"):
        file.rename(file.with_name("part" + file.name.replace("train", "").replace("test", "")))
    assert len(list(read_rows(Source(path)))) == 3


def test_files_that_a_directory_leaves_out_because_they_say_no_split_are_named(tmp_path):
    for name in ("my_train", "test", *(f"part{number}" for number in range(7))):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(PAIRS[0]) + "\n")
    with pytest.warns(UserWarning, match=r"my_train\.jsonl.*train.*part0\.jsonl.*part4\.jsonl, 2 more.*pattern"):
        assert len(list(read_rows(Source(str(tmp_path))))) == 1
    for number in range(7):
        (tmp_path / f"part{number}.jsonl").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(read_rows(Source(str(tmp_path))))) == 1


def test_what_datasets_saved_to_disk_is_a_source(tmp_path):
    datasets.Dataset.from_list(QUESTIONS).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / "._data-00000-of-00001.arrow").write_bytes(b"\0 what macOS leaves")
    rows = list(read_rows(Source(str(tmp_path / "saved"), columns=MAPPED)))
    assert [row.prompt for row in rows] == [row["prompt"] for row in PAIRS]


def test_columns_say_which_form_counts_and_leave_the_rest_alone(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    both = {"messages": talk, "question": "q", "answer": "r", "talk": talk, "prompt": "p", "uid": 5}
    path = write(tmp_path / "a.jsonl", [both])
    (row,) = read_rows(Source(str(path), columns=MAPPED))
    assert (row.prompt, row.response, row.messages, row.id) == ("q", "r", None, None)
    (row,) = read_rows(Source(str(path), columns={"messages": "talk", "id": "uid", "system": "question"}))
    assert row.prompt is None and row.id == "5"
    assert row.messages == ({"role": "system", "content": "q"}, *talk)


@pytest.mark.parametrize(
    "columns, reason",
    [({"promt": "question"}, "columns.*'promt'"), ({"prompt": "a", "messages": "b"}, "one form")],
)
def test_columns_that_make_no_sense_are_refused(columns, reason):
    with pytest.raises(DataError, match=reason):
        Source("a.jsonl", columns=columns)


@pytest.fixture
def hub(monkeypatch):
    """A hub with one data set, and what it was asked for."""
    asked = []

    def load_dataset(path, name=None, *, split):
        asked.append((path, name, split))
        if split == "nope":
            raise ValueError("Unknown split 'nope'.\nShould be one of ['train'].")
        return datasets.Dataset.from_list(QUESTIONS)

    def builder(path, name=None):
        def stream(split):
            return load_dataset(path, name, split=split).to_iterable_dataset()

        return SimpleNamespace(hash="a revision", as_streaming_dataset=stream)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    return asked


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_id_is_read_through_datasets(hub, streaming):
    source = open_source(Source("owner/sums", subset="main", columns=MAPPED), streaming)
    rows = list(source.rows())
    assert [row.prompt for row in rows] == [row["prompt"] for row in PAIRS]
    assert rows[1].where == "owner/sums:train:row 2"
    assert hub == [("owner/sums", "main", "train")]
    again, unmapped = Source("owner/sums", subset="main", columns=MAPPED), Source("owner/sums", subset="main")
    assert source.fingerprint() == open_source(again, streaming).fingerprint()
    assert source.fingerprint() != open_source(unmapped, streaming).fingerprint()
    for count in (0, 2, 5, 7):
        skip = Skip(count)
        assert list(source.rows(skip)) == rows[count:]
        assert skip.remaining == max(0, count - 5)


def test_what_the_hub_refuses_is_one_line_with_the_reason(hub):
    with pytest.raises(DataError) as caught:
        list(read_rows(Source("owner/sums", split="nope")))
    message = str(caught.value)
    assert message.startswith("owner/sums: ") and "Should be one of ['train']" in message and "\n" not in message
    with pytest.raises(DataError, match=r"owner/sums:train:row 1: .*'question', 'answer'"):
        list(read_rows(Source("owner/sums")))


def test_a_name_that_is_no_file_and_no_hub_id_is_refused_without_asking_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "no.jsonl"), "data/train.jsonl", "data"):
        with pytest.raises(DataError, match="no such file"):
            list(read_rows(Source(name)))
    assert hub == []


@pytest.mark.parametrize("kind", [list, tuple, datasets.Dataset.from_list], ids=["list", "tuple", "Dataset"])
@pytest.mark.parametrize("rows, columns", [(PAIRS, None), (QUESTIONS, MAPPED)], ids=["own names", "columns"])
def test_rows_in_memory_are_a_source_like_a_file(kind, rows, columns):
    source = open_source(Source(rows=kind(rows), columns=columns))
    found = list(source.rows())
    assert [(row.prompt, row.response) for row in found] == [(row["prompt"], row["response"]) for row in PAIRS]
    assert [row.where for row in found] == [f"rows:{number}" for number in range(1, 6)]
    assert source.files == ["rows"]
    for count in range(8):
        skip = Skip(count)
        assert list(source.rows(skip)) == found[count:]
        assert skip.remaining == max(0, count - 5)


def test_a_bad_row_in_memory_is_named_by_its_number(tmp_path):
    for value, reason in [({"prompt": "a"}, "response is missing"), (3, "the row is a number")]:
        with pytest.raises(DataError, match=rf"^mine:6: {reason}"):
            list(read_rows(Source(rows=[*PAIRS, value], name="mine")))
    with pytest.raises(DataError, match=r"^rows: "):
        list(read_rows(Source(rows=[])))


def test_the_fingerprint_of_rows_in_memory_is_that_of_what_they_say():
    first = open_source(Source(rows=PAIRS)).fingerprint()
    more = datasets.Dataset.from_list(QUESTIONS).rename_columns({"question": "prompt", "answer": "response"})
    same = [tuple(PAIRS), more, more.with_format("torch")]
    assert all(open_source(Source(rows=rows)).fingerprint() == first for rows in same)
    others = [PAIRS[:4], PAIRS[::-1], [*PAIRS[:4], {**PAIRS[4], "id": 1}], [*PAIRS[:4], {**PAIRS[4], "response": "x"}]]
    assert len({first, *(open_source(Source(rows=rows)).fingerprint() for rows in others)}) == 5


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({}, "path or rows"),
        ({"path": "a", "rows": PAIRS}, "path or rows"),
        ({"rows": iter(PAIRS)}, "rows.*list_iterator"),
        ({"rows": PAIRS[0]}, "rows.*dict"),
        ({"rows": "a.jsonl"}, "rows.*str;"),
        ({"path": "a", "weight": 0.0}, r"weight.*0\.0"),
    ],
)
def test_a_source_that_makes_no_sense_is_refused(fields, reason):
    with pytest.raises(DataError, match=reason):
        Source(**fields)


def test_a_recipe_fills_in_what_a_source_does_not_say():
    filled = Source("a").with_defaults("test", MAPPED)
    assert (filled.split, filled.columns) == ("test", MAPPED)
    own = Source("a", split="train", columns={})
    assert own.with_defaults("test", MAPPED) == own


def test_sources_of_the_same_name_are_told_apart():
    sources = [Source("x/a"), Source("y/a"), Source("b"), Source("z/b", name="b"), Source(rows=[]), Source(rows=[1])]
    assert titles(sources) == ["x/a", "y/a", "b", "b", "rows of source 5", "rows of source 6"]


def test_rows_in_memory_with_other_tools_are_other_data():
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [[{"messages": talk, "tools": [{"name": name}]}] for name in ("get", "set")]
    first, second = (open_source(Source(rows=each)).fingerprint() for each in rows)
    assert first != second and first == open_source(Source(rows=rows[0])).fingerprint()


def test_columns_of_alpaca_rows_and_tools_are_read_from_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"instruction": "a", "input": "", "output": "b", "history": None, "more": 1}]
    pq.write_table(pa.Table.from_pylist(rows), path)
    (row,) = read_rows(Source(str(path)))
    assert [message["content"] for message in row.messages] == ["a", "b"]
    pq.write_table(pa.Table.from_pylist([{**rows[0], "history": [["c", "d"]]}]), path)
    with pytest.raises(DataError, match="row 1: has history"):
        list(read_rows(Source(str(path))))
