"""GSM8K (arXiv 2110.14168): grade-school mathematics; a text is right if the number after its `####` is.

In addition to this strict rule, the record has a flexible one for models that were not trained to write the mark: the
last number anywhere in the text. Both are reported, since they can be far apart.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from blockdiff.errors import DataError
from blockdiff.evals.questions import Question, Task

MARK = "####"
# The characters after it must not make it another number: 3/4 is not 3.
NUMBER = re.compile(r"\s*((?:-?\$|\$?-)?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+))(?!\.?[0-9]|[,/])")
# A minus sign between two numbers is a subtraction.
ANY_NUMBER = re.compile(r"(?:(?<![0-9])-)?\$?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


def answer(text: str) -> Decimal | None:
    """Return the number right after the last `####`, without `$` and thousands commas; None if there is none.

    Like the data set's own grader this reads only marked answers. Unlike it, values are compared: 18.00 equals 18.
    """
    _, mark, rest = text.rpartition(MARK)
    match = NUMBER.match(rest) if mark else None
    return _value(match[1]) if match else None


def flexible_answer(text: str) -> Decimal | None:
    """Return the last number anywhere in the text; None if there is none."""
    numbers = ANY_NUMBER.findall(text)
    return _value(numbers[-1]) if numbers else None


def check(question: Question) -> None:
    """Raise DataError if the reference has no marked answer."""
    if answer(question.reference) is None:
        raise DataError(
            f"{question.where}: the response has no number after {MARK}, so it is not GSM8K; "
            "end it with '#### number', or take the task exact"
        )


def is_solved(question: Question, text: str) -> bool:
    """Return whether the marked answer of the text equals that of the reference."""
    return answer(text) == answer(question.reference)


def facts(question: Question, text: str) -> dict[str, Any]:
    """Return an answer's `answer`, `flexible_answer` and `is_solved_flexibly`.

    The first two are strings, None if there is no such number; the last is whether the flexible answer is right.
    """
    strict, flexible = answer(text), flexible_answer(text)
    return {
        "answer": None if strict is None else str(strict),
        "flexible_answer": None if flexible is None else str(flexible),
        "is_solved_flexibly": flexible == answer(question.reference),
    }


def _value(number: str) -> Decimal:
    return Decimal(re.sub("[$,]", "", number))


TASK = Task("gsm8k", is_solved, check, facts, is_open=True)
