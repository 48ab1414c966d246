"""Sums over the records of an evaluation, and two evaluations side by side."""

from __future__ import annotations

import math

import pytest

from blockdiff.data.rows import Row
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.evals import task
from blockdiff.evals.compare import binomial_test, compare
from blockdiff.evals.compare import lines as compared_lines
from blockdiff.evals.run import evaluate
from blockdiff.evals.summary import lines, summary
from tests.support.scripted_sampler import ScriptedSampler

pytestmark = pytest.mark.quick

LETTERS = character_tokenizer("abcdefgh")


def record(is_solved: bool, steps: list[int], text: str = "a", ending: str = "eos", **facts):
    return {
        "is_solved": is_solved,
        "text": text,
        "steps": steps,
        "forwards": {"denoise": sum(steps), "encode": 2, "verify": 1},
        "length": 4,
        "finish_reason": ending,
        **facts,
    }


def test_a_summary_counts_steps_endings_and_empty_answers():
    records = [
        record(True, [2, 4]),
        record(False, [4], text=" ", ending="length"),
        record(False, [], text="", ending="error"),
    ]
    found = summary(records)
    assert (found["count"], found["solved"], found["errors"], found["empty"]) == (3, 1, 1, 1)
    assert found["endings"] == {"eos": 1, "error": 1, "length": 1}
    assert found["steps_per_canvas"] == 10 / 3 and found["steps_histogram"] == {"2": 1, "4": 2}
    kinds = {"total": 19 / 3, "denoise": 10 / 3, "draft": 0, "encode": 2, "verify": 1}
    assert found["forwards_per_row"] == kinds and found["tokens_per_forward"] == 12 / 19
    assert "groups" not in found and found["facts"] == {}


def test_facts_that_are_true_or_false_are_counted_and_groups_are_in_order():
    records = [
        record(True, [1], size=10, is_valid=True),
        record(False, [3], size=9, is_valid=True),
        record(False, [5], size=10, is_valid=False),
    ]
    found = summary(records, "size")
    assert found["facts"] == {"is_valid": 2}
    assert found["means"] == {"size": pytest.approx(29 / 3)}
    assert [(row["size"], row["count"], row["solved"], row["steps_per_canvas"]) for row in found["groups"]] == [
        (9, 1, 0, 3.0),
        (10, 2, 1, 3.0),
    ]


def test_a_person_reads_every_figure_and_a_table_of_the_groups():
    report = summary([record(True, [2], size=4, is_valid=True)], "size")
    told = lines({**report, "seconds": 2.0, "first_canvas_seconds": 1.0, "max_steps": 48, "batch_size": 32})
    assert "solved              1 of 1 (100.0%)" in told and "valid               1 of 1 (100.0%)" in told
    assert "first canvas        after 1.00 s (median of the rows)" in told
    assert "ended by            eos 1; 0 empty" in told
    assert "forwards per row    5.00 (2.00 denoise, 2.00 encode, 1.00 verify)" in told
    assert told[-2].split() == ["size", "rows", "solved", "share", "steps"]
    assert told[-1].split() == ["4", "1", "1", "100.0%", "2.00"]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [(0, 0, 1.0), (3, 3, 1.0), (0, 5, 2 / 32), (1, 5, 14 / 64), (5, 1, 14 / 64), (0, 2000, 0.0)],
)
def test_the_binomial_test_is_exact(one, other, expected):
    assert binomial_test(one, other) == pytest.approx(expected, abs=1e-15)
    total = one + other
    if 0 < total < 12:  # the definition: how likely is a split at least as uneven
        uneven = [math.comb(total, k) for k in range(total + 1) if abs(2 * k - total) >= abs(one - other)]
        assert binomial_test(one, other) == sum(uneven) / 2**total


ROWS = [Row(f"f:{n}", prompt=letter, response=letter) for n, letter in enumerate("abcdef")]


def report(*answers: tuple[str | None, list[int]], rows: list[Row] = ROWS):
    return {**evaluate(ScriptedSampler(LETTERS, list(answers)), rows, task("exact")), "model": "m"}


def test_two_models_are_compared_row_by_row():
    first = report(("a", [2]), ("b", [3]), ("g", [9]), ("d", [2]), ("g", [1]), (None, []))
    second = report(("a", [2]), ("g", [5]), ("c", [4]), ("d", [1]), ("g", [2]), ("f", [2]))
    found = compare(first, second)
    assert [found[name] for name in ("both", "only_first", "only_second", "neither")] == [2, 1, 2, 1]
    assert found["p_value"] == 1.0
    forwards = found["forwards"]  # of the five rows that both answered
    assert forwards == {"difference": -3 / 5, "fewer_in_second": 2, "more_in_second": 2, "equal": 1, "p_value": 1.0}
    row = found["records"][2]
    assert (row["prompt"], row["reference"], row["first"]["text"], row["second"]["text"]) == ("c", "c", "g", "c")
    told = compared_lines(first, second, found)
    assert told[8].split() == ["solved", "by", "it", "alone", "1", "2"]
    assert "p = 1 (McNemar's test, exact)" in told[-2] and "-0.60 on average" in told[-1]


def test_reports_of_other_rows_are_not_compared():
    other = [Row(f"f:{n}", prompt=letter, response=letter) for n, letter in enumerate("abcdeh")]
    answers = [("a", [1])] * 6
    with pytest.raises(ValueError, match="same rows"):
        compare(report(*answers), report(*answers, rows=other))
