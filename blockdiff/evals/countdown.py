"""Countdown: a text is right if it is any expression that makes the target of all the numbers, each used once."""

from __future__ import annotations

from typing import Any

from blockdiff.errors import DataError
from blockdiff.evals.questions import Question, Task
from blockdiff.recipes import countdown


def check(question: Question) -> None:
    """Raises DataError for a row whose response does not solve its prompt."""
    try:
        fits = is_solved(question, question.reference)
    except DataError as error:
        raise DataError(f"{question.where}: {error}") from None
    if not fits:
        raise DataError(
            f"{question.where}: not a countdown row; its response has to solve its prompt (blockdiff data countdown)"
        )


def is_solved(question: Question, text: str) -> bool:
    """True for a text that solves the problem, in whatever way."""
    return countdown.is_solved(question.last_message, text)


def facts(question: Question, text: str) -> dict[str, Any]:
    """`numbers`: how many there are; `uses_numbers`: whether the text is an expression of all of them, each used once;
    `value`: what it comes to, as a string, or null."""
    numbers, _ = countdown.problem(question.last_message)
    value = countdown.value(text, numbers)
    return {
        "numbers": len(numbers),
        "uses_numbers": value is not None,
        "value": None if value is None else str(value),
    }


TASK = Task("countdown", is_solved, check, facts, group="numbers")
