"""`blockdiff sample` with reasoning, scores and several draws."""

from __future__ import annotations

import json

import pytest

from blockdiff import checkpoint
from blockdiff.checkpoint import init
from blockdiff.data.template import packaged_template
from blockdiff.sampling import Generation
from tests.support.chat_tokenizer import chat_tokenizer
from tests.support.commands import run
from tests.support.oracle import TWO_LAYERS, tiny_config

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    made = init(tiny_config(canvas_length=8, **TWO_LAYERS), seed=3, device="cpu", kernels="torch")
    folder = tmp_path_factory.mktemp("sample") / "model"
    settings = Generation(max_steps=2, max_new_tokens=8, eos_ids=(1,))
    checkpoint.save(made, folder, tokenizer=chat_tokenizer(packaged_template()), generation=settings)
    return folder


def test_output_lines_have_scores_and_which_draw_it_is_where_asked_for(model, tmp_path):
    prompts, output = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text('{"prompt": "abc"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    words = ("sample", model, "--prompts", prompts, "--output", output, "--overwrite")
    assert run(*words).exit_code == 0
    plain = [json.loads(line) for line in output.read_text().splitlines()]
    assert not any({"logprobs", "score", "draw"} & record.keys() for record in plain)
    assert run(*words, "--best-of", "3").exit_code == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    for record in records:
        assert record["draw"] in range(3) and len(record["logprobs"]) == len(record["tokens"])
        assert record["score"] == pytest.approx(sum(record["logprobs"]) / len(record["tokens"]))
    assert run(*words, "--scores").exit_code == 0
    own = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["tokens"] for record in own] == [record["tokens"] for record in plain]
    assert all(record["score"] <= best["score"] + 1e-6 for record, best in zip(own, records, strict=True))


def test_a_line_that_says_how_many_draws_goes_before_the_command(model, tmp_path):
    prompts, output = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    prompts.write_text('{"prompt": "abc", "best_of": 2}\n{"prompt": "abc", "id": "free"}\n')
    words = ("sample", model, "--prompts", prompts, "--output", output, "--overwrite")
    found = []
    for more in ((), ("--best-of", "8"), ("--best-of", "30")):
        assert run(*words, *more).exit_code == 0
        found.append([json.loads(line) for line in output.read_text().splitlines()])
    assert found[0][0] == found[1][0] == found[2][0] and "draw" not in found[0][1]
    assert found[1][1]["score"] <= found[2][1]["score"]


def test_thinking_is_asked_for_in_a_chat_and_refused_for_raw_text(model):
    asked = run("sample", model, "--chat", "hi", "--thinking", "--scores")
    assert asked.exit_code == 0 and "mean log-probability per token -" in asked.stderr
    assert asked.stdout != run("sample", model, "--chat", "hi").stdout
    refused = run("sample", model, "--prompt", "hi", "--thinking")
    assert refused.exit_code == 2
    assert "thinking is asked for in the chat template, so it needs messages" in refused.stderr
