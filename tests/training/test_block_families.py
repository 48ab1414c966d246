"""A model of blocks with experts, as released, without blockdiff.json: adapted, resumed, planned, sampled, exported."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

import blockdiff
from blockdiff import checkpoint
from blockdiff.checkpoint import export
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.models.stored import stored_layers
from blockdiff.recipes.sudoku import alphabet, make_splits
from blockdiff.sampling import Sampler
from tests.support.commands import works

LITTLE = {
    "model_type": "sdar_moe",
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "vocab_size": 16,
    "block_size": 4,
    "mask_token_id": 15,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A recipe that adapts a checkpoint with random weights, as a mapping with its rows in memory."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = character_tokenizer(alphabet(4))
    (folder / "little.json").write_text(json.dumps(LITTLE))
    model = checkpoint.init(str(folder / "little.json"), seed=3, tokenizer=tokenizer)
    checkpoint.save(model, folder / "base", tokenizer=tokenizer)
    assert not (folder / "base" / "blockdiff.json").exists()
    rows = make_splits(4, {"train": 16, "test": 4}, seed=0)
    return {
        "seed": 1,
        "model": {"path": str(folder / "base")},
        "lora": {"parts": {"attention": 4, "experts": 2}},
        "data": {"train": rows["train"], "heldout": rows["test"], "cache": "off", "pack": 96},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_steps": 1, "ema": 0.9},
        "train": {"steps": 4, "batch_size": 6, "log_every": 1, "eval_every": 2, "save_every": 2},
    }


@pytest.fixture(scope="module")
def trained(inputs, tmp_path_factory):
    return blockdiff.train(inputs, output=tmp_path_factory.mktemp("blocks") / "run")


def test_it_trains_with_what_its_family_says(inputs, trained):
    said = json.loads((trained.directory / "adapter" / "blockdiff.json").read_text())
    assert said["corruption"] == "mask" and said["mask_id"] == checkpoint.read_config(inputs["model"]["path"]).mask
    assert "elbo" in str(said["objective"]["weight"]).lower() and said["objective"]["positions"] == "corrupted"
    assert all("ar_loss" not in record for record in trained.records)
    heldout = [record["heldout_canvas_loss"] for record in trained.records if record["kind"] == "heldout"]
    assert len(heldout) >= 2 and heldout[-1] < heldout[0]


def test_a_resumed_run_ends_where_an_undisturbed_one_does(inputs, trained, tmp_path):
    blockdiff.train(inputs, ["train.steps=2"], tmp_path / "run")
    again = blockdiff.train(inputs, output=tmp_path / "run", resume=True)
    one, other = (load_file(run.directory / "adapter" / "adapter_model.safetensors") for run in (trained, again))
    assert any("experts" in name for name in one)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_its_memory_is_planned_and_its_answers_sampled(trained):
    assert re.search("weights", works("plan", trained.directory, "--device", "cpu"))
    sampler = Sampler.from_pretrained(trained.directory, device="cpu")
    assert sampler.settings.canvas_length == 4 and sampler.generation.max_new_tokens >= 16
    prompts = ["4.2332.423..1..2=", "14.332....3.431.="]
    one, other = sampler.generate(prompts, seed=0), sampler.generate(prompts[:1], seed=0)
    assert one[0].tokens == other[0].tokens and all(step <= 4 for step in one[0].steps)


@pytest.mark.parametrize("quantize", [None, "fp8"])
def test_it_is_exported_merged_and_computes_what_the_adapter_does(trained, tmp_path, quantize):
    out = export(trained.directory, tmp_path / "out", quantize=quantize)
    model, adapted = checkpoint.load(out, dtype="float32"), checkpoint.load(trained.directory, dtype="float32")
    assert bool(stored_layers(model)) == (quantize == "fp8")
    tokens = torch.arange(12)[None] % 7
    with torch.no_grad():
        found, expected = (each.denoise(tokens[:, 8:], each.encode(tokens[:, :8])) for each in (model, adapted))
    tolerance = 0.3 if quantize else 2e-2  # weights of 3 bits of fraction, or of bf16
    assert (found - expected).norm() < tolerance * expected.norm()
    names = json.loads((out / "config.json").read_text())
    assert names["architectures"] == ["SDARMoeForCausalLM"] and names["block_size"] == 4
