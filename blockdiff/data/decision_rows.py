"""Rows of decisions: a state, typed questions about it, and the right answers where they are known."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockdiff.data.messages import BadRow, Message, checked_messages
from blockdiff.data.rows import Row
from blockdiff.decisions.form import FORMS, ask_jointly, ask_one, with_question
from blockdiff.decisions.question import Question, json_text, read_questions
from blockdiff.errors import DataError, RequestError

EXPECTED = '{"input": ... or "messages": [...], "questions": [...], "answers": [...]}'


@dataclass(frozen=True)
class DecisionRow:
    """A row of decisions. targets: the probability of each option of each question; () if answers are unknown."""

    where: str
    messages: tuple[Message, ...]
    questions: tuple[Question, ...]
    targets: tuple[tuple[float, ...], ...] = ()
    id: str | int | None = None

    @property
    def digest(self) -> str:
        """The digest of the state and the questions, which identifies a row in another file."""
        content = json.dumps([self.messages, self.questions], sort_keys=True, default=repr)
        return hashlib.sha256(content.encode()).hexdigest()


def decision_row(value: Any, where: str, *, has_answers: bool) -> DecisionRow:
    """Check a row of decisions. Raises DataError with `where` if it is none. Keys outside EXPECTED are data."""
    if isinstance(value, DataError):
        raise value
    try:
        if not isinstance(value, Mapping) or "questions" not in value or ("input" in value) == ("messages" in value):
            raise BadRow(f"the row is not a decision; write {EXPECTED}")
        questions = read_questions(value["questions"])
        if "messages" in value:
            messages = tuple(checked_messages(value["messages"], "messages", unread=set()))
        else:
            state = value["input"]
            text = state if isinstance(state, str) else json_text(state, "input")
            messages = ({"role": "user", "content": text},)
        targets = _targets(value.get("answers"), questions) if has_answers else ()
    except (BadRow, RequestError) as error:
        raise DataError(f"{where}: {error}") from None
    return DecisionRow(where, messages, questions, targets, value.get("id"))


def rows_to_learn(value: Mapping[str, Any], where: str) -> list[Row]:
    """Turn a row of decisions into rows to train on: one for each question, or one for all with `"joint": true`."""
    row, form, joint = (
        decision_row(value, where, has_answers=True),
        value.get("form", FORMS[0]),
        value.get("joint", False),
    )
    if form not in FORMS or not isinstance(joint, bool):
        raise DataError(f"{where}: form should be one of {', '.join(FORMS)}, and joint true or false")
    try:
        decisions = [ask_jointly(row.questions, form)] if joint else [ask_one(each, form) for each in row.questions]
    except RequestError as error:
        raise DataError(f"{where}: {error}") from None
    targets = iter(row.targets)
    identity = None if row.id is None else str(row.id)
    return [
        Row(
            where,
            messages=tuple(with_question([dict(message) for message in row.messages], each)),
            id=identity,
            decision=each,
            targets=tuple(next(targets) for _ in each.questions),
        )
        for each in decisions
    ]


def _targets(answers: Any, questions: Sequence[Question]) -> tuple[tuple[float, ...], ...]:
    if isinstance(answers, Mapping):
        names = [question.name for question in questions]
        if unknown := [name for name in answers if name not in names]:
            raise BadRow(f"answers has {unknown[0]!r:.60}, but no question has that name; correct it")
        answers = [answers.get(name) for name in names]
    if not isinstance(answers, Sequence) or isinstance(answers, str) or len(answers) != len(questions):
        raise BadRow(f"answers should have one for each of the {len(questions)} questions, in order or by name")
    return tuple(_target(answer, question) for answer, question in zip(answers, questions, strict=True))


def _target(answer: Any, question: Question) -> tuple[float, ...]:
    """The probability of each option: 1 for the answer, or a list of probabilities as it is written."""
    if not isinstance(answer, list):
        index = question.place_of(answer)
        return tuple(float(index == each) for each in range(len(question.options)))
    is_number = all(isinstance(p, int | float) and not isinstance(p, bool) and p >= 0 for p in answer)
    if len(answer) != len(question.options) or not is_number or abs(sum(answer) - 1) > 1e-3:
        count = len(question.options)
        raise BadRow(f"the answer {answer!r:.80} is no distribution; write {count} probabilities with the sum 1")
    return tuple(p / sum(answer) for p in answer)
