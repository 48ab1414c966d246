"""The benchmark of strategies, on a model that has learnt nothing."""

from __future__ import annotations

import json

import pytest

from benchmarks.strategies import STRATEGIES, main
from blockdiff import checkpoint
from blockdiff.checkpoint import init
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.sampling import Generation, parse_strategy
from tests.oracle import TWO_LAYERS, tiny_config


@pytest.mark.quick
def test_every_line_has_the_steps_and_the_answers_of_its_strategy(tmp_path, capsys):
    made = init(tiny_config(canvas_length=8, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    settings = Generation(max_steps=3, max_new_tokens=8, stability=0, confidence=9e9)
    checkpoint.save(made, tmp_path / "model", tokenizer=character_tokenizer("0123456789+="), generation=settings)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}+1=", "response": str(n + 1)}) + "\n" for n in range(3)))
    asked = ["--strategy", "entropy_bound", "--strategy", "quota:stopping=never@5", "--limit", "2"]
    output = tmp_path / "numbers.json"
    lines = main([str(tmp_path / "model"), "--task", "exact", "--data", str(rows), *asked, "--output", str(output)])
    figures = [(line["rows"], line["most_steps"], line["steps_per_canvas"]) for line in lines]
    assert figures == [(2, 3, 1.0), (2, 5, 5.0)]
    assert json.loads(output.read_text())["lines"] == lines
    assert "| `quota:stopping=never` | 5 | 0 of 2 | 5.00 |" in capsys.readouterr().out


@pytest.mark.quick
def test_every_strategy_of_the_table_is_one():
    for text in STRATEGIES:
        parse_strategy(text.partition("@")[0])
