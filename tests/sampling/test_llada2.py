"""Answers of LLaDA2.x against those of its own code: token for token, step for step and place for place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import blockdiff
from blockdiff.checkpoint.opening import model_files
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.sampling import Generation, Recorder, Request, Sampler
from blockdiff.sampling.prepare import sampling_settings
from blockdiff.sampling.strategies import as_strategy
from blockdiff.sampling.trace import Trace

pytestmark = pytest.mark.quick
GOLDEN = Path(__file__).parents[1] / "data/families/llada2/mini"
L, MASK, PROMPT, NEW = 8, 120, 13, 40
# The strategies of 2.0 and 2.1 and the answers that they gave; those with an eos end at it.
CASES = {
    "v20": "confident:threshold=0.65,greedy=true,confidence=0",
    "v20_static": "quota:greedy=true,confidence=0",
    "v20_pairs": "confident:threshold=0.65,least=2,greedy=true,confidence=0",
    "v20_ends": "confident:threshold=0.65,greedy=true,confidence=0",
    "v21": "joint_threshold:threshold=0.8,edit_threshold=0.9,greedy=true",
    "v21_speed": "joint_threshold:threshold=0.6,edit_threshold=0.4,greedy=true",
    "v21_ends": "joint_threshold:threshold=0.8,edit_threshold=0.9,greedy=true",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("llada2")
    shutil.copy(GOLDEN / "model.safetensors", directory)
    values = json.loads((GOLDEN / "config.json").read_text()) | {"canvas_length": L, "mask_token_id": MASK}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.fixture(scope="module", params=["float64", "float32"])
def model(request, checkpoint) -> BlockDiffusionModel:
    kernels = "torch" if request.param == "float64" else "auto"
    return blockdiff.load(checkpoint, dtype=request.param, device="cpu", kernels=kernels)


@pytest.fixture(scope="module")
def truth() -> dict[str, Tensor]:
    return load_file(GOLDEN / "outputs_fp64.safetensors")


def changes(trace: Trace) -> list[tuple[int, list[int]]]:
    """For each step, the column of its block and the places of the block that it changed."""
    found = []
    for number, canvas in enumerate(trace.canvases):
        steps, tail = trace.steps_of(number), 0 if number else PROMPT % L
        for step, after in zip(steps, [*(each.tokens for each in steps[1:]), canvas.tokens], strict=True):
            places = [tail + n for n, (a, b) in enumerate(zip(step.tokens, after, strict=True)) if a != b]
            found.append((PROMPT // L * L + number * L, places))
    return found


@pytest.mark.parametrize("name", CASES)
def test_answers_are_those_of_its_own_code_in_every_step_and_place(model, truth, name):
    eos = int(truth.get(f"{name}_eos", torch.tensor(-1)))
    settings = {"eos_token_id": eos, "max_new_tokens": NEW, "max_denoising_steps": L}
    generation = Generation.from_dict(settings | ({} if eos >= 0 else {"eos_token_id": 127}))
    sampler = Sampler(model, None, generation, strategy=as_strategy(CASES[name], generation))
    prompt, recorder = truth["tokens"][0, :PROMPT].tolist(), Recorder(ids=["asked"])
    others = [Request(n, tokens=prompt[:n], max_new_tokens=8) for n in (3, 8)]
    asked = Request("asked", tokens=prompt)
    result = sampler.generate([others[0], asked, others[1]], on_step=recorder.step, on_canvas=recorder.canvas)[1]
    answer = truth[f"{name}_answer"][0].tolist()
    assert result.tokens[: len(answer)] == answer
    found = changes(recorder.traces[0])
    assert len(found) == int(truth[f"{name}_calls"])
    if eos >= 0:
        assert result.tokens == answer and result.finish_reason == "eos"
    else:
        places = [[n for n in row if n >= 0] for row in truth[f"{name}_changed"].tolist()]
        assert found == list(zip(truth[f"{name}_start"].tolist(), places, strict=True))


def test_files_without_settings_are_sampled_by_the_rule_of_2_0(model, checkpoint):
    settings = sampling_settings(model, generation=model_files(checkpoint).generation())
    assert (settings.diffusion.corruption, settings.diffusion.mask_id) == ("mask", MASK)
    assert settings.generation.max_new_tokens == 512
    assert settings.strategy == as_strategy("confident:threshold=0.95,greedy=true,confidence=0", settings.generation)


def test_a_file_beside_the_weights_says_that_they_are_of_2_1(checkpoint, tmp_path):
    edits = "joint_threshold:threshold=0.8,greedy=true"
    for file in checkpoint.iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / "blockdiff.json").write_text(json.dumps({"strategy": edits}))
    model = blockdiff.load(tmp_path, device="cpu")
    settings = sampling_settings(model)
    assert settings.strategy == as_strategy(edits, settings.generation)
    assert settings.diffusion.mask_id == MASK and settings.diffusion.objective["positions"] == "corrupted"
    assert sampling_settings(model, strategy="quota").strategy == as_strategy("quota", settings.generation)
