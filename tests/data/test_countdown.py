"""Countdown problems: any right expression is right, and no two problems have the same numbers."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from blockdiff.data.rows import Row
from blockdiff.errors import DataError
from blockdiff.evals import task
from blockdiff.evals.run import evaluate
from blockdiff.recipes.countdown import ALPHABET, is_solved, make_splits, problem, value, write_splits
from tests.support.scripted_sampler import ScriptedSampler

pytestmark = pytest.mark.quick

PROMPT = "86,28,13,31:96="


@pytest.mark.parametrize(
    "text",
    ["86+28-(31-13)", "(86+28)-(31-13)", " 86 + 28 - 31 + 13 ", "((13))+28+86-31", "13-(31-28-86)", "13-31+86+28"],
)
def test_any_expression_that_makes_the_target_of_all_numbers_is_right(text):
    assert is_solved(PROMPT, text)


@pytest.mark.parametrize(
    "text",
    [
        "86+28-31-13",  # another value
        "96",
        "86+28-(31-13)+0",  # a number that is not there
        "86+28-(31-13)=96",
        "-(31-13)+86+28",  # a sign before an expression
        "86+28-(31-13",
        "86+28-31-13)",
        "86 28+13 31",
        "86++28-31+13",
        "()86+28-31+13",
        "86+28-31+1 3",
        "86+28-31+13/",
        "",
        "86**1",
        "9" * 10_000,
        "(" * 10_000,
        "86+2\u0668-(31-13)",  # a digit of another script
    ],
)
def test_everything_else_is_wrong(text):
    assert not is_solved(PROMPT, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8/3*4", Fraction(32, 3)),
        ("8-3-4", 1),
        ("8-(3-4)", 9),
        ("8/(3*4)", Fraction(2, 3)),
        ("4*(3-8)", -20),
        ("8/4/3", Fraction(2, 3)),
        ("3+4*8", 35),
        ("8/(4-4)", None),
    ],
)
def test_values_are_exact_and_operations_bind_as_they_should(text, expected):
    assert value(text, [4, 4, 8] if "4-4" in text else [3, 4, 8]) == expected


@pytest.mark.parametrize("prompt", ["", "3:4=", "3,a:4=", "3,4=", "3,4:", "2+2=", f"3,{'4' * 30}:5="])
def test_what_is_no_problem_is_refused(prompt):
    with pytest.raises(DataError, match="countdown prompt"):
        problem(prompt)


@pytest.mark.parametrize("size", [3, 4, 6])
def test_every_problem_is_solved_by_its_row_within_bounds_and_has_numbers_of_its_own(size):
    splits = make_splits(size, {"train": 300, "test": 100}, seed=3)
    rows = splits["train"] + splits["test"]
    sets = set()
    for row in rows:
        numbers, target = problem(row["prompt"])
        assert len(numbers) == size and all(1 <= number <= 99 for number in numbers) and 1 <= target <= 999
        assert is_solved(row["prompt"], row["response"])
        assert set(row["prompt"] + row["response"]) <= set(ALPHABET)
        sets.add(tuple(sorted(numbers)))
    assert len(sets) == len(rows) == 400
    assert {sign for row in rows for sign in row["response"] if sign in "+-*/"} == set("+-*/")


def test_the_same_seed_gives_the_same_problems_and_another_one_others():
    first, again, other = (make_splits(4, {"train": 20}, seed) for seed in (1, 1, 2))
    assert first == again != other


def test_what_cannot_be_made_is_refused():
    with pytest.raises(DataError, match="countdown of 2 numbers"):
        make_splits(2, {"train": 1})
    with pytest.raises(DataError, match="split"):
        make_splits(3, {})
    with pytest.raises(DataError, match=r"166,650.*3 numbers"):
        make_splits(3, {"train": 10**8})  # not after hours


def test_written_splits_are_rows_of_the_task(tmp_path):
    from transformers import AutoTokenizer

    (said,) = write_splits(tmp_path, 4, {"test": 5}, seed=1)
    assert said.startswith("test: 5 problems of 4 numbers, targets ")
    rows = [Row(f"f:{n}", **json.loads(line)) for n, line in enumerate((tmp_path / "test.jsonl").open())]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    answers = [(row.response, [3]) for row in rows[:3]] + [("1+1", [5]), (rows[4].response + "+1", [5])]
    report = evaluate(ScriptedSampler(tokenizer, answers), rows, task("countdown"))
    assert (report["solved"], report["facts"]) == (3, {"uses_numbers": 3})
    assert report["groups"] == [
        {"numbers": 4, "count": 5, "solved": 3, "solved_share": 0.6, "steps_per_canvas": 19 / 5}
    ]
    assert report["records"][0]["value"] == str(problem(rows[0].prompt)[1]) and report["records"][3]["value"] is None


def test_rows_of_another_task_are_refused():
    for row in (Row("f:3", prompt="2+2=", response="4"), Row("f:3", prompt="3,4,5:12=", response="3+4")):
        with pytest.raises(DataError, match=r"f:3: .*countdown"):
            evaluate(ScriptedSampler(None, []), [row], task("countdown"))
