"""From a recipe to its data: the exported tokenizer writes the format that the model has learnt, or stays as it was."""

from __future__ import annotations

import json
import pwd
from types import SimpleNamespace

import datasets
import pytest

from blockdiff.data.sources import Source, read_rows
from blockdiff.data.template import packaged_template
from blockdiff.errors import DataError
from blockdiff.training.data import cache_directory
from blockdiff.training.recipe import DataSection, Recipe
from blockdiff.training.recipe_files import read_recipe
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.recipes import read_data

pytestmark = pytest.mark.quick

PAIR = {"prompt": "a", "response": "b"}
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def starting_model(tokenizer=None, canvas_length=8):
    """The part of a starting model that the reading of data needs."""
    tokens = dict(tokenizer=tokenizer or chat_tokenizer(), eos_id=1, pad_id=0)
    config = SimpleNamespace(fill=None)
    return SimpleNamespace(**tokens, canvas_length=canvas_length, denoises=True, aligned=False, config=config)


@pytest.mark.parametrize("streaming", [False, True], ids=["mapped", "streamed"])
@pytest.mark.parametrize("cached", [False, True], ids=["read", "cached"])
@pytest.mark.parametrize(
    "rows, heldout, chat, expected",
    [
        ([PAIR], None, False, False),
        ([PAIR], [PAIR], False, False),
        ([PAIR], [TALK], False, False),
        ([PAIR, TALK], None, False, True),
        ([TALK], [PAIR], False, True),
        ([PAIR], None, True, True),
    ],
    ids=["raw text", "raw text, held out too", "raw text, talk held out", "one talk", "talk", "raw text as talk"],
)
def test_the_tokenizer_gets_the_template_of_training_if_rows_were_conversations(
    tmp_path, rows, heldout, chat, streaming, cached, expected
):
    section = {"streaming": streaming, "chat": chat, "cache": str(tmp_path / "cache") if cached else "off"}
    for name, content in (("train", rows), ("heldout", heldout)):
        if content is not None:
            section[name] = str(tmp_path / f"{name}.jsonl")
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    recipe = Recipe.model_validate(
        {"model": {"preset": "tiny"}, "data": section, "train": {"steps": 1, "batch_size": 1}}
    )
    for _ in range(1 + cached):
        base = starting_model()
        base.tokenizer.chat_template = None
        data = read_data(recipe, base)
        assert base.tokenizer.chat_template == (packaged_template() if expected else None)
        kinds = {"messages" in row or chat for row in rows}
        assert data.train.form == (None if len(kinds) > 1 else "chat" if kinds == {True} else "raw")


@pytest.mark.parametrize(
    ("rows", "chat", "asked"), [([TALK], False, 1), ([PAIR], True, 1), ([PAIR], False, 0), ([PAIR, TALK], False, 0)]
)
def test_prompts_of_evaluations_are_asked_in_the_form_of_the_rows(rows, chat, asked):
    data = {"train": [{"rows": rows}], "cache": "off", "chat": chat}
    tree = {"model": {"preset": "tiny"}, "data": data, "train": {"steps": 1, "batch_size": 1}}
    tree["evaluation"] = {"prompts": [{"rows": [PAIR]}]}
    base = starting_model()
    read = read_data(Recipe.model_validate(tree), base)
    ((example,), _) = read.encoder.encode(read.prompts)
    start = base.tokenizer.decode(example.tokens[: example.responses[0][0]])
    assert start == ("<bos><|turn>user\na<turn|>\n<|turn>model\n" if asked else "<bos>a")


def test_a_template_that_writes_no_row_is_refused():
    tree = {"model": {"preset": "tiny"}, "data": {"train": [{"rows": [PAIR]}], "cache": "off", "template": "verbatim"}}
    base = starting_model()
    with pytest.raises(DataError, match=r"^data\.template: "):
        read_data(Recipe.model_validate(tree | {"train": {"steps": 1, "batch_size": 1}}), base)


def test_rows_from_python_are_one_source_with_or_without_saying_so():
    for rows in ([PAIR, PAIR], [TALK], datasets.Dataset.from_list([PAIR])):
        for named in (rows, [{"rows": rows}], {"rows": rows}, Source(rows=rows)):
            (source,) = DataSection.model_validate({"train": named}).train
            assert source.rows is rows and source.title == "rows"
    both = DataSection.model_validate({"train": ["a.jsonl", {"rows": [PAIR], "weight": 2.0}]}).train
    assert [(source.path, source.weight) for source in both] == [("a.jsonl", 1.0), (None, 2.0)]


def test_rows_that_are_encoded_and_prompts_are_watched_and_those_of_the_cache_are_not(tmp_path):
    data = {"train": [{"rows": [PAIR, PAIR]}], "heldout": [{"rows": [PAIR]}], "cache": str(tmp_path)}
    tree = {"model": {"preset": "tiny"}, "data": data, "train": {"steps": 1, "batch_size": 1}}
    tree["evaluation"] = {"prompts": [{"rows": [PAIR, PAIR]}], "prompts_count": 1}
    base, watched = starting_model(), []
    for expected in (3 + 1, 3 + 1 + 1):
        read_data(Recipe.model_validate(tree), base, watch=lambda rows: (watched.append(row) or row for row in rows))
        assert len(watched) == expected


def test_splits_and_streams_of_datasets_are_rows(tmp_path):
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list([PAIR]), test=datasets.Dataset.from_list([TALK]))
    tree = {"model": {"preset": "tiny"}, "train": {"steps": 1, "batch_size": 1}}
    recipe = read_recipe(tree | {"data": {"train": splits, "heldout": {"rows": splits, "split": "test"}}})
    assert [next(read_rows(source)).prompt for source in recipe.data.train] == ["a"]
    assert [next(read_rows(source)).prompt for source in recipe.data.heldout] == [None]
    stream = datasets.IterableDataset.from_generator(lambda: iter([PAIR, PAIR]))
    (source,) = read_recipe(tree | {"data": {"train": stream}}).data.train
    assert len(list(read_rows(source))) == 2
    with pytest.raises(DataError, match=r"rows .*'dev'.*test, train|train, test"):
        Source(rows=splits, split="dev")
    splits.save_to_disk(tmp_path / "saved")
    assert [row.prompt for row in read_rows(Source(str(tmp_path / "saved"), split="test"))] == [None]


@pytest.mark.parametrize("limit", [6, {"drop": 6}], ids=["no room", "too long"])
def test_rows_that_are_left_out_are_counted_with_the_reason_and_the_first_of_them(tmp_path, limit):
    for name, rows in (("a", [PAIR, {**PAIR, "prompt": "a" * 9}]), ("b", [PAIR] * 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    section = {"train": sources, "max_length": limit, "cache": str(tmp_path / "cache")}
    recipe = Recipe.model_validate(
        {"model": {"preset": "tiny"}, "data": section, "train": {"steps": 1, "batch_size": 1}}
    )
    why = "has no room for a canvas within" if limit == 6 else "is longer than"
    also = "" if limit == 6 else ", or write {truncate: 6},"
    line = f"dropped: 1 row {why} the 6 tokens of data.max_length, a.jsonl:2 the first; raise it{also} to keep them"
    for _ in range(2):  # the second time from the cache
        base = starting_model(canvas_length=4)
        lines = read_data(recipe, base).lines()
        assert [each.strip() for each in lines if "dropped:" in each] == [line]


def test_a_batch_of_more_rows_than_there_are_and_rows_longer_than_packed_ones_are_named():
    tree = {"model": {"preset": "tiny"}, "data": {"train": [{"rows": [PAIR, PAIR]}], "cache": "off", "pack": 3}}
    base = starting_model()
    data = read_data(Recipe.model_validate(tree | {"train": {"steps": 1, "batch_size": 5}}), base)
    assert data.lines()[-2:] == [
        "note      train.batch_size: 5 is more than the 2 examples: "
        "each is used about 2.5 times in every optimiser step",
        "note      data.pack: 2 examples are longer than its 3 tokens: each is alone in its row",
    ]
    data = read_data(Recipe.model_validate(tree | {"train": {"steps": 1, "batch_size": 2}}), base)
    assert len(data.lines()) == 3 and int(data.train.lengths.max()) > 3


@pytest.mark.parametrize("row, is_told", [(PAIR, True), (TALK, False)])
def test_turns_of_rows_that_are_no_conversations_are_told(row, is_told):
    data = {"train": [{"rows": [row]}], "cache": "off", "turns": "last"}
    tree = {"model": {"preset": "tiny"}, "data": data, "train": {"steps": 1, "batch_size": 1}}
    base = starting_model(chat_tokenizer(packaged_template()))
    lines = read_data(Recipe.model_validate(tree), base).lines()
    assert any("data.turns has no effect" in line for line in lines) == is_told


@pytest.mark.parametrize("streaming", [False, True], ids=["mapped", "streamed"])
def test_keys_that_nothing_reads_are_named(streaming):
    data = {"train": [{"rows": [PAIR, PAIR | {"note": "c"}]}], "cache": "off", "streaming": streaming}
    tree = {"model": {"preset": "tiny"}, "data": data, "train": {"steps": 1, "batch_size": 1}}
    lines = read_data(Recipe.model_validate(tree), starting_model()).lines()
    assert lines[1].strip() == "1 key is not read: note"


def test_rows_that_are_skipped_are_counted_in_the_lines_and_the_report():
    data = {"train": [{"rows": [PAIR, {"prompt": "a"}, PAIR]}], "cache": "off", "on_bad_row": "skip"}
    tree = {"model": {"preset": "tiny"}, "data": data, "train": {"steps": 1, "batch_size": 1}}
    base = starting_model()
    read = read_data(Recipe.model_validate(tree), base)
    assert read.lines()[1].startswith("          left out: rows:2: response is missing")
    assert read.report()["train"]["sources"][0]["bad"] == 1


def test_without_a_home_directory_no_tokens_are_kept(monkeypatch, tmp_path):
    for name in ("HOME", "XDG_CACHE_HOME", "BLOCKDIFF_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # nor has the user an entry there
    with pytest.warns(UserWarning, match="no home directory; set data.cache"):
        assert cache_directory("auto") is None
    with pytest.raises(DataError, match="~/tokens: "):
        cache_directory("~/tokens")
    assert cache_directory(str(tmp_path)) == tmp_path
