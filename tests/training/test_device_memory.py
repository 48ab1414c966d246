"""A run that cannot fit is refused in one line before a weight is read, and one that clearly fits is not planned."""

from __future__ import annotations

import re

import pytest

import blockdiff
from blockdiff import checkpoint, memory
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import BlockdiffError
from blockdiff.recipes.sudoku import alphabet
from blockdiff.training.plan import fitting
from blockdiff.training.plan import training as plans
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_files import read_recipe
from tests.support.little_model import LITTLE, save_preset
from tests.support.recipes import largest_batch, start, without_weights

ROWS = [{"prompt": "12", "response": str(number) * 7} for number in range(1, 10)]


@pytest.fixture
def tree(tmp_path):
    character_tokenizer(alphabet(9)).save_pretrained(tmp_path / "tokenizer")
    save_preset(tmp_path / "little.json", LITTLE)
    return {
        "model": {"preset": str(tmp_path / "little.json"), "tokenizer": str(tmp_path / "tokenizer")},
        "data": {"train": ROWS, "cache": "off"},
        "train": {"steps": 1, "batch_size": 8},
    }


def kept(recipe: Recipe) -> int:
    plan = plans.plan_training(recipe, device="cpu", tokens=12)
    return sum(plan.parts[name] for name in ("weights", "gradients", "optimiser"))


@pytest.mark.parametrize("share", [0.5, 1.5])  # of what is kept: weights do not fit, or activations do not
def test_a_training_that_cannot_fit_is_refused_before_weights_are_drawn(tree, tmp_path, monkeypatch, share):
    available = int(kept(read_recipe(tree)) * share)
    for name in ("available_bytes", "total_bytes"):
        monkeypatch.setattr(memory, name, lambda device: available)
    drawn = []
    monkeypatch.setattr(checkpoint, "draw_weights", lambda *_, **__: drawn.append(1))
    tried = ["train.activation_checkpointing=true", "train.micro_batch_size=1"] if share < 1 else []
    with pytest.raises(BlockdiffError) as error:
        blockdiff.train(tree, tried, tmp_path / "run")
    message = str(error.value)
    assert re.match(r"cpu: needs .* \(weights .*optimiser .*\), it has .*; ", message) and "\n" not in message
    assert not drawn and ("activations" in message) == (share > 1)
    assert share < 1 or "--set train.micro_batch_size=1" in message


@pytest.mark.parametrize("override", ["seed=0", "data.canvases=all", "train.activation_checkpointing=true"])
def test_what_is_taken_to_be_plenty_is_more_than_a_step_holds(tree, override):
    recipe = read_recipe(tree, [override])
    base = start(recipe)
    objective = without_weights(recipe, base, "torch")
    batch = largest_batch(recipe, objective.model, 30, 8)
    plan = plans.plan_training(recipe, device="cpu", batch=batch, base=base)
    assert fitting.step_bound(objective, 8, 30) > 2 * (plan.total - kept(recipe))


def test_a_training_that_clearly_fits_is_not_planned(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "plan_training", None)
    blockdiff.train(tree, output=tmp_path / "run")
