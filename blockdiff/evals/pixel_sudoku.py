"""Sudoku in an image: a text is right if its part after `=` solves the puzzle before the `=` of the row's response."""

from __future__ import annotations

from typing import Any

from blockdiff.errors import DataError
from blockdiff.evals.questions import Question, Task
from blockdiff.recipes import pixel_sudoku


def check(question: Question) -> None:
    """Raise DataError if the row's response is not a puzzle, `=`, and its solution."""
    try:
        fits = pixel_sudoku.is_solved(_puzzle(question), question.reference)
    except DataError:
        fits = False
    if not fits:
        raise DataError(
            f"{question.where}: not a row of a pictured sudoku; its response has to be the puzzle, = and its solution "
            "(blockdiff data pixel-sudoku)"
        )


def is_solved(question: Question, text: str) -> bool:
    """Return whether the text ends with a solution of the puzzle."""
    return pixel_sudoku.is_solved(_puzzle(question), text)


def facts(question: Question, text: str) -> dict[str, Any]:
    """Return `givens`, the number of digits in the image, and `is_read`, whether the text begins with the puzzle."""
    puzzle = _puzzle(question)
    return {
        "givens": sum(cell.isdigit() for cell in puzzle),
        "is_read": pixel_sudoku.is_read(puzzle, text),
    }


def _puzzle(question: Question) -> str:
    return question.reference.partition("=")[0]


TASK = Task("pixel_sudoku", is_solved, check, facts, group="givens")
