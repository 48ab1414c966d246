"""The run that tests of several commands look at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

RECIPE = """\
seed: 1
model: {preset: little.json, tokenizer: puzzles/tokenizer}
data: {train: puzzles/train.jsonl, heldout: puzzles/test.jsonl}
optim: {lr: 1.0e-3, warmup_steps: 1}
train: {steps: 3, batch_size: 6, micro_batch_size: 4, log_every: 1, eval_every: 2, save_every: 2}
"""


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with puzzles, a recipe, and the run trained from it."""
    # These need packages that a bare GPU machine lacks, where these tests are looked through for those of a GPU.
    from blockdiff.plots.curves import draw_curves
    from tests.support.commands import works
    from tests.support.little_model import LITTLE, save_preset

    folder = tmp_path_factory.mktemp("workshop")
    works("data", "sudoku", "--split", "train=24", "--split", "test=6", "--output", folder / "puzzles")
    save_preset(folder / "little.json", LITTLE)
    (folder / "recipe.yaml").write_text(RECIPE.replace("little.json", str(folder / "little.json")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockdiff.training.export.draw_curves", draw_curves)
        works("train", folder / "recipe.yaml", "--output", folder / "run")
    for name in ("broken", "bare"):
        shutil.copytree(folder / "run" / "model", folder / name)
    weights = (folder / "broken" / "model.safetensors").read_bytes()
    (folder / "broken" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for file in (folder / "bare").glob("tokenizer*"):
        file.unlink()
    return folder


@pytest.fixture
def prompt(workshop: Path) -> str:
    """A puzzle as it is written."""
    row = json.loads((workshop / "puzzles" / "test.jsonl").read_text().splitlines()[0])
    return str(row["prompt"])
