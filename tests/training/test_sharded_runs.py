"""Whole runs over several ranks whose model is spread: saved, gone on with otherwise, exported from any checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import blockdiff
from blockdiff.cli.main import app
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import CheckpointError, RunError
from blockdiff.recipes.sudoku import alphabet, make_splits
from blockdiff.training.export import consolidate
from tests.support import forked, sharded_runs
from tests.support.little_model import LITTLE, save_preset

FULL = "parallel={shard: full}"
BOTH = "parallel={shard: full, experts: 2}"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inputs")
    character_tokenizer(alphabet(4)).save_pretrained(folder / "tokenizer")
    save_preset(folder / "little.json", LITTLE)
    rows = make_splits(4, {"train": 24}, seed=0)["train"]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "seed": 1,
        "model": {"preset": str(folder / "little.json"), "tokenizer": str(folder / "tokenizer")},
        "data": {"train": str(folder / "rows.jsonl"), "cache": str(folder / "cache")},
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 1, "ema": 0.5},
        "train": {"steps": 4, "batch_size": 8, "log_every": 1, "save_every": 1, "keep": 9, "save_async": True},
    }


@pytest.fixture(scope="module")
def moved(inputs, tmp_path_factory) -> Path:
    """A run that goes on with other ranks and another mesh after step 2 and step 3; model/ is kept each time."""
    folder = tmp_path_factory.mktemp("moved")
    for steps, world, parallel in [(2, 2, FULL), (3, 4, BOTH), (4, 1, "parallel={shard: none}")]:
        overrides = [f"train.steps={steps}", parallel]
        forked.run_ranks(world, sharded_runs.train, folder, inputs, overrides, "run")
        shutil.copytree(folder / "run" / "model", folder / f"model-{steps}")
        shutil.copy(folder / "run" / "recipe.yaml", folder / f"recipe-{steps}.yaml")
    return folder


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def weights(directory: Path) -> torch.Tensor:
    model = blockdiff.load(directory, dtype="auto", device="cpu")
    return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])


def test_a_run_that_moves_between_meshes_learns_what_one_process_learns(inputs, moved, tmp_path):
    alone = blockdiff.train(inputs, ["train.save_async=false"], tmp_path / "alone")
    records = [record for record in blockdiff.Run(moved / "run").records if record["kind"] == "train"]
    expected = [record for record in alone.records if record["kind"] == "train"]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    for record, other in zip(records, expected, strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert record["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert torch.allclose(weights(moved / "model-4"), weights(alone.directory / "model"), atol=1e-4)


def test_a_checkpoint_in_the_background_is_there_a_few_steps_later_and_at_the_end(moved):
    there, completed = json.loads((moved / "run-0.json").read_text())
    assert there[0] == [1, 2, 3]
    assert completed == [4]
    assert sorted(path.name[-2:] for path in (moved / "run" / "checkpoints").iterdir()) == ["-1", "-2", "-3", "-4"]


@pytest.mark.parametrize("step", [2, 3, 4])
def test_any_checkpoint_of_a_run_is_exported_by_one_process_as_the_run_itself_does(moved, tmp_path, step):
    saved, out = moved / "run" / "checkpoints" / f"step-{step}", tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(saved), "--output", str(out)])
    assert done.exit_code == 0, done.output
    assert "a checkpoint, " in done.output
    assert contents(out) == contents(moved / f"model-{step}")


def test_a_checkpoint_is_exported_in_another_dtype_and_without_its_recipe_not_at_all(moved, tmp_path):
    saved = moved / "run" / "checkpoints" / "step-2"
    consolidate(saved, tmp_path / "narrow", dtype="bfloat16")
    assert torch.equal(weights(tmp_path / "narrow"), weights(moved / "model-2").bfloat16())
    with pytest.raises(CheckpointError, match=r"step-2: .*adapters"):
        consolidate(saved, tmp_path / "adapter", peft=True)
    lost = shutil.copytree(saved, tmp_path / "run" / "checkpoints" / "step-2")
    with pytest.raises(RunError, match=r"no recipe\.yaml"):
        consolidate(lost, tmp_path / "other")


def test_adapters_of_a_sharded_run_are_exported_alone_and_merged_and_train_on(inputs, moved, tmp_path):
    recipe = {
        **inputs,
        "model": {"path": str(moved / "model-4"), "dtype": "bfloat16"},
        "lora": {"parts": {"attention": 2, "experts": 2}},
        "optim": {"lr": 0.1, "schedule": "constant", "warmup_steps": 1},
    }
    forked.run_ranks(2, sharded_runs.train, tmp_path, recipe, ["train.steps=2", FULL], "run")
    saved = tmp_path / "run" / "checkpoints" / "step-2"
    assert any(path.name == "model-1.safetensors" for path in saved.iterdir())
    consolidate(saved, tmp_path / "adapter", peft=True)
    assert contents(tmp_path / "adapter") == contents(tmp_path / "run" / "adapter")
    blockdiff.checkpoint.export(tmp_path / "run", tmp_path / "merged")
    consolidate(saved, tmp_path / "early")
    assert contents(tmp_path / "early") == contents(tmp_path / "merged")
    assert not torch.equal(weights(tmp_path / "early"), weights(moved / "model-4"))
    recipe |= {"lora": {"path": str(tmp_path / "run" / "adapter")}, "optim": {**recipe["optim"], "lr": 1e-30}}
    forked.run_ranks(2, sharded_runs.train, tmp_path, recipe, ["train.steps=1", FULL], "on")
    before, after = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("run", "on"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
