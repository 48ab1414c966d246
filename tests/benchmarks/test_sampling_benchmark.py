"""The benchmark of whole workloads: both sides do the same work, and nothing is quoted where they do not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import models, sampling
from benchmarks.sampling_peer import Peer
from blockdiff.sampling import Generation, Request


@pytest.fixture(scope="module")
def ragged():
    return sampling.scripted("ragged", "tiny", 5, (3,), longest=24)


@pytest.fixture(scope="module")
def own_rule():
    """A workload without a script: the model's own stopping rule, generous enough for random weights."""
    pair = models.pair(models.Size("tiny", "tiny", 1, 8, (2, 4)), torch.device("cpu"))
    pair.ours.eval(), pair.peer.eval()
    generation = Generation(max_steps=5, stability=0, confidence=5.0, max_new_tokens=16, eos_ids=(1,), pad_id=0)
    requests = tuple(Request(n, tokens=[2, 9 + n, 7], seed=n) for n in range(6))
    return sampling.Workload("puzzles", pair, requests, generation, (3,))


def test_a_script_decides_steps_and_lengths_on_both_sides(ragged):
    length = ragged.models.ours.canvas_length
    canvases = [request.max_new_tokens // length for request in ragged.requests]
    expected = [[ragged.steps[n]] * canvases[n] for n in range(5)]
    for results in (ragged.ours(3), ragged.lockstep(3)):
        assert [result.steps for result in results] == expected
        assert [len(result.tokens) for result in results] == [length * count for count in canvases]
    peer = Peer(ragged.models.peer, ragged.generation, ragged.steps)
    theirs = peer.answer(ragged.requests, 1)
    # alone, a row's forwards are exactly the scripted ones
    assert peer.canvas_forwards == sum(map(sum, expected))
    assert all(len(theirs[n][0]) == length * canvases[n] for n in range(5))


def test_a_line_says_what_was_run_and_how_fast(ragged):
    line = sampling.measure(ragged, 3, 1, "eager")
    assert line["agrees"] and line["same_as_lockstep"] == 1.0
    assert line["executed_over_needed"] >= 1.0 and line["transformers_executed_over_needed"] > 1.0
    shares = [line[name]["ours"] for name in ("scheduling", "draws_and_decisions")]
    assert all(0 < share < 1 for share in shares) and sum(shares) < 1 and line["peak_bytes"]["ours"] > 0
    assert sum(line["steps_histogram"].values()) == sum(r.max_new_tokens for r in ragged.requests) // 16
    assert "x transformers" in sampling.told(line)


def test_with_the_same_draws_both_sides_answer_alike_and_a_difference_leaves_nothing_to_quote(own_rule):
    assert sampling.compared(own_rule, 3)["same_as_transformers"] == 1.0
    broken = replace(own_rule, generation=replace(own_rule.generation, entropy_bound=50.0))
    broken = replace(broken, models=own_rule.models)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        real = Peer.__init__
        patch.setattr(Peer, "__init__", lambda self, model, _, *rest: real(self, model, own_rule.generation, *rest))
        line = sampling.measure(broken, 3, 1, "eager")
    assert not line["agrees"] and "speedup" not in line and "DISAGREES" in sampling.told(line)


def test_the_command_writes_every_line_with_its_machine(tmp_path, capsys):
    file = tmp_path / "out.json"
    words = ["shared", "--preset", "tiny", "--count", "4", "--limits", "2", "--experts", "eager", "--output", str(file)]
    assert sampling.main(words) == 0
    written = json.loads(file.read_text())
    assert written["machine"]["versions"]["torch"] == torch.__version__ and len(written["lines"]) == 1
    assert file.with_suffix(".md").read_text() == f"- {capsys.readouterr().out}"
