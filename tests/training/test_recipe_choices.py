"""Keys of a recipe that choose an object: their forms, and overrides into them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from blockdiff.data.canvas_choice import AllCanvases, FirstCanvases, LastCanvases, RandomCanvases
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, LogitNormalTime, Polynomial, UniformTime
from blockdiff.diffusion.weight import ElboWeight, NoWeight
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_choices import ArLoss, Drop, MaskToken, Refuse, Streaming, Truncate, described
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.schedule import Constant, CosineDecay, LinearDecay, StableDecay
from tests.support.recipes import MINIMAL_TREE, Square, Step, refusal, write

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("key", "spelt", "meant", "written"),
    [
        ("objective.schedule", "linear", Linear(), "linear"),
        ("objective.schedule", "{linear: {}}", Linear(), "linear"),
        ("objective.schedule", "polynomial", Polynomial(2.0), "polynomial"),
        ("objective.schedule", "{polynomial: {power: 3}}", Polynomial(3.0), "{polynomial: {power: 3.0}}"),
        (
            "objective.time",
            "{uniform: {low: 0.3, high: 0.8, per: example}}",
            UniformTime(0.3, 0.8, "example"),
            "{uniform: {low: 0.3, high: 0.8, per: example}}",
        ),
        (
            "objective.time",
            "{logit_normal: {mean: -1}}",
            LogitNormalTime(mean=-1.0),
            "{logit_normal: {low: 0.0001, high: 0.9999, per: canvas, mean: -1.0, std: 1.0}}",
        ),
        ("objective.corruption", "mask", MaskToken(), "mask"),
        ("objective.corruption", "{mask: {token: <mask>}}", MaskToken("<mask>"), "{mask: {token: <mask>}}"),
        ("objective.weight", "none", NoWeight(), "none"),
        ("objective.weight", "elbo", ElboWeight(), "elbo"),
        ("objective.weight", "{elbo: {limit: 5}}", ElboWeight(5.0), "{elbo: {limit: 5.0}}"),
        ("objective.ar_loss", "none", None, "none"),
        ("objective.ar_loss", "0.5", ArLoss(0.5), "0.5"),
        ("objective.ar_loss", "{weight: 0.5}", ArLoss(0.5), "0.5"),
        ("objective.ar_loss", "{scope: response}", ArLoss(1.0, "response"), "{weight: 1.0, scope: response}"),
        ("optim.schedule", "{cosine: {final_ratio: 0.1}}", CosineDecay(), "cosine"),
        ("optim.schedule", "{linear: {final_ratio: 0}}", LinearDecay(0.0), "{linear: {final_ratio: 0.0}}"),
        ("optim.schedule", "constant", Constant(), "constant"),
        (
            "optim.schedule",
            "{wsd: {decay_steps: 9}}",
            StableDecay(decay_steps=9),
            "{wsd: {final_ratio: 0.1, decay_steps: 9}}",
        ),
        ("data.canvases", "all", AllCanvases(), "all"),
        ("data.canvases", "3", RandomCanvases(3), "3"),
        ("data.canvases", "{random: 3}", RandomCanvases(3), "3"),
        ("data.canvases", "{first: 2}", FirstCanvases(2), "{first: 2}"),
        ("data.canvases", "{last: 2}", LastCanvases(2), "{last: 2}"),
        ("data.streaming", "false", None, "false"),
        ("data.streaming", "true", Streaming(), "true"),
        ("data.streaming", "{shuffle_buffer: 5}", Streaming(5), "{shuffle_buffer: 5}"),
        ("data.max_length", "null", None, "null"),
        ("data.max_length", "64", Truncate(64), "64"),
        ("data.max_length", "{truncate: 64}", Truncate(64), "64"),
        ("data.max_length", "{drop: 64}", Drop(64), "{drop: 64}"),
        ("data.max_length", "{refuse: 64}", Refuse(64), "{refuse: 64}"),
    ],
)
def test_a_choice_is_the_object_and_is_written_as_short_as_can_be(
    recipes: Path, key: str, spelt: str, meant: object, written: str
) -> None:
    section, _, name = key.partition(".")
    recipe = read_recipe(recipes / "base.yaml", [f"{key}={spelt}"])
    chosen = getattr(getattr(recipe, section), name)
    assert chosen == meant and type(chosen) is type(meant)
    assert yaml.safe_load(recipe.resolved())[section][name] == yaml.safe_load(written)
    (recipes / "again.yaml").write_text(recipe.resolved())
    assert read_recipe(recipes / "again.yaml") == recipe


def test_overrides_reach_into_choices(recipes: Path) -> None:
    path = write(recipes, "extends: base.yaml\nobjective: {time: {logit_normal: {mean: 1}}, ar_loss: 0.5}\n")
    recipe = read_recipe(
        path,
        [
            "objective.schedule.polynomial.power=3",
            "objective.time.logit_normal.std=2",
            "objective.ar_loss.scope=response",
        ],
    )
    assert recipe.objective.schedule == Polynomial(3.0)
    assert recipe.objective.time == LogitNormalTime(mean=1.0, std=2.0)
    assert recipe.objective.ar_loss == ArLoss(0.5, "response")


def test_another_choice_in_a_derived_recipe_replaces_the_whole_one(recipes: Path) -> None:
    path = write(
        recipes, "extends: base.yaml\noptim: {schedule: {cosine: {final_ratio: 0.5}}}\ndata: {max_length: 9}\n"
    )
    recipe = read_recipe(path, ["optim.schedule.wsd.decay_steps=3", "data.max_length.drop=7"])
    assert recipe.optim.schedule == StableDecay(0.1, 3) and recipe.data.max_length == Drop(7)
    assert read_recipe(path, ["optim.schedule=cosine"]).optim.schedule == CosineDecay(0.1)


@dataclass(frozen=True, slots=True)
class Holder:
    table: Any


def test_an_object_from_python_is_taken_as_it_is_and_recorded_by_class_and_values(recipes: Path) -> None:
    made = Recipe.model_validate({**MINIMAL_TREE, "objective": {"schedule": Square(2.0), "weight": ElboWeight(3.0)}})
    assert made.objective.schedule == Square(2.0) and made.objective.weight == ElboWeight(3.0)
    name = f"{Square.__module__}.Square"
    written = yaml.safe_load(made.resolved())["objective"]
    assert written["schedule"] == {name: {"scale": 2.0}} and written["weight"] == {"elbo": {"limit": 3.0}}
    assert described(Square(2.0)) == {name: {"scale": 2.0}} and described(ElboWeight(3.0)) == written["weight"]
    assert described(Step()) == {f"{Step.__module__}.Step": {"at": [0.5]}}
    assert described(partial(Square, scale=3.0)) == {"functools.partial": {"func": name, "args": [], "scale": 3.0}}
    assert described(Square) == name and described(Holder(torch.ones(2))) == {
        f"{__name__}.Holder": {"table": [1.0, 1.0]}
    }
    assert described(UniformTime()) == "uniform" and described(UniformCorruption(7)) == {
        "blockdiff.diffusion.corruption.UniformCorruption": {"vocab_size": 7}
    }
    (recipes / "train.jsonl").write_text("")
    (recipes / "b").write_text("")
    message = refusal(write(recipes, made.resolved().replace("path: b", "path: train.jsonl")))
    assert f"objective.schedule: {name} was passed from Python; pass it from Python again" in message
