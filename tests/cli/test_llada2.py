"""LLaDA2 through the commands: a tiny one from its preset to answers of a merged export, and its released shape."""

from __future__ import annotations

import json
import re

import pytest

from blockdiff import checkpoint
from tests.support.commands import refusal, works

RECIPE = """\
seed: 1
model: {{path: {here}/base, dtype: float32}}
data: {{train: {here}/puzzles/train.jsonl, cache: off, max_length: 64, canvases: all, pack: 64}}
lora: {{parts: {{attention: 4, mlp: 4, experts: 2}}}}
train: {{steps: 2, batch_size: 4, log_every: 1}}
"""


@pytest.mark.quick
def test_a_tiny_model_goes_from_its_preset_to_answers_of_a_merged_export(tmp_path):
    works("data", "sudoku", "--split", "train=8", "--output", tmp_path / "puzzles")
    works("init", "sudoku4-llada2", tmp_path / "base", "--tokenizer", tmp_path / "puzzles" / "tokenizer")
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(here=tmp_path))
    said = works("train", tmp_path / "recipe.yaml", "--output", tmp_path / "run")
    line = next(line for line in said.splitlines() if line.startswith("objective"))
    assert "corruption mask" in line and "'low': 0.3, 'high': 0.8" in line and "normalisation corrupted" in line
    asked = "--prompt", "1.34", "--max-new-tokens", "8", "--device", "cpu", "--dtype", "float32", "--regex", "[1-4]{5}"
    of_run = works("sample", tmp_path / "run", *asked)
    assert re.fullmatch(r"[1-4]{5}\s*", of_run)
    works("export", tmp_path / "run", "--output", tmp_path / "merged")
    works("export", tmp_path / "run", "--output", tmp_path / "peft", "--peft")
    assert works("sample", tmp_path / "merged", *asked) == of_run
    assert works("sample", tmp_path / "base", "--adapter", tmp_path / "peft", *asked) == of_run
    edits = "joint_threshold:threshold=0.5,edit_threshold=0.3,greedy=true"
    assert re.fullmatch(r"[1-4]{5}\s*", works("sample", tmp_path / "merged", *asked, "--strategy", edits))
    assert re.fullmatch(r"[1-4]{5}\s*", works("sample", tmp_path / "merged", *asked, "--quantize", "fp8"))
    said, config = (json.loads((tmp_path / "merged" / f"{name}.json").read_text()) for name in ("blockdiff", "config"))
    assert said["corruption"] == "mask" and said["mask_id"] == config["mask_token_id"]
    assert "next" in refusal("sample", tmp_path / "merged", *asked[:2], "--strategy", "next_token", code=2)


@pytest.mark.quick
def test_the_released_shape_is_planned_without_its_weights(tmp_path):
    config = checkpoint.preset_config("llada2.0-mini").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = float(re.findall(r"bf16 +([\d.]+) GiB", works("plan", tmp_path, "--gpu-memory", "80"))[0])
    assert weights == pytest.approx(2 * 16.256e9 / 2**30, rel=2e-3)
