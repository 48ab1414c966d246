"""Rows of decisions as training reads them: the slots alone are learnt, all else of their canvas is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from blockdiff.data.canvas_choice import AllCanvases
from blockdiff.data.chat import Encoder
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.data.examples import Examples, read_table, write_examples
from blockdiff.data.sources import Source, read_rows
from blockdiff.data.template import packaged_template
from blockdiff.diffusion.schedule import StratifiedTime
from blockdiff.errors import DataError
from tests.support.chat_tokenizer import chat_tokenizer

L = 16
TOKENIZER = chat_tokenizer(packaged_template())
SPAM = {"type": "predicate", "instructions": "Is it spam?", "name": "spam"}
TEAM = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}, {"value": "c"}]}


def encoded(tmp_path: Path, *rows: dict, canvas_length: int = L) -> list[Example]:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = Encoder(TOKENIZER, eos_id=1, canvas_length=canvas_length)
    return encoder.encode(list(read_rows(Source(str(file)))))[0]


def row(joint: bool = False, team: object = "b") -> dict:
    return {"input": "buy now", "questions": [SPAM, TEAM], "answers": [True, team], "joint": joint}


def collator() -> Collator:
    return Collator(L, pad_id=0, fill_id=1, seed=3, time=StratifiedTime(), canvases=AllCanvases(), scores_ar=False)


def test_a_question_is_an_example_whose_slot_alone_is_scored(tmp_path):
    spam, team = encoded(tmp_path, row())
    text = TOKENIZER.decode(spam.tokens)
    assert text.endswith("Answer with the letter of one option and nothing else.<turn|>\n<|turn>model\nB<turn|>\n")
    assert [TOKENIZER.decode(slot.tokens) for each in (spam, team) for slot in each.slots] == ["B", "B"]
    batch = collator()([spam, team], epoch=0, step=1, slots=[0, 1], total_slots=2)
    for place, example in enumerate((spam, team)):
        [slot], [start] = example.slots, [example.responses[-1][0]]
        scored = (batch.is_scored_BCL & ~batch.is_pinned_BCL)[place, 0].nonzero()[:, 0].tolist()
        assert scored == [slot.column - start] and batch.canvas_BCL[place, 0, scored[0]] == slot.tokens[0]


def test_joint_questions_are_lines_of_one_canvas(tmp_path):
    [joint] = encoded(tmp_path, row(joint=True))
    assert TOKENIZER.decode(joint.tokens[slice(*joint.responses[-1])]) == "1:B\n2:B<turn|>\n"
    assert [joint.tokens[slot.column] for slot in joint.slots] == [slot.tokens[0] for slot in joint.slots]
    [canvas] = collator().rows([joint], epoch=0, step=1, slots=[0], total_slots=1)[0].canvases
    assert len(canvas.pinned) == L - 2
    with pytest.raises(DataError, match="need 9 tokens, but a canvas has 8"):
        encoded(tmp_path, row(joint=True), canvas_length=8)


def test_a_soft_answer_is_drawn_anew_in_every_epoch(tmp_path):
    _, team = encoded(tmp_path, row(team=[0.25, 0, 0.75]))
    [slot] = team.slots
    assert TOKENIZER.decode(slot.tokens) == "AC" and slot.weights == [0.25, 0.75]
    drawn = []
    for epoch in range(400):
        [made] = collator().rows([team], epoch=epoch, step=1, slots=[0], total_slots=1)
        drawn.append(made.canvases[0].tokens[slot.column - team.responses[-1][0]])
    assert {*drawn} == {*slot.tokens}
    assert drawn.count(slot.tokens[1]) / 400 == pytest.approx(0.75, abs=0.08)


def test_slots_are_kept_in_the_file_of_examples(tmp_path):
    examples = encoded(tmp_path, row(team=[0.25, 0, 0.75]))
    path = tmp_path / "examples"
    with path.open("w+b") as file:
        write_examples(file, examples, [str(tmp_path / "rows.jsonl")])
        file.flush()
        read = Examples([read_table(file)], [[str(tmp_path / "rows.jsonl")]], [0])
    assert list(read) == examples


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"answers": [True]}, "one for each of the 2 questions"),
        ({"answers": [True, "d"]}, "'d' is no answer to 'Which\\?'"),
        ({"joint": 1}, "joint true or false"),
        ({"form": "words"}, "form should be one of decisions, systemone"),
        ({"form": "systemone"}, "the label 'no' is no single token"),
    ],
)
def test_a_row_that_is_no_decision_is_refused_by_place(tmp_path, change, words):
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{words}"):
        encoded(tmp_path, {**row(), **change})
