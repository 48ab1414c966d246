"""The lines of the benchmark of block-sparse attention: times only where all agree, and why a peer has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import block_sparse

SMALL = ["--tokens", "300", "--heads", "2", "--dim", "16", "--block", "16", "--topk", "3", "--device", "cpu"]

pytestmark = pytest.mark.quick


def without_flex(*_: Any) -> Any:
    raise RuntimeError("no compiler here\nand more")


def test_a_peer_that_cannot_run_says_why_and_the_others_are_timed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(block_sparse, "flex", without_flex)
    block_sparse.main([*SMALL, "--output", str(tmp_path / "found.json")])
    said = capsys.readouterr().out
    assert "dense" in said and said.strip().endswith("FlexAttention: RuntimeError: no compiler here")
    assert said.strip() in (tmp_path / "found.md").read_text()


def test_there_are_no_times_where_ours_differs(monkeypatch, capsys):
    monkeypatch.setattr(block_sparse, "flex", without_flex)
    monkeypatch.setattr(block_sparse, "dense", lambda drawn: torch.zeros_like(drawn[0]))
    block_sparse.main(SMALL)
    said = capsys.readouterr().out
    assert "DISAGREES: dense" in said and "times" not in said
