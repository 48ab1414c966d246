"""The sudoku evaluation counts exact solutions and what they cost."""

from __future__ import annotations

import json

import pytest

from blockdiff.data.rows import Row
from blockdiff.data.sudoku import alphabet, make_splits
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.errors import DataError
from blockdiff.evals.sudoku import evaluate
from blockdiff.sampling.request import Result


class Scripted:
    """Stands in for a sampler: answers with prepared texts and step counts, and keeps what it was asked."""

    def __init__(self, answers):
        self.tokenizer = character_tokenizer(alphabet(4))
        self.answers = answers
        self.asked = None

    def generate(self, prompts, seed, max_new_tokens, max_steps, batch_size, on_canvas):
        self.asked = {
            "prompts": prompts,
            "seed": seed,
            "max_new_tokens": max_new_tokens,
            "max_steps": max_steps,
            "batch_size": batch_size,
        }
        results = []
        for place, (text, steps) in enumerate(self.answers):
            if text is None:
                results.append(Result(place, "", [], "error", [], error="no"))
                continue
            tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], 1]
            results.append(Result(place, text, tokens, "eos", steps))
        return results


@pytest.fixture
def rows():
    made = make_splits(4, {"test": 4}, seed=2)["test"]
    return [Row(f"test.jsonl:{i + 1}", **row) for i, row in enumerate(made)]


def test_only_exact_solutions_count(rows):
    right = [row.response for row in rows]
    sampler = Scripted([(right[0], [3]), (right[0], [2, 5]), (right[2][:-1], [4]), (None, [])])
    report = evaluate(sampler, rows, batch_size=7, seed=11, max_steps=9)
    assert [record["is_solved"] for record in report["records"]] == [True, False, False, False]
    assert (report["count"], report["solved"], report["solved_share"], report["errors"]) == (4, 1, 0.25, 1)
    assert report["steps_per_canvas"] == (3 + 2 + 5 + 4) / 4
    assert report["tokens_per_forward"] == (17 + 17 + 16) / 14
    assert report["seconds"] >= 0
    assert sampler.asked == {
        "prompts": [row.prompt for row in rows],
        "seed": 11,
        "max_new_tokens": 17,
        "max_steps": 9,
        "batch_size": 7,
    }


def test_every_puzzle_has_a_record_and_the_report_is_json(rows):
    report = evaluate(Scripted([(row.response, [2]) for row in rows]), rows)
    assert report["solved_share"] == 1.0
    first = json.loads(json.dumps(report))["records"][0]
    assert first == {
        "id": 0,
        "prompt": rows[0].prompt,
        "text": rows[0].response,
        "is_solved": True,
        "givens": sum(cell.isdigit() for cell in rows[0].prompt),
        "steps": [2],
        "finish_reason": "eos",
    }


@pytest.mark.parametrize(
    "row",
    [
        Row("f.jsonl:3", prompt="2+2=", response="4"),
        Row("f.jsonl:3", prompt="." * 16 + "=", response="1234" * 4),
        Row("f.jsonl:3", messages=({"role": "assistant", "content": "1"},)),
    ],
)
def test_rows_of_another_task_are_refused(rows, row):
    with pytest.raises(DataError, match=r"f.jsonl:3: not a sudoku"):
        evaluate(Scripted([]), [*rows, row])


def test_nothing_to_evaluate_is_refused():
    with pytest.raises(DataError, match="no puzzles"):
        evaluate(Scripted([]), [])
