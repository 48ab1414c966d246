"""The preset of a model so small that a test can train it from a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.tiny_run import PRESET

LITTLE: dict[str, Any] = PRESET


def save_preset(path: Path, preset: dict[str, Any]) -> None:
    """Write a preset file."""
    path.write_text(json.dumps(preset), encoding="utf-8")
