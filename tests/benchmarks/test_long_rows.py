"""The memory of a training step grows with the tokens of a row and not with their square."""

from __future__ import annotations

import pytest

from benchmarks.long_rows import planned
from blockdiff.kernels.span_attention import native, pieces


@pytest.mark.parametrize("one_sweep", [False, True])
def test_a_row_four_times_as_long_takes_four_times_the_memory(one_sweep, monkeypatch):
    """With limits scaled down to rows that a test can plan: masks would take more and more."""
    for module, name, value in ((native, "LONG_KEYS", 64), (native, "LONG_MASK", 1 << 12), (pieces, "MASK", 1 << 14)):
        monkeypatch.setattr(module, name, value)
    short, long = (planned("torch", True, one_sweep, tokens) for tokens in (320, 1280))
    assert long <= 4.2 * short
    monkeypatch.setattr(native, "LONG_KEYS", 1 << 20)
    assert planned("torch", True, one_sweep, 2560) > 2.4 * long
