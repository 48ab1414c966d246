"""Sudoku, 4x4 or 9x9: a text is right if it is the whole solved grid and keeps the givens."""

from __future__ import annotations

from functools import partial
from typing import Any

from blockdiff.evals.questions import Question, Task, check_solved
from blockdiff.recipes import sudoku


def is_solved(question: Question, text: str) -> bool:
    """Return whether the text is a solution of the puzzle."""
    return sudoku.is_solved(question.last_message, text)


def facts(question: Question, text: str) -> dict[str, Any]:
    """Return `givens`, `is_valid` and `keeps_givens` of an answer.

    givens: the number of digits in the puzzle; is_valid: whether the text is a solved grid, perhaps of another puzzle;
    keeps_givens: whether it is a grid, valid or not, with the puzzle's digits in their cells.
    """
    puzzle = question.last_message
    return {
        "givens": sum(cell.isdigit() for cell in puzzle),
        "is_valid": sudoku.is_valid(puzzle, text),
        "keeps_givens": sudoku.keeps_givens(puzzle, text),
    }


TASK = Task("sudoku", is_solved, partial(check_solved, "sudoku", is_solved), facts, group="givens")
