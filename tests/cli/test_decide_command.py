"""`blockdiff decide` and `blockdiff eval --decisions`: from files of questions to answers, figures and temperatures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blockdiff import checkpoint
from blockdiff.checkpoint import init
from blockdiff.data.template import packaged_template
from blockdiff.sampling import Generation
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.commands import run
from tests.support.oracle import TWO_LAYERS, tiny_config

pytestmark = pytest.mark.quick
SPAM = {"type": "predicate", "instructions": "Is it spam?", "name": "spam"}
TEAM = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}, {"value": "c"}]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    made = init(tiny_config(canvas_length=8, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    settings = Generation(max_steps=3, max_new_tokens=16, eos_ids=(1,))
    tokenizer = chat_tokenizer(packaged_template())
    checkpoint.save(made, tmp_path / "model", tokenizer=tokenizer, generation=settings)
    return tmp_path / "model"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def labelled(words: range) -> list[dict[str, Any]]:
    """Rows with one answer by value, and one as a distribution."""
    return [
        {"input": f"text {word}", "questions": [SPAM, TEAM], "answers": [word % 2 == 0, [0.5, 0.25, 0.25]]}
        for word in words
    ]


def test_questions_of_a_file_are_answered_a_line_each(model: Path, tmp_path: Path) -> None:
    rows = [{"id": "x", "input": {"a": 1}, "questions": [SPAM]}]
    rows.append({"messages": [{"role": "user", "content": "hi"}], "questions": [SPAM, TEAM]})
    file = write(tmp_path / "q.jsonl", rows)
    result = run("decide", model, "--questions", file, "--draws", "1")
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, result.stdout.splitlines())
    assert (first["id"], second["id"]) == ("x", 2)
    assert [each["type"] for each in second["answers"]] == ["predicate", "choice"]
    assert sum(each["probability"] for each in second["answers"][1]["probabilities"]) == pytest.approx(1)
    again = run("decide", model, "--questions", file, "--draws", "1", "--output", tmp_path / "a.jsonl")
    assert again.exit_code == 0 and (tmp_path / "a.jsonl").read_text() == result.stdout


def test_labelled_rows_are_judged_and_temperatures_are_kept_with_the_model(model: Path, tmp_path: Path) -> None:
    file, others = (
        write(tmp_path / "test.jsonl", labelled(range(12))),
        write(tmp_path / "fit.jsonl", labelled(range(12, 24))),
    )
    asked = ("eval", model, "--decisions", file, "--draws", "1", "--json")
    result = run(*asked)
    assert result.exit_code == 0, result.output
    plain = json.loads(result.stdout)
    assert plain["decisions"] == 24 and plain["calibrated"] == 0
    assert {*plain["parts"]} == {"all", "type predicate", "type choice", "spam", "Which?"}
    whole = plain["parts"]["all"]
    low, high = whole["accuracy_interval"]
    assert low <= whole["accuracy"] <= high and whole["calibration_floor"] > 0
    assert sum(map(sum, plain["parts"]["spam"]["confusion"]["counts"])) == 12

    fitted = run(*asked[:-1], "--calibrate", others, "--plot", tmp_path / "r.png", "--output", tmp_path / "r.json")
    assert fitted.exit_code == 0, fitted.output
    assert "under 50 rows" in fitted.stderr and (tmp_path / "r.png").stat().st_size > 1000
    kept = json.loads((model / "blockdiff.json").read_text())["calibration"]
    assert {each["of"] for each in kept.values()} == {"predicate", "choice"}
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["calibrated"] == 1
    again, bare = json.loads(run(*asked).stdout), json.loads(run(*asked, "--uncalibrated").stdout)
    assert again["parts"]["all"]["nll"] == pytest.approx(report["parts"]["all"]["nll"])
    assert bare["parts"]["all"]["nll"] == pytest.approx(whole["nll"])
    other_way = json.loads(run(*asked[:-2], "2", "--json").stdout)
    assert other_way["calibrated"] == 0  # of two draws nothing was fitted


def test_what_cannot_be_judged_is_refused_in_one_line(model: Path, tmp_path: Path) -> None:
    good = labelled(range(2))
    wrong = {
        "another.jsonl:2: answers should have one for each of the 2": [good[0], {**good[1], "answers": [True]}],
        "'maybe' is no answer to 'Is it spam?'; give one of false, true": [{**good[0], "answers": ["maybe", "a"]}],
        "is no distribution; write 3 probabilities": [{**good[0], "answers": [True, [0.5, 0.5, 0.5]]}],
        "the row is not a decision": [{"input": "x"}],
        "another.jsonl:1: is the row at": good,
    }
    file = write(tmp_path / "test.jsonl", good)
    for words, rows in wrong.items():
        another = write(tmp_path / "another.jsonl", rows)
        result = run("eval", model, "--decisions", file, "--calibrate", another)
        assert result.exit_code == 1 and words in result.stderr and len(result.stderr.splitlines()) == 1, result.stderr
    assert run("eval", model, "--calibrate", file).exit_code == 2
