"""Nemotron-Labs-Diffusion's answers: the released loops' tokens, steps and places, and what begins a canvas."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import blockdiff
from blockdiff import checkpoint
from blockdiff.checkpoint.generation import default_generation
from blockdiff.errors import RequestError
from blockdiff.sampling import Generation, Request, Result, Sampler
from blockdiff.sampling.trace import Recorder

pytestmark = pytest.mark.quick
GOLDEN = Path(__file__).parents[1] / "data/families/nemotron"
PROMPTS, THRESHOLDS, BLOCKS = {"yarn": 13, "short": 6}, {"yarn": 0.65, "short": 0.55}, {"yarn": 5, "short": 9}
MASK, GREEDY = 100, "confidence=0,t_min=1,t_max=1,greedy=true"


@pytest.fixture(scope="module", params=PROMPTS)
def case(request) -> tuple[Any, dict[str, Tensor], str]:
    """A model without an eos, and what its own code gave."""
    model: Any = blockdiff.load(GOLDEN / request.param, dtype="float64", device="cpu", kernels="torch")
    model.config, model.carried = dataclasses.replace(model.config, eos_token_id=None), None
    return model, load_file(GOLDEN / request.param / "outputs_fp64.safetensors"), request.param


def answered(model: Any, prompt: list[int], strategy: str, length: int, eos: int | None = None) -> tuple[Result, Any]:
    """An answer, and the places that each step of its canvases filled, with the columns of their canvases."""
    generation = Generation(max_steps=model.canvas_length, max_new_tokens=length, eos_ids=() if eos is None else (eos,))
    recorder = Recorder()
    sampler = Sampler(model, None, generation, strategy=strategy)
    [result] = sampler.generate([Request(0, tokens=prompt)], on_step=recorder.step)
    steps = [step for trace in recorder.traces for step in trace.steps]
    filled = [[n for n, kept in enumerate(step.is_accepted) if kept and step.tokens[n] == MASK] for step in steps]
    return result, filled


def released(truth: dict[str, Tensor], name: str) -> list[list[int]]:
    """The places that each denoising call of a released loop filled."""
    return [[place for place in call if place >= 0] for call in truth[f"{name}_filled"].tolist()]


@pytest.mark.parametrize("loop", ["generate", "one_by_one"])
def test_greedy_answers_are_the_released_loops_token_for_token_step_for_step_and_place_for_place(case, loop):
    model, truth, name = case
    row, count, blocks = truth[f"{loop}_tokens"][0].tolist(), PROMPTS[name], BLOCKS[name]
    rule = f"confident:threshold={THRESHOLDS[name]},{GREEDY}" if loop == "generate" else f"quota:{GREEDY}"
    result, filled = answered(model, row[:count], rule, blocks * model.canvas_length)
    assert result.tokens == row[count:]
    assert filled == released(truth, loop)
    # a released loop encodes the last block, too, and nothing reads it
    assert result.forwards.denoise + result.forwards.encode == int(truth[f"{loop}_nfe"])
    assert result.forwards.denoise == len(filled) and result.forwards.encode == blocks  # the prompt is one


def test_a_canvas_ends_with_an_eos_before_which_no_mask_is_left(case):
    model, truth, name = case
    row, count, eos = truth["ends_tokens"][0].tolist(), PROMPTS[name], int(truth["ends_eos"])
    rule = f"confident:threshold={THRESHOLDS[name]},{GREEDY}"
    result, filled = answered(model, row[:count], rule, BLOCKS[name] * model.canvas_length, eos)
    assert result.tokens == row[count : row.index(eos, count) + 1] and result.finish_reason == "eos"
    assert filled == released(truth, "ends")


def test_speculative_is_the_released_self_speculation_draft_for_draft_and_verified_canvases_have_its_tokens(case):
    """Its block slides behind accepted tokens; a verified canvas stays until all of it is accepted."""
    model, truth, name = case
    count, calls = PROMPTS[name], dict[str, tuple[int, int, int]]()
    for which in ("spec", "lora_spec"):
        row = truth[f"{which}_tokens"][0].tolist()
        assert row == truth["ar_tokens"][0, : len(row)].tolist()
        if which == "lora_spec":
            model = blockdiff.load(GOLDEN / name, dtype="float64", device="cpu", kernels="torch")
            model.config, model.carried = dataclasses.replace(model.config, eos_token_id=None), None
            checkpoint.load_adapter(model, GOLDEN / name / "linear_spec_lora")
        generation, found, rounds = Generation(max_new_tokens=len(row) - count, eos_ids=()), [], []
        for rule in (f"speculative:temperature=0,block={model.canvas_length}", "verified:steps=1,temperature=0"):
            sampler = Sampler(model, None, generation, strategy=rule)
            [result] = sampler.generate([Request(0, tokens=row[:count])], on_step=rounds.append)
            assert result.tokens[: len(row) - count] == row[count:]
            found.append(sum(dataclasses.astuple(result.forwards)))
            if rule.startswith("speculative"):
                drafts = [(each.draft, each.accepted) for each in rounds if each.draft]
        released = zip(truth[f"{which}_drafts"].tolist(), truth[f"{which}_accepted"].tolist(), strict=True)
        for (draft, accepted), (block, own) in zip(drafts, released, strict=False):
            assert draft == block[1 : 1 + len(draft)] and accepted == min(own - 1, len(draft))
        calls[which] = found[0], found[1], int(truth[f"{which}_nfe"])
    # all calls: speculative, verified, released; before the last token nothing is drafted here
    assert (
        calls
        == {
            "yarn": {"spec": (54, 54, 55), "lora_spec": (67, 72, 67)},
            "short": {"spec": (40, 52, 41), "lora_spec": (32, 43, 33)},
        }[name]
    )


def test_self_speculation_of_several_rows_draws_the_tokens_of_next_token_sampling(case):
    model, truth, name = case
    requests = [Request(n, tokens=truth["tokens"][0, n : PROMPTS[name]].tolist(), max_new_tokens=9) for n in range(3)]
    drawn = [Sampler(model, None, Generation(), strategy=rule) for rule in ("speculative", "next_token")]
    ours, theirs = (sampler.generate(requests, seed=5) for sampler in drawn)
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]
    with pytest.raises(RequestError, match="use two"):
        drawn[0].generate([Request(0, tokens=[1], max_new_tokens=4, strategy=f"confident:{GREEDY}")])


def test_the_head_draws_the_first_token_of_each_canvas_among_those_that_are_not_banned(case):
    model, truth, name = case
    prompt, L = truth["tokens"][0, : PROMPTS[name]].tolist(), model.canvas_length
    with torch.no_grad():
        own = int((model.encode(torch.tensor([prompt])).hidden[0, -1] @ model.vocabulary.head.T).argmax())
    generation = Generation(max_steps=L, max_new_tokens=2 * L)
    sampler = Sampler(model, None, generation, strategy=f"confident:{GREEDY}")
    [free] = sampler.generate([Request(0, tokens=prompt)])
    assert free.tokens[0] == own
    [other] = sampler.generate([Request(0, tokens=prompt, banned=[own])])
    assert own not in other.tokens
    several = sampler.generate([Request(n, tokens=prompt[n:]) for n in range(3)])
    assert several[0].tokens == free.tokens
    for n in range(3):
        assert several[n].tokens == sampler.generate([Request(n, tokens=prompt[n:])])[0].tokens


def test_a_first_token_that_ends_the_response_is_committed_by_itself(case):
    model, truth, name = case
    prompt, L = truth["tokens"][0, : PROMPTS[name]].tolist(), model.canvas_length
    with torch.no_grad():
        own = int((model.encode(torch.tensor([prompt])).hidden[0, -1] @ model.vocabulary.head.T).argmax())
    result, filled = answered(model, prompt, f"confident:{GREEDY}", 2 * L, eos=own)
    assert (result.tokens, result.finish_reason, result.steps, filled) == ([own], "eos", [0], [])


def test_a_model_samples_as_its_own_code_does_without_an_option(case):
    sampler = Sampler(blockdiff.load(GOLDEN / case[2], device="cpu"))
    assert sampler.settings.is_seeded and sampler.diffusion.mask_id == MASK
    assert sampler.strategy.acceptance.threshold == 0.9 and sampler.strategy.greedy
    assert default_generation(sampler.model.config).max_new_tokens == 512
