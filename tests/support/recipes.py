"""A recipe that says as little as possible, and objects of one's own that recipes take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from blockdiff.canvas import Batch
from blockdiff.errors import RecipeError
from blockdiff.training.data import Data
from blockdiff.training.kinds.kind import kind_of
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.starting_model import StartingModel

MINIMAL_TREE = {"model": {"preset": "a"}, "data": {"train": "b"}, "train": {"steps": 1, "batch_size": 1}}
MINIMAL = """\
model: {preset: tiny}
data: {train: train.jsonl}
train: {steps: 10, batch_size: 4}
"""


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def start(recipe: Recipe) -> StartingModel:
    return kind_of(recipe).start(recipe)


def without_weights(recipe: Recipe, *parts: Any) -> Any:
    return kind_of(recipe).without_weights(recipe, *parts)


def read_data(recipe: Recipe, *parts: Any, **choices: Any) -> Data:
    return kind_of(recipe).read_data(recipe, *parts, **choices)


def largest_batch(recipe: Recipe, model: Any, tokens: int, rows: int, image_tokens: Sequence[int] = ()) -> Batch:
    return kind_of(recipe).largest_batch(recipe, start(recipe), model, tokens, rows, image_tokens)


def write(folder: Path, text: str) -> Path:
    path = folder / "other.yaml"
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Square:
    """A schedule of one's own."""

    scale: float = 1.0

    def alpha(self, t: Any) -> Any:
        return 1 - self.scale * t * t

    def noise(self, t: Any) -> Any:
        return self.scale * t * t

    def derivative(self, t: Any) -> Any:
        return -2 * self.scale * t


class Step:
    """No schedule, and nothing else that a recipe takes."""

    def __init__(self) -> None:
        self.at, self._hidden = [0.5], 3
