"""Which texts are right: exact match and GSM8K's marked answer."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pytest
import torch

from blockdiff.errors import BlockdiffError, DataError
from blockdiff.evals import TASKS, task
from blockdiff.evals.gsm8k import answer, flexible_answer
from blockdiff.evals.questions import Question, Task

pytestmark = pytest.mark.quick


def question(reference: str) -> Question:
    return Question(0, "f.jsonl:3", 0, "how many?", reference)


def test_every_task_is_found_by_its_name():
    assert [task(name).name for name in TASKS] == list(TASKS)
    with pytest.raises(BlockdiffError, match=r"'chess'.*countdown, exact, gsm8k, pixel_sudoku, sudoku"):
        task("chess")


def test_a_task_of_ones_own_is_a_function_or_a_task_of_a_module(tmp_path, monkeypatch):
    lines = [
        "from blockdiff.evals.questions import Task",
        "def ends(question, text):",
        "    return text.endswith(question.reference)",
        "WHOLE, LIMIT = Task('whole', lambda question, text: text == question.reference), 3",
    ]
    (tmp_path / "own_checks.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    own, whole = task("own_checks:ends"), task("own_checks:WHOLE")
    assert own.name == "own_checks:ends" and own.is_open and whole.name == "whole"
    assert [each.solves(question("5"), "so 5") for each in (own, whole)] == [True, False]
    for name, said in {"own_checks:begins": "begins", "no_such:f": "no_such", "own_checks:LIMIT": "is a int"}.items():
        with pytest.raises(BlockdiffError, match=said):
            task(name)


@pytest.mark.parametrize("found", [True, False, np.True_, np.bool_(False), torch.tensor(True)], ids=repr)
def test_a_task_says_true_or_false(found):
    assert Task("own", is_solved=lambda question, text: found).solves(question("a"), "b") is bool(found)


@pytest.mark.parametrize("found", [0.5, 1, 1.0, None, "no", np.float64(0.5)], ids=repr)
def test_a_task_that_says_something_else_is_refused(found):
    with pytest.raises(DataError, match=r"^task own: is_solved gave .*True or False"):
        Task("own", is_solved=lambda question, text: found).solves(question("a"), "b")


@pytest.mark.parametrize(
    ("text", "is_right"),
    [("a cat", True), (" a cat\n", True), ("a  cat", False), ("A cat", False), ("a cat.", False), ("", False)],
)
def test_exact_is_the_reference_but_for_white_space_around_it(text, is_right):
    assert task("exact").is_solved(question("a cat\n"), text) is is_right


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16 - 3 = <<16-3=13>>13 eggs.\n#### 13", "13"),
        ("#### 13.", "13"),
        ("####13 eggs", "13"),
        ("####\n13", "13"),
        ("#### 1,234,567", "1234567"),
        ("#### $1,200.50", "1200.50"),
        ("#### -5", "-5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### $.50", "0.5"),
        ("#### 18.00", "18"),
        ("#### 25%", "25"),
        ("#### 7, or maybe 8", "7"),
        ("#### 1\nno, wait\n#### 2", "2"),  # the last answer is the answer
    ],
)
def test_the_answer_is_the_number_after_the_last_mark(text, number):
    assert answer(text) == Decimal(number)


@pytest.mark.parametrize(
    "text", ["", "13", "The answer is 13.", "#### ", "#### thirteen", "### 13", "#### 13\n####", "#### 3/4"]
)
def test_without_a_marked_number_there_is_no_answer(text):
    assert answer(text) is None


@pytest.mark.parametrize("text", ["#### 31/4", "#### 18.5/2", "#### 1,000/4", "#### --5", "#### $$5"])
def test_no_part_of_something_else_is_taken_for_a_number(text):
    assert answer(text) is None


def test_gsm8k_compares_values_and_forgets_how_the_text_came_to_them():
    gsm8k = task("gsm8k")
    reference = question("She has 2 * 600 = <<2*600=1200>>1200.\n#### 1,200")
    assert gsm8k.is_solved(reference, "I guess.\n#### $1200.00")
    assert not gsm8k.is_solved(reference, "2 * 600 = 1200\n#### 120")
    assert not gsm8k.is_solved(reference, "1200")
    strict = {"answer": "1300", "flexible_answer": "1300", "is_solved_flexibly": False}
    assert gsm8k.facts(reference, "#### 1,300") == strict
    assert gsm8k.facts(reference, "nothing") == {"answer": None, "flexible_answer": None, "is_solved_flexibly": False}
    loose = gsm8k.facts(reference, "2 * 600 makes $1,200.00.")
    assert loose == {"answer": None, "flexible_answer": "1200.00", "is_solved_flexibly": True}


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 13", "13"), ("13 of 20 apples", "20"), ("10-5", "5"), ("it is -5.", "-5"), ("$1,234.50 each.", "1234.50")],
)
def test_the_flexible_answer_is_the_last_number_anywhere(text, number):
    assert flexible_answer(text) == Decimal(number)


def test_without_any_number_there_is_no_flexible_answer():
    assert flexible_answer("none at all, $.") is None


def test_a_row_without_an_answer_is_not_gsm8k():
    with pytest.raises(DataError, match=r"f\.jsonl:3: .*####.*'#### number'"):
        task("gsm8k").check(question("It is twelve."))
