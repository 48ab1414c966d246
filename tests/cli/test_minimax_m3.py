"""MiniMax M3 through the commands: a tiny one from its preset to a merged export, and the released shape planned."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from blockdiff import checkpoint
from blockdiff.data.tokenizer import character_tokenizer
from tests.support.commands import refusal, run, works
from tests.support.seeing import png

RECIPE = """\
seed: 1
model: {{path: {here}/base, dtype: float32}}
data: {{train: {here}/puzzles/train.jsonl, cache: off, max_length: 64}}
lora: {{parts: {{attention: 4, mlp: 4, experts: 2}}}}
train: {{steps: 2, batch_size: 4, log_every: 1}}
"""


@pytest.mark.quick
def test_a_tiny_model_goes_from_its_preset_to_a_merged_export(tmp_path, monkeypatch):
    works("data", "sudoku", "--split", "train=8", "--output", tmp_path / "puzzles")
    said = works("init", "minimax-m3-tiny", tmp_path / "causal", "--tokenizer", tmp_path / "puzzles" / "tokenizer")
    assert "parameters, float32" in said
    works("init", "--from", tmp_path / "causal", "--canvas-length", "8", tmp_path / "base")
    assert "experts" in works("inspect", tmp_path / "base")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(here=tmp_path))
    planned = works("plan", tmp_path / "recipe.yaml", "--device", "cpu")
    assert re.search(r"adapters +\d", planned) and re.search(r"[\d,]+ of [\d,]+ numbers train", planned)
    works("train", tmp_path / "recipe.yaml", "--output", tmp_path / "run")
    asked = "--prompt", "1.34", "--max-new-tokens", "8", "--steps", "2", "--device", "cpu", "--dtype", "float32"
    of_run = works("sample", tmp_path / "run", *asked)
    works("export", tmp_path / "run", "--output", tmp_path / "merged")
    assert works("sample", tmp_path / "merged", *asked) == of_run
    assert works("sample", tmp_path / "base", "--adapter", tmp_path / "run" / "adapter", *asked) == of_run
    works("export", tmp_path / "run", "--output", tmp_path / "peft", "--peft")
    names = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    layer = "base_model.model.model.language_model.layers.1."
    assert {f"{layer}mlp.experts.lora_A.weight", f"{layer}mlp.shared_experts.gate_up_proj.lora_B.weight"} <= {*names}

    # its tokenizer has no token for images
    (tmp_path / "red.png").write_bytes(png())
    assert "the model takes no images" in refusal("sample", tmp_path / "base", "--image", tmp_path / "red.png", *asked)
    of_images = "train", tmp_path / "recipe.yaml", "--set", "model.images=frozen", "--output", tmp_path / "images"
    assert "model.images: the model takes no images" in refusal(*of_images)

    locked, mkdir = tmp_path / "locked", os.mkdir

    def make(path, *more, **named):
        if locked in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        mkdir(path, *more, **named)

    monkeypatch.setattr(os, "mkdir", make)
    locked.mkdir()
    to_write = ["init", "minimax-m3-tiny"], ["export", tmp_path / "run", "--output"]
    for words in (*to_write, ["export", tmp_path / "run", "--peft", "--output"]):
        said = refusal(*words, locked / "model")
        assert "(Permission denied" in said and "see to the permissions of the place, or choose another place" in said
    assert not list(locked.iterdir())


@pytest.mark.quick
def test_the_released_shape_is_inspected_and_planned_without_its_weights(tmp_path):
    config = checkpoint.preset_config("minimax-m3").to_dict()
    for name, length in (("causal", None), ("denoiser", 256)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config | {"canvas_length": length}))
        said = works("plan", directory, "--gpu-memory", "1000", "--tokens", "100000")
        weights, cache = re.findall(r"(?:bf16|tokens) +([\d.]+) [GM]iB", said)[:2]
        assert float(weights) == pytest.approx(2 * 426.3e9 / 2**30, rel=2e-3)
        assert float(cache) == pytest.approx(1000 * 2 * (60 * 2 * 4 * 128 + 57 * 128) / 2**20, rel=1e-2)
        said = run("inspect", directory).stdout  # which misses the files of the weights
        assert "60 layers (57 sparse: 16 blocks of 128 keys)" in said


@pytest.mark.quick
def test_a_training_of_the_released_layers_is_planned_over_every_mesh(tmp_path):
    """Two layers, one of them sparse with all 128 experts: what a rank holds is the whole divided by the ranks."""
    config = checkpoint.preset_config("minimax-m3").to_dict() | {"canvas_length": 256}
    text = config["text_config"] | {"num_hidden_layers": 2}
    text |= {name: config["text_config"][name][2:4] for name in ("layer_types", "mlp_layer_types")}
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"text_config": text}))
    character_tokenizer("ab").save_pretrained(tmp_path / "base")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(here=tmp_path) + "parallel: {shard: full}\n")
    held = {}
    for mesh in ("experts=8", "tensor=8"):
        changes = "--set", f"parallel.{mesh}", "--set", "model.dtype=bfloat16", "--set", "train.batch_size=8"
        said = works("plan", tmp_path / "recipe.yaml", "--gpus", "8", "--tokens", "2048", *changes)
        held[mesh] = {part: float(size) for part, size in re.findall(r"(weights|gathered layer) +([\d.]+) GiB", said)}
    numbers = float(re.search(r"of ([\d,]+) numbers", said)[1].replace(",", ""))  # type: ignore[index]
    for found in held.values():
        assert found["weights"] == pytest.approx(2 * numbers / 8 / 2**30, rel=0.05)
    # table and head are gathered whole over the ranks that share them, of tensor parallelism an eighth of everything
    assert held["experts=8"]["gathered layer"] > 2 * held["tensor=8"]["gathered layer"]
