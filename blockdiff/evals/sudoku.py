"""Sudoku: a text is right if it is the whole solved grid and keeps the givens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockdiff.data.sudoku import is_solved
from blockdiff.errors import DataError
from blockdiff.evals.run import Question


@dataclass(frozen=True)
class Sudoku:
    """Solved by a grid that fits the puzzle (4x4 or 9x9, see `blockdiff.data.sudoku`)."""

    name: str = "sudoku"
    is_open: bool = False

    def check(self, question: Question) -> None:
        """Raises DataError for a row whose response does not solve its prompt."""
        try:
            fits = is_solved(question.asked, question.reference)
        except DataError as error:
            raise DataError(f"{question.where}: {error}") from None
        if not fits:
            raise DataError(
                f"{question.where}: not a sudoku row; its response has to solve its prompt (blockdiff data sudoku)"
            )

    def is_solved(self, question: Question, text: str) -> bool:
        """Whether the text is a solution of the puzzle."""
        return is_solved(question.asked, text)

    def facts(self, question: Question, text: str) -> dict[str, Any]:
        """`givens`: how many digits the puzzle shows."""
        return {"givens": sum(cell.isdigit() for cell in question.asked)}


TASK = Sudoku()
