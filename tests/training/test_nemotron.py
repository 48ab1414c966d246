"""Nemotron-Labs-Diffusion as released, without blockdiff.json: adapters of noisy tokens, resumed, sampled, written."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import blockdiff
from blockdiff import checkpoint
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.models.adapters import adapters_of
from blockdiff.recipes.sudoku import alphabet, make_splits
from blockdiff.sampling import Request, Sampler
from tests.support.commands import refusal, works


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A recipe over a checkpoint with random weights, as a mapping with its rows in memory."""
    folder, tokenizer = tmp_path_factory.mktemp("inputs"), character_tokenizer(alphabet(4))
    little = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    little |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 16, "block_size": 8, "mask_token_id": 15}
    (folder / "little.json").write_text(json.dumps({"model_type": "nemotron_labs_diffusion", **little}))
    checkpoint.save(
        checkpoint.init(str(folder / "little.json"), seed=3, tokenizer=tokenizer), folder / "base", tokenizer=tokenizer
    )
    rows = make_splits(4, {"train": 16, "test": 4}, seed=0)
    return {
        "seed": 1,
        "model": {"path": str(folder / "base")},
        "lora": {"parts": {"attention": 4}, "noisy_only": True},
        "data": {"train": rows["train"], "heldout": rows["test"], "cache": "off", "pack": 96},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 1},
        "train": {"steps": 4, "batch_size": 6, "log_every": 1, "eval_every": 2, "save_every": 2},
    }


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    return blockdiff.train(inputs, output=tmp_path_factory.mktemp("nemotron") / "run")


def test_it_trains_with_what_its_family_says_and_its_next_tokens_stay(inputs, trained):
    said = json.loads((trained.directory / "adapter" / "blockdiff.json").read_text())
    assert said["corruption"] == "mask" and said["objective"]["positions"] == "corrupted"
    assert "elbo" in str(said["objective"]["weight"]).lower() and "example" in str(said["objective"]["time"])
    heldout = [record for record in trained.records if record["kind"] == "heldout"]
    assert heldout[-1]["heldout_canvas_loss"] < heldout[0]["heldout_canvas_loss"]
    assert heldout[-1]["heldout_ar_loss"] == heldout[0]["heldout_ar_loss"]  # clean tokens are the base's
    assert all(module.low_rank.noisy_only for module in adapters_of(trained.model()).values())


def test_a_resumed_run_ends_where_an_undisturbed_one_does(inputs, trained, tmp_path):
    blockdiff.train(inputs, ["train.steps=2"], tmp_path / "run")
    again = blockdiff.train(inputs, output=tmp_path / "run", resume=True)
    one, other = (load_file(run.directory / "adapter" / "adapter_model.safetensors") for run in (trained, again))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_it_is_planned_sampled_and_written_as_an_adapter_beside_its_model(inputs, trained, tmp_path):
    planned = works("plan", trained.directory / "recipe.yaml", "--device", "cpu", "--tokens", 96)
    assert "adapters" in planned and "1,792 of 17,952 numbers train" in planned
    sampler = Sampler.from_pretrained(trained.directory, device="cpu")
    assert sampler.settings.is_seeded and sampler.strategy.greedy
    [result] = sampler.generate([Request(0, prompt="1", max_new_tokens=8)])
    assert result.tokens and result.forwards.denoise >= 1
    assert "--peft" in refusal("export", trained.directory, "--output", tmp_path / "merged")
    works("export", trained.directory, "--peft", "--output", tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.encoder.layers.") for name in names)
    model = checkpoint.load(inputs["model"]["path"], device="cpu")
    checkpoint.load_adapter(model, tmp_path / "adapter")
    assert all(module.low_rank.noisy_only for module in adapters_of(model).values())
