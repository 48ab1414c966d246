"""Countdown: a text is right if it is any expression that makes the target of all the numbers, each used once."""

from __future__ import annotations

from functools import partial
from typing import Any

from blockdiff.evals.questions import Question, Task, check_solved
from blockdiff.recipes import countdown


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


TASK = Task("countdown", is_solved, partial(check_solved, "countdown", is_solved), facts, group="numbers")
