"""The benchmark beside NeMo AutoModel where NeMo is not installed."""

from __future__ import annotations

import importlib.util

import pytest

from benchmarks import nemo

pytestmark = pytest.mark.quick


def test_without_nemo_it_says_so_and_measures_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert nemo.main(["--output", str(tmp_path / "x.json")]) == 0
    assert "nemo_automodel is not installed" in capsys.readouterr().out and not list(tmp_path.iterdir())
