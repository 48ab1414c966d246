"""Recipes from Python: mappings, rows in memory, parts of one's own."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from blockdiff.data.sources import Source
from blockdiff.diffusion.schedule import Linear, LogitNormalTime, Polynomial
from blockdiff.errors import RecipeError
from blockdiff.training.recipe_files import read_recipe, run_recipe
from tests.support.recipes import MINIMAL, Square, Step, refusal

pytestmark = pytest.mark.quick


ROWS = [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+2=", "response": "3"}]


def from_python(**sections: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"preset": "tiny"}, "data": {"train": ROWS}}
    tree["train"] = {"steps": 9, "batch_size": 2}
    return tree | {name: tree.get(name, {}) | section for name, section in sections.items()}


def test_a_mapping_is_read_like_a_file(recipes: Path) -> None:
    tree = yaml.safe_load(MINIMAL)
    tree["data"]["train"] = recipes / "train.jsonl"
    tree["objective"] = {"schedule": Polynomial(3.0), "ar_loss": None}
    recipe = read_recipe(tree, ["objective.schedule.polynomial.power=4", "optim.lr=1"])
    assert recipe == read_recipe(
        recipes / "base.yaml", ["objective.schedule.polynomial.power=4", "objective.ar_loss=none", "optim.lr=1"]
    )
    assert set(tree) == {"model", "data", "train", "objective"} and tree["objective"]["schedule"] == Polynomial(3.0)
    assert read_recipe({"extends": recipes / "base.yaml", "seed": 3}) == read_recipe(recipes / "base.yaml", ["seed=3"])


def test_a_recipe_that_was_read_is_read_again(recipes: Path) -> None:
    recipe = read_recipe(
        recipes / "base.yaml",
        ["objective.time.logit_normal.mean=1", "model.path=org/name", "data.columns.prompt=q"],
    )
    assert read_recipe(recipe) == recipe
    again = read_recipe(recipe, ["objective.time.logit_normal.std=2", "model.preset=tiny", "data.columns.response=a"])
    assert again.objective.time == LogitNormalTime(mean=1.0, std=2.0)
    assert (again.model.path, again.model.preset) == (None, "tiny")
    assert (again.data.columns.prompt, again.data.columns.response) == ("q", "a")


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), "dataset"])
def test_rows_in_memory_are_a_source(recipes: Path, rows: Any) -> None:
    if rows == "dataset":
        rows = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    recipe = read_recipe(from_python(data={"train": rows, "heldout": rows}, evaluation={"prompts": rows}))
    for sources in (recipe.data.train, recipe.data.heldout, recipe.evaluation.prompts):
        assert sources is not None and len(sources) == 1
        assert sources[0].path is None and sources[0].rows is rows
    again = read_recipe(recipe, ["seed=1"])
    assert again.data.train[0].rows is rows and again.seed == 1


def test_names_and_rows_make_a_mixture(recipes: Path) -> None:
    file = str(recipes / "train.jsonl")
    mixture = [file, {"path": file, "weight": 2}, {"rows": ROWS, "name": "sums"}, Source(path=file)]
    train = read_recipe(from_python(data={"train": mixture})).data.train
    assert [source.title for source in train] == ["train.jsonl", "train.jsonl", "sums", "train.jsonl"]
    assert [source.weight for source in train] == [1, 2, 1, 1] and train[2].rows is ROWS
    single = read_recipe(from_python(data={"train": {"path": file, "weight": 2}})).data.train
    assert single == [Source(path=file, weight=2)]


def test_a_recipe_with_rows_of_its_own_says_so_where_it_is_read_without_them(recipes: Path) -> None:
    (recipes / "recipe.yaml").write_text(read_recipe(from_python()).resolved())
    expected = "data.train: source 1: 2 rows were passed from Python; pass them from Python again"
    assert expected in refusal(recipes / "recipe.yaml")


WANTED = "objective.schedule: input should be an object with alpha(), noise(), derivative()"


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"train": {"steps": 0}}, "recipe: train.steps: input should be greater than 0 (got 0)"),
        ({"train": {"stepz": 0}}, "recipe: unknown key train.stepz; did you mean train.steps?"),
        ({"data": {"train": {"train": ROWS, "test": ROWS}}}, "recipe: data.train: a mapping with the keys train, test"),
        ({"data": {"train": iter(ROWS)}}, "recipe: data.train: source 1: rows is a list_iterator; pass a sequence"),
        ({"given": {"optimiser": "sgd"}}, "recipe: given.optimiser: pass a class or a function"),
        ({"given": {"objective": Step()}}, "recipe: given.objective: pass a class or a function"),
        ({"data": {"train": []}}, "recipe: data.train: should have at least one source (got [])"),
        ({"data": {"train": "none.jsonl"}}, "recipe: data.train: no file 'none.jsonl'"),
        ({"objective": {"schedule": Step()}}, f"recipe: {WANTED}"),
        ({"objective": {"schedule": Linear}}, f"recipe: {WANTED}"),
        ({"data": {"max_length": Step()}}, "recipe: data.max_length: input should be null, 'truncate'"),
    ],
)
def test_a_wrong_recipe_from_python_says_where_and_what(recipes: Path, sections: Any, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(from_python(**sections))
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        (None, (), "recipe: a NoneType; pass the path"),
        (["a.yaml"], (), "recipe: a list; pass the path"),
        ({}, "train.steps=4", "overrides: pass a list of texts, such as ['optim.lr=3e-4'] (got 'train.steps=4')"),
        ({}, {"train.steps": 4}, "overrides: pass a list of texts"),
        ({}, [4], "overrides: pass a list of texts"),
        ({}, ["extends=base.yaml"], "--set extends=base.yaml: extends is a key of recipe files"),
    ],
)
def test_what_is_no_recipe_and_no_override_is_refused(recipe: Any, overrides: Any, expected: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read_recipe(recipe, overrides)
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_a_run_takes_overrides_and_checks_parts_whatever_its_recipe_comes_as(recipes: Path) -> None:
    read_before = read_recipe(from_python())
    recipe = run_recipe(read_before, ["seed=7"], recipes / "run", objective={"schedule": Square(0.5), "weight": None})
    assert (recipe.seed, recipe.output, recipe.objective.schedule) == (7, str(recipes / "run"), Square(0.5))
    assert recipe.objective.weight == read_before.objective.weight
    with pytest.raises(RecipeError, match=f"^from Python: {re.escape(WANTED)}"):
        run_recipe(read_before, output=recipes / "run", objective={"schedule": Step()})


@pytest.mark.parametrize(
    ("section", "key", "part"),
    [
        ("objective", "schedule", Square(2.0)),
        ("given", "objective", Square),
        ("given", "optimiser", partial(Square, scale=3.0)),
    ],
)
def test_the_recipe_of_a_run_asks_for_what_python_gave_and_takes_it(
    recipes: Path, section: str, key: str, part: Any
) -> None:
    given = {section: {key: part}}
    made = run_recipe(recipes / "base.yaml", output=recipes / "run", **given)
    (recipes / "recipe.yaml").write_text(made.resolved())
    message = refusal(recipes / "recipe.yaml")
    assert f"recipe.yaml: {section}.{key}: " in message and "Square" in message
    assert "from Python again" in message
    assert run_recipe(recipes / "recipe.yaml", output=recipes / "run", **given) == made
