"""The choice of tiles: what is tried contains what stands in the table."""

from __future__ import annotations

import pytest

from benchmarks import tune
from blockdiff.kernels import tiles


@pytest.mark.quick
@pytest.mark.parametrize("problem", tune.problems(), ids=lambda problem: f"{problem.line}, {problem.up_to:g}")
def test_a_line_of_tiles_that_is_chosen_anew_stands_in_the_table_among_what_is_tried(problem: tune.Problem) -> None:
    tile = dict(tiles.table()[problem.line, 90, 2])[problem.up_to]
    assert tile in tune.candidates(tile, {}, (0.5, 1, 2))
