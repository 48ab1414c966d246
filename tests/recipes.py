"""A recipe that says as little as possible, and objects of one's own that recipes take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from blockdiff.errors import RecipeError
from blockdiff.training.recipe_files import read_recipe

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
