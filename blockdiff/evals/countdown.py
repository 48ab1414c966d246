"""Countdown: a text is right if it is any expression that reaches the target with all numbers, each used once."""

from __future__ import annotations

from functools import partial
from typing import Any

from blockdiff.evals.questions import Question, Task, check_solved
from blockdiff.recipes import countdown


def is_solved(question: Question, text: str) -> bool:
    """Return whether the text solves the problem, by any expression."""
    return countdown.is_solved(question.last_message, text)


def facts(question: Question, text: str) -> dict[str, Any]:
    """Return `numbers`, `uses_numbers` and `value` of an answer.

    numbers: the count of the problem's numbers; uses_numbers: whether the text is an expression of all of them, each
    used once; value: the value of that expression as a string, None if it is not one.
    """
    numbers, _ = countdown.problem(question.last_message)
    value = countdown.value(text, numbers)
    return {
        "numbers": len(numbers),
        "uses_numbers": value is not None,
        "value": None if value is None else str(value),
    }


TASK = Task("countdown", is_solved, partial(check_solved, "countdown", is_solved), facts, group="numbers")
