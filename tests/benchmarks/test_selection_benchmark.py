"""The benchmark of how canvases select, on a model that has learnt nothing."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.selection import main, share
from blockdiff import checkpoint
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import CheckpointError
from blockdiff.sampling import Generation
from tests.families import small_model

pytestmark = pytest.mark.quick


def test_selections_and_answers_are_compared_with_those_of_each_query_in_every_step(tmp_path, capsys):
    model = small_model("minimax_m3 denoising", dtype=torch.float32)
    settings = Generation(max_steps=3, max_new_tokens=8, eos_ids=())
    tokenizer = character_tokenizer("".join(map(chr, range(33, 126))))  # a text for each of the 96 tokens
    checkpoint.save(model, tmp_path / "model", tokenizer=tokenizer, generation=settings)
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"prompt": f"{n}+{'1' * 30}=", "response": str(n + 1)}) for n in range(3)]
    rows.write_text("\n".join(lines))
    words = [str(tmp_path / "model"), "--task", "exact", "--data", str(rows), "--steps", "4"]
    figures = main([*words, "--output", str(tmp_path / "found.json")])
    assert json.loads((tmp_path / "found.json").read_text()) == figures
    first, *others = figures["lines"]
    assert (first["selection"], first["is_kept"], first["changed_answers"]) == ("query", False, 0.0)
    assert all(line["changed_answers"] > 0 for line in others), "random weights are chaotic"
    differing = figures["disagreements"]
    assert [len(differing[name]) for name in ("from_first_step", "canvas_from_queries")] == [3, 4]
    assert all(0 < each < 1 for name in ("from_step_before", "canvas_from_queries") for each in differing[name])
    assert differing["from_first_step"][0] == differing["from_step_before"][0]
    assert "| per canvas, in the first step |" in capsys.readouterr().out


def test_selections_are_compared_as_sets():
    ids = torch.tensor([[0, 2, 1], [3, 1, -1]])
    assert share(ids, torch.tensor([[2, 1, 0], [1, 3, -1]])) == 0.0
    assert share(ids, torch.tensor([[2, 1, 0], [1, 2, -1]])) == 0.5


def test_a_model_that_selects_nothing_is_refused(tmp_path):
    model = small_model("llama tied, denoising", dtype=torch.float32)
    checkpoint.save(model, tmp_path / "model", tokenizer=character_tokenizer("0123456789+="))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "response": "2"}\n')
    with pytest.raises(CheckpointError, match="no MiniMax M3 with canvases"):
        main([str(tmp_path / "model"), "--task", "exact", "--data", str(tmp_path / "rows.jsonl")])
