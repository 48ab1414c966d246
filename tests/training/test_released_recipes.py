"""The recipes of the released model, from its shape alone: their plans, and a step whose tensors have no memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from typer.testing import CliRunner

from blockdiff import checkpoint
from blockdiff.cli.main import app
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import CheckpointError
from blockdiff.models.adapters import is_adapter
from blockdiff.recipes.sudoku import alphabet
from blockdiff.training.kinds.kind import kind_of
from blockdiff.training.plan.live_bytes import LiveBytes
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.recomputation import checkpoint_activations
from tests.support.recipes import largest_batch, start, without_weights

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "recipes" / "README.md").read_text()
PLANS = re.findall(r"```\n\$ blockdiff (plan recipes/(?:diffusiongemma_26b|drafter)_\S+ .*)\n((?:.*\n)*?)```\n", README)
ADAPTED = re.findall(  # the table of docs/families.md: recipe, GB of the GPU, GiB of the weights and in all
    r"\| `(\w+_lora\.yaml)` \| (\d+) GB \| ([\d.]+) GiB \| ([\d.]+) GiB \|", (ROOT / "docs/families.md").read_text()
)
PART = re.compile(r"^  (\w[\w ]*?) +([\d.,]+) (GiB|MiB)")


def shape(directory: Path, **text: Any) -> Path:
    """A checkpoint directory of the released shape that has no weights."""
    values = checkpoint.preset_config("diffusiongemma-26b-a4b").to_dict()
    if text:
        values["text_config"].pop("per_layer_config", None)
        values["text_config"] |= {"global_head_dim": 512, "num_global_key_value_heads": 2, **text}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values))
    character_tokenizer(alphabet(4)).save_pretrained(directory)
    return directory


def parts_of(text: str) -> dict[str, float]:
    """GiB by the name of a part, as a plan prints them."""
    found = [PART.match(line) for line in text.splitlines()]
    return {m[1]: float(m[2].replace(",", "")) / (1024 if m[3] == "MiB" else 1) for m in found if m}


def offline(*args: Any, **named: Any) -> str:
    """The Hub's function where there is no network."""
    raise OSError("no network")


def test_the_recipes_are_planned_as_their_page_says_without_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    assert len(PLANS) == len(list((ROOT / "recipes").glob("diffusiongemma_26b_*.yaml"))) + 1 == 9
    for command, printed in PLANS:
        with pytest.warns(
            UserWarning, match=r"not available here; the plan uses the preset (diffusiongemma-26b-a4b|qwen3-8b) "
        ):
            done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 0, done.output
        now, then = parts_of(done.stdout), parts_of(printed)
        assert now.keys() == then.keys() and "in all" in now
        # kernels may come to hold a little more or less; what is kept is exact
        assert now["in all"] == pytest.approx(then["in all"], rel=0.1)
        for name in {"weights", "masters", "adapters", "gradients", "optimiser"} & now.keys():
            assert now[name] == pytest.approx(then[name], abs=0.06)
        first, *_, last = done.stdout.splitlines()
        assert printed.startswith(f"{first}\n") and f"{last}\n" in printed  # the rows; how many numbers train


@pytest.mark.parametrize(("name", "gpu", "weights", "in_all"), ADAPTED)
def test_the_recipes_of_other_families_are_planned_as_their_page_says_and_fit_their_gpu(
    name: str, gpu: str, weights: str, in_all: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(ADAPTED) == 3
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    command = ["plan", str(ROOT / "recipes" / name), "--gpus", "1", "--gpu-memory", gpu]
    with pytest.warns(UserWarning, match="not available here; the plan uses the preset"):
        done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "fits" in done.stdout, done.output
    parts = parts_of(done.stdout)
    assert parts["weights"] == pytest.approx(float(weights), abs=0.06)
    assert parts["in all"] == pytest.approx(float(in_all), rel=0.1)


@pytest.mark.parametrize("name", ["quickstart", "sudoku4_causal", "word_problems"])
def test_a_recipe_from_scratch_is_planned_before_its_data_are_made(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(
        app, ["plan", str(ROOT / "recipes" / f"{name}.yaml"), "--tokens", "48", "--device", "cpu"]
    )
    assert done.exit_code == 0 and "in all" in done.stdout, done.output


@pytest.mark.parametrize("change", ["model.path=google/another", "lora.tokens=['<plan>']", "objective.corruption=mask"])
def test_what_needs_more_than_a_released_shape_is_not_planned_without_the_network(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    recipe = read_recipe(ROOT / "recipes" / "diffusiongemma_26b_lora.yaml", [change], needs_data=False)
    with pytest.raises(CheckpointError, match="the Hub"):
        kind_of(recipe).planned_start(recipe)


def test_a_checkpointed_lora_step_at_the_released_shapes_reaches_every_adapter(tmp_path: Path) -> None:
    """Of two layers with 16 of the 128 experts: each is as large as those of the release."""
    two = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_experts": 16}
    path = ROOT / "recipes" / "diffusiongemma_26b_lora_experts.yaml"
    recipe = read_recipe(path, [f"model.path={shape(tmp_path / 'two', **two)}"], needs_data=False)
    with pytest.warns(UserWarning, match="model.tokenizer: the tokenizer has 9 tokens, the model 262,144"):
        base = start(recipe)
    objective = without_weights(recipe, base, "torch", torch.bfloat16)
    model = objective.model.train()
    checkpoint_activations(model)
    batch = largest_batch(recipe, model, 1024, 1)
    counted = LiveBytes()
    counted.fill(objective)
    with counted:
        losses = objective(batch)
        (losses["canvas"] + losses["ar"]).backward()
    parameters = dict(model.named_parameters())
    assert all((x.grad is not None) == is_adapter(name) for name, x in parameters.items())
    reached = [(x, x.grad) for x in parameters.values() if x.grad is not None]
    assert all(grad.shape == x.shape and grad.dtype == torch.float32 for x, grad in reached)
    layer = "layers.1.experts."
    assert parameters[layer + "gate_up_proj"].shape == (16, 2 * 704, 2816)
    assert parameters[layer + "gate_up_lora_A"].shape == (16, 8, 2816)
    assert parameters[layer + "down_lora_B"].shape == (16, 2816, 8)
    with torch.device("meta"):
        theirs = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig.from_pretrained(tmp_path / "two")).state_dict()
    names = base.config.names
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if not is_adapter(name):
            assert theirs[names.to_hub(name)].shape == x.shape, name
