"""The measurements of controls: what they ask, and that they measure at any size."""

from __future__ import annotations

import pytest
import torch

from benchmarks.constraints import made_up_texts, measure
from benchmarks.pins import all_grids, template_of, with_two_solutions
from blockdiff.data import sudoku
from blockdiff.sampling.template import parse_template

pytestmark = pytest.mark.quick


def test_a_constraint_is_measured_at_any_size():
    found = measure(vocab=900, hidden=8, length=24, rows=2, repeats=1, device=torch.device("cpu"))
    assert found["states"] > 20 and found["classes"] < 100 and set(found["peak bytes by rows"]) == {1, 2}
    assert all(milliseconds > 0 for milliseconds in found["milliseconds"].values())
    texts = made_up_texts(900)
    assert len(set(texts)) == 899 and texts[:2] == [b"", b""]


def test_puzzles_with_two_solutions_have_exactly_two():
    assert len(all_grids()) == 288
    puzzle = "14.332....3.431."
    ((fewer, solutions),) = with_two_solutions([puzzle])
    given = [sum(cell.isdigit() for cell in cells) for cells in (fewer, puzzle)]
    assert given[0] == given[1] - 1 and len(solutions) == 2
    assert sum(sudoku.keeps_givens(fewer, grid) for grid in all_grids()) == 2
    assert parse_template(template_of("1..2" * 4))[:3] == ["1", 1, 1]
