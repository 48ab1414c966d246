"""The measurement of families: transformers' layers in the released loop answer as the sampler does."""

from __future__ import annotations

import pytest

from benchmarks.families import FAMILIES, Size, measure

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", FAMILIES)
def test_both_sides_have_equal_tokens_and_each_line_a_time(name: str) -> None:
    lines = measure(name, Size(hidden=64, layers=2, vocabulary=512, prompt=16, answer=32), rows=2, repeats=1)
    assert [line.suite for line in lines] == ["answers of 32", "denoising step"]
    assert all(line.agreement.is_met and line.speedup is not None for line in lines)
