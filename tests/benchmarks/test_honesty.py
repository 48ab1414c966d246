"""The benchmark of honesty: every way of the table runs, from rows that it writes to lines."""

from __future__ import annotations

import json

import pytest

from benchmarks import honesty


def test_each_recipe_is_trained_on_its_rows_and_has_its_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(honesty, "SAMPLES", 2)
    monkeypatch.setattr(honesty, "WAYS", [(1, 1)])
    file = tmp_path / "table.json"
    changes = ["train.steps=1", "train.batch_size=2"]
    arguments = ["--seeds", "0", "--rows", "20", "--prompts", "5", "--output", str(file), "--set", *changes]
    assert honesty.main([str(tmp_path / "runs"), *arguments]) == 0
    lines = json.loads(file.read_text())["lines"]
    ways = [line["way"] for line in lines]
    assert ways == ["single"] * 2 + ["joint"] * 2 + ["2 full samples"] + ["next-token head"] * 2
    assert all(0 <= line["variation"] <= 1 and line["count"] >= 5 for line in lines)


def test_the_posterior_itself_has_no_variation_and_no_excess():
    answers = honesty.Answers.empty()
    for row, puzzle in enumerate(honesty.puzzles(20, 7)):
        posterior = honesty.torch.tensor([puzzle.posterior()[puzzle.asked]], dtype=honesty.torch.float64)
        answers.add(puzzle, puzzle.asked, posterior.log(), row)
    [line] = answers.lines(None, model="m", seed=0, way="w", steps=1, draws=1, milliseconds=0.0)
    assert line.variation == pytest.approx(0, abs=1e-12) and line.excess == pytest.approx(0, abs=1e-9)
