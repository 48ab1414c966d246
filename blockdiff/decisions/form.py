"""The expansion of questions into a prompt and a canvas: the same in training, evaluation, serving and Python.

The state comes first, then the question as text: a heading with its instructions, a line `LABEL: text` for each option,
and an instruction to answer with the label alone. The answer is read at one position of a canvas whose other tokens are
fixed: the slot. Several questions are asked one by one, each in its own canvas, or jointly, as numbered lines of one
canvas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

from blockdiff.decisions.question import Question
from blockdiff.errors import RequestError

Form = Literal["decisions", "systemone"]  # whose labels are used: of `POST /v1/decisions` or of `POST /v1/systemone`
FORMS: tuple[Form, ...] = ("decisions", "systemone")
VERSION = 1  # of the texts below; it is stored with temperatures fitted to them
ASKED = {
    "letter": "Answer with the letter of one option and nothing else.",
    "side": "Answer with yes or no and nothing else.",
    "level": "Answer with the number of one level and nothing else.",
}
JOINTLY = "Answer every question in order, each on a line of its own: its number, a colon, the answer."


@dataclass(frozen=True)
class Asking:
    """The way in which questions are asked and read.

    form: of the questions' text and labels; joint: whether the questions about a state share one canvas; steps:
    denoising steps before the labels are read; draws: number of noise draws over which probabilities are averaged.
    """

    form: Form = "decisions"
    joint: bool = False
    steps: int = 1
    draws: int = 4


ONE_BY_ONE = Asking()


@dataclass(frozen=True)
class Asked:
    """The text that asks one question or several jointly, and the template of the canvas that answers them.

    labels: for each question, the labels of its options. They are read in the question's hole (named by `hole`).
    """

    questions: tuple[Question, ...]
    text: str
    images: tuple[Any, ...]
    template: str
    labels: tuple[tuple[str, ...], ...]

    @property
    def spaces(self) -> tuple[str, ...]:
        """Return what may precede a label in its slot: nothing for one question, a space or nothing for several."""
        return ("",) if len(self.questions) == 1 else (" ", "")

    def choices(self, spaces: Sequence[str]) -> dict[str, list[str]]:
        """Return by hole the texts to score in it: every label, preceded by each of `spaces`."""
        return {
            hole(index): [space + label for space in spaces for label in labels]
            for index, labels in enumerate(self.labels)
        }

    def spellings(self, count: Callable[[str], int]) -> list[str]:
        """Return the entries of `spaces` with which every label is a single token.

        count: counts the tokens of a text. Raises RequestError if there are none.
        """
        spaces, longer = [], ""
        for space in self.spaces:
            labels = [text for texts in self.choices([space]).values() for text in texts]
            if long := next((text for text in labels if count(text) > 1), ""):
                longer = long
            else:
                spaces.append(space)
        if not spaces:
            raise RequestError(
                f"the label {longer!r} is no single token of this model, and a slot has one; ask otherwise"
            )
        return spaces

    def answered(self, places: Sequence[int], space: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of an answered canvas, and the character range [start, end) of each slot.

        places: the index of the chosen option of each question; space: precedes every label.
        """
        text, spans = "", []
        for line, (labels, index) in enumerate(zip(self.labels, places, strict=True)):
            if len(self.labels) > 1:
                text += ("\n" if line else "") + f"{line + 1}:"
            label = space + labels[index]
            spans.append((len(text), len(text) + len(label)))
            text += label
        return text, spans


def hole(place: int) -> str:
    """Return the name of the hole of question number `place`, counted from 0."""
    return f"q{place + 1}"


def labels_of(question: Question, form: Form) -> tuple[str, ...]:
    """Return the labels of a question's options; RequestError if there are more options than letters.

    `decisions` uses letters for every type of question. `systemone` uses letters for choices, "no" and "yes" for a
    predicate, and numbers from 0 for levels.
    """
    if form == "systemone" and question.type == "predicate":
        return "no", "yes"
    if form == "systemone" and question.type == "score":
        return tuple(str(level) for level in range(len(question.options)))
    if len(question.options) > len(ascii_uppercase):
        raise RequestError(
            f"{question.instructions!r:.60} has {len(question.options)} choices, and letters tell 26 apart; "
            "ask in steps"
        )
    return tuple(ascii_uppercase[: len(question.options)])


def ask_one(question: Question, form: Form) -> Asked:
    """Write one question as text, with the template of its canvas."""
    labels = labels_of(question, form)
    text = _text("Question: ", question, labels, form)
    return Asked((question,), text, question.images, f"<?{hole(0)}>", (labels,))


def ask_jointly(questions: Sequence[Question], form: Form) -> Asked:
    """Write several questions as one text, answered in one canvas; a single one as `ask_one` does."""
    if len(questions) == 1:
        return ask_one(questions[0], form)
    labels = [labels_of(question, form) for question in questions]
    texts = [
        _text(f"Question {index + 1}: ", question, of_it, form)
        for index, (question, of_it) in enumerate(zip(questions, labels, strict=True))
    ]
    lines = [f"{index + 1}:<?{hole(index)}>" for index in range(len(questions))]
    images = tuple(image for question in questions for image in question.images)
    return Asked(tuple(questions), "\n\n".join([*texts, JOINTLY]), images, "\n".join(lines), tuple(labels))


def _text(heading: str, question: Question, labels: Sequence[str], form: Form) -> str:
    lines = [heading + question.instructions] if question.instructions else []
    for label, option in zip(labels, question.options, strict=True):
        is_side = label in ("no", "yes")
        known = option.description if is_side else " - ".join(filter(None, (option.text, option.description)))
        lines.append(f"{label}: {known}" if known else label)
    is_level = form == "systemone" and question.type == "score"
    is_side = form == "systemone" and question.type == "predicate"
    return "\n".join([*lines, ASKED["side" if is_side else "level" if is_level else "letter"]])


def with_question(messages: Sequence[dict[str, Any]], asked: Asked) -> list[dict[str, Any]]:
    """Return the conversation with the question at its end.

    If the last message is the user's, the question follows its text after a blank line; else it is a new user message.
    """
    images = [{"type": "image", "image": image} for image in asked.images]
    if not messages or messages[-1]["role"] != "user":
        content: Any = asked.text if not images else [*images, {"type": "text", "text": asked.text}]
        return [*messages, {"role": "user", "content": content}]
    *before, last = messages
    body = last["content"]
    if isinstance(body, str) and not images:
        content = f"{body}\n\n{asked.text}" if body else asked.text
    else:
        parts = [{"type": "text", "text": body}] if isinstance(body, str) else list(body)
        content = [*parts, *images, {"type": "text", "text": f"\n\n{asked.text}"}]
    return [*before, {**last, "content": content}]
