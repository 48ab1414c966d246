"""What every test run shares: on a bare GPU machine only files with GPU tests are collected."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` leave out files that hold no such test: they may import what that machine lacks."""
    if config.getoption("markexpr") != "gpu" or collection_path.suffix != ".py":
        return None
    return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None
