"""The sudoku task: exact solutions count, and rows of another task are refused."""

from __future__ import annotations

import json

import pytest

from blockdiff.data.rows import Row
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import DataError
from blockdiff.evals import task
from blockdiff.evals.run import evaluate
from blockdiff.recipes.sudoku import alphabet, make_splits
from tests.support.scripted_sampler import ScriptedSampler

pytestmark = pytest.mark.quick

SUDOKU = task("sudoku")


def scripted(answers):
    return ScriptedSampler(character_tokenizer(alphabet(4)), answers)


@pytest.fixture
def rows():
    made = make_splits(4, {"test": 4}, seed=2)["test"]
    return [Row(f"test.jsonl:{i + 1}", **row) for i, row in enumerate(made)]


def test_only_exact_solutions_count(rows):
    right = [row.response for row in rows]
    sampler = scripted([(right[0], [3]), (right[0], [2, 5]), (right[2][:-1], [4]), (None, [])])
    report = evaluate(sampler, rows, SUDOKU, batch_size=7, seed=11, max_steps=9)
    assert [record["is_solved"] for record in report["records"]] == [True, False, False, False]
    assert (report["count"], report["solved"], report["solved_share"], report["errors"]) == (4, 1, 0.25, 1)
    assert report["steps_per_canvas"] == (3 + 2 + 5 + 4) / 4
    assert report["tokens_per_forward"] == (17 + 17 + 16) / 14
    assert report["seconds"] >= 0
    assert [request.prompt for request in sampler.requests] == [row.prompt for row in rows]
    assert callable(sampler.asked.pop("on_canvas"))
    assert sampler.asked == {
        "seed": 11,
        "max_new_tokens": 17,  # the longest solution and its eos
        "max_steps": 9,
        "batch_size": 7,
    }


def test_every_puzzle_has_a_record_and_the_report_is_json(rows):
    report = evaluate(scripted([(row.response, [2]) for row in rows]), rows, SUDOKU)
    assert (report["task"], report["solved_share"]) == ("sudoku", 1.0)
    first = json.loads(json.dumps(report))["records"][0]
    assert first == {
        "id": 0,
        "prompt": rows[0].prompt,
        "reference": rows[0].response,
        "text": rows[0].response,
        "is_solved": True,
        "givens": sum(cell.isdigit() for cell in rows[0].prompt),
        "is_valid": True,
        "keeps_givens": True,
        "steps": [2],
        "forwards": {"denoise": 2, "encode": 0, "verify": 0, "draft": 0},
        "length": 17,
        "finish_reason": "eos",
    }


def test_valid_grids_and_kept_givens_are_counted_by_the_number_of_givens(rows):
    others = make_splits(4, {"other": 4}, seed=9)["other"]
    broken = "1" * 16
    said = [rows[0].response, others[1]["response"], broken, rows[3].prompt[:16].replace(".", "1")]
    report = evaluate(scripted([(text, [2]) for text in said[:3]] + [(said[3], [4])]), rows, SUDOKU)
    first, second, third, fourth = report["records"]
    assert (first["is_valid"], first["keeps_givens"]) == (True, True)
    assert (second["is_valid"], second["keeps_givens"]) == (True, False)
    assert (third["is_valid"], third["keeps_givens"]) == (False, False)
    assert (fourth["is_valid"], fourth["keeps_givens"]) == (False, True)
    assert report["facts"] == {"is_valid": 2, "keeps_givens": 2} and report["solved"] == 1
    groups = report["groups"]
    assert [group["givens"] for group in groups] == sorted({record["givens"] for record in report["records"]})
    assert sum(group["count"] for group in groups) == 4 and sum(group["solved"] for group in groups) == 1
    of_fourth = next(group for group in groups if group["givens"] == fourth["givens"])
    alike = [record for record in report["records"] if record["givens"] == fourth["givens"]]
    assert of_fourth["steps_per_canvas"] == sum(sum(record["steps"]) for record in alike) / len(alike)


def test_a_puzzle_asked_in_a_conversation_is_the_last_message(rows):
    puzzle, solution = rows[0].prompt, rows[0].response
    messages = (
        {"role": "system", "content": "Solve it."},
        {"role": "user", "content": puzzle},
        {"role": "assistant", "content": solution},
    )
    report = evaluate(scripted([(solution, [2])]), [Row("f:1", messages=messages)], SUDOKU)
    assert report["solved"] == 1
    assert report["records"][0]["prompt"] == list(messages[:2])


@pytest.mark.parametrize(
    "row",
    [
        Row("f.jsonl:3", prompt="2+2=", response="4"),
        Row("f.jsonl:3", prompt="." * 16 + "=", response="1234" * 4),
        Row(
            "f.jsonl:3",
            messages=({"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}),
        ),
    ],
)
def test_rows_of_another_task_are_refused(rows, row):
    with pytest.raises(DataError, match=r"f\.jsonl:3: .*sudoku"):
        evaluate(scripted([]), [*rows, row], SUDOKU)
