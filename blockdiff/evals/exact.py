"""Exact match: the text is the row's response, white space around it apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from blockdiff.evals.run import Question


@dataclass(frozen=True)
class Exact:
    """Solved by the reference alone; any row will do."""

    name: str = "exact"
    is_open: bool = False

    def check(self, question: Question) -> None:
        """Every row is a question with one right text."""

    def is_solved(self, question: Question, text: str) -> bool:
        """Whether the text equals the reference after stripping both."""
        return text.strip() == question.reference.strip()

    def facts(self, question: Question, text: str) -> dict[str, Any]:
        """Nothing more to record."""
        return {}


TASK = Exact()
