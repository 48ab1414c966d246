"""Fixtures for the tests of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe `base.yaml` beside its data, and a current directory elsewhere."""
    from tests.support.recipes import MINIMAL  # which needs packages that a bare GPU machine lacks

    (tmp_path / "recipes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "recipes" / "base.yaml").write_text(MINIMAL)
    (tmp_path / "recipes" / "train.jsonl").write_text("")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "recipes"
