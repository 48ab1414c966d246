"""The measurement of forwards: its interval is Wilson's, and it says of what gains nothing that it does."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.forwards import TASKS, WAYS, interval, main, verdict
from blockdiff.recipes import sudoku

pytestmark = pytest.mark.quick


def test_the_interval_is_wilsons() -> None:
    assert interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, table I
    assert interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


@pytest.mark.parametrize(
    ("word", "right", "forwards"),
    [("gains nothing", 12, 4), ("gains nothing", 8, 4), ("gains nothing", 8, 6), ("gains", 12, 3), ("gains", 20, 4),
     ("trades", 2, 3), ("trades", 20, 6)],
)  # fmt: skip
def test_what_gains_nothing_is_said_to(word: str, right: int, forwards: int) -> None:
    """Beside 10 of 20 right in 4 forwards each."""

    def report(right: int, forwards: int) -> dict:
        row = {"prompt": "p", "reference": "r", "forwards": {"denoise": forwards - 1, "encode": 1, "verify": 0}}
        return {"records": [{"id": n, "is_solved": n < right, **row} for n in range(20)]}

    assert verdict(report(10, 4), report(right, forwards)).startswith(f"**{word}**: ")


def test_a_few_long_answers_outweigh_many_that_are_a_little_shorter() -> None:
    def report(forwards: list[int]) -> dict:
        calls = [{"denoise": count, "encode": 0, "verify": 0} for count in forwards]
        same = {"prompt": "p", "reference": "r", "is_solved": True}
        return {"records": [{"id": n, "forwards": each, **same} for n, each in enumerate(calls)]}

    assert verdict(report([4] * 20), report([3] * 19 + [48])).startswith("**gains nothing**: +1.25 forwards")


def test_a_task_whose_model_is_missing_is_trained_and_measured(tmp_path, monkeypatch, capsys) -> None:
    toy = replace(
        TASKS[0],
        write=lambda to, _: sudoku.write_splits(to, 4, {"train": 8, "test": 2}),
        training=("train.steps=1", "train.batch_size=2", "generation.max_steps=2"),
        has_distilled=False,
    )
    monkeypatch.setattr("benchmarks.forwards.TASKS", (toy,))
    for _ in range(2):  # the second time the model is there
        assert main([str(tmp_path), "--seeds", "3", "--output", str(tmp_path / "x.json")]) == 0
        assert capsys.readouterr().out.count("optimiser steps of 2 examples") <= 1
    lines = json.loads((tmp_path / "x.json").read_text())["lines"]
    ways = [way.name for way in WAYS if not way.is_distilled]
    assert [line["name"] for line in lines] == ways and {line["rows"] for line in lines} == {2}
    assert lines[0]["forwards_per_row"] == {"total": 3, "denoise": 2, "encode": 1, "verify": 0, "draft": 0}
    table = (tmp_path / "x.md").read_text().splitlines()
    assert [row.split("|")[1].strip() for row in table if row.startswith("| ")][1:] == ways
