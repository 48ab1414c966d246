"""The expansion of questions into a prompt and a canvas: the same in training, evaluation, serving and Python.

A question is put behind the state as text: a heading with its instructions, one line an option, `LABEL: text`, and an
instruction to answer with the label alone. The answer is read in one place of a canvas that is otherwise given: the
slot. Several questions are asked one by one, each with a canvas of its own, or jointly, as numbered lines of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal

from blockdiff.decisions.question import Question
from blockdiff.errors import RequestError

Form = Literal["decisions", "systemone"]  # the labels of the surface whose questions it writes
FORMS: tuple[Form, ...] = ("decisions", "systemone")
VERSION = 1  # of the texts below; it is kept with what was fitted to them
ASKED = {
    "letter": "Answer with the letter of one option and nothing else.",
    "side": "Answer with yes or no and nothing else.",
    "level": "Answer with the number of one level and nothing else.",
}
JOINTLY = "Answer every question in order, each on a line of its own: its number, a colon, the answer."


@dataclass(frozen=True)
class Asking:
    """The way in which questions are asked and read.

    form: of their text and labels; joint: whether those about one state share canvases; steps: denoising steps before
    the labels are read; draws: of the noise, over which probabilities are averaged.
    """

    form: Form = "decisions"
    joint: bool = False
    steps: int = 1
    draws: int = 4


ONE_BY_ONE = Asking()


@dataclass(frozen=True)
class Asked:
    """The text that asks one question or several jointly, and the template of the canvas that answers them.

    labels: of the options of each question, as they are read in its hole, which `hole` names.
    """

    questions: tuple[Question, ...]
    text: str
    images: tuple[Any, ...]
    template: str
    labels: tuple[tuple[str, ...], ...]

    @property
    def spaces(self) -> tuple[str, ...]:
        """The texts that may stand before a label in its slot: a space or none behind the colon of a line."""
        return ("",) if len(self.questions) == 1 else (" ", "")

    def choices(self, spaces: Sequence[str]) -> dict[str, list[str]]:
        """The texts that each hole is read for: every label, behind each of the spaces."""
        return {
            hole(place): [space + label for space in spaces for label in labels]
            for place, labels in enumerate(self.labels)
        }

    def spellings(self, count: Callable[[str], int]) -> list[str]:
        """The spaces with which every label is one token, by the count of a text's tokens; RequestError without any."""
        found, longer = [], ""
        for space in self.spaces:
            labels = [text for texts in self.choices([space]).values() for text in texts]
            if long := next((text for text in labels if count(text) > 1), ""):
                longer = long
            else:
                found.append(space)
        if not found:
            raise RequestError(
                f"the label {longer!r} is no single token of this model, and a slot has one; ask otherwise"
            )
        return found

    def answered(self, places: Sequence[int], space: str) -> tuple[str, list[tuple[int, int]]]:
        """The text of the canvas with the labels of these options, and the characters [start, end) of each slot."""
        text, spans = "", []
        for line, (labels, place) in enumerate(zip(self.labels, places, strict=True)):
            if len(self.labels) > 1:
                text += ("\n" if line else "") + f"{line + 1}:"
            label = space + labels[place]
            spans.append((len(text), len(text) + len(label)))
            text += label
        return text, spans


def hole(place: int) -> str:
    """The name of the hole of the question in this place."""
    return f"q{place + 1}"


def labels_of(question: Question, form: Form) -> tuple[str, ...]:
    """The labels of a question's options; RequestError if there are more options than letters.

    `decisions` has letters for every type. `systemone` has them for choices, no and yes for a predicate, and numbers
    from 0 for levels.
    """
    if form == "systemone" and question.type == "predicate":
        return "no", "yes"
    if form == "systemone" and question.type == "score":
        return tuple(str(place) for place in range(len(question.options)))
    if len(question.options) > len(ascii_uppercase):
        raise RequestError(
            f"{question.instructions!r:.60} has {len(question.options)} choices, and letters tell 26 apart; "
            "ask in steps"
        )
    return tuple(ascii_uppercase[: len(question.options)])


def ask_one(question: Question, form: Form) -> Asked:
    """The text and the template of one question."""
    labels = labels_of(question, form)
    text = _text("Question: ", question, labels, form)
    return Asked((question,), text, question.images, f"<?{hole(0)}>", (labels,))


def ask_jointly(questions: Sequence[Question], form: Form) -> Asked:
    """The text and the template of several questions, which are answered in one canvas; of one as `ask_one`."""
    if len(questions) == 1:
        return ask_one(questions[0], form)
    labels = [labels_of(question, form) for question in questions]
    texts = [
        _text(f"Question {place + 1}: ", question, of_it, form)
        for place, (question, of_it) in enumerate(zip(questions, labels, strict=True))
    ]
    lines = [f"{place + 1}:<?{hole(place)}>" for place in range(len(questions))]
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
    """The conversation with the question behind its last user message, after a blank line, or as a user message."""
    images = [{"type": "image", "image": image} for image in asked.images]
    if not messages or messages[-1]["role"] != "user":
        content: Any = asked.text if not images else [*images, {"type": "text", "text": asked.text}]
        return [*messages, {"role": "user", "content": content}]
    *before, last = messages
    said = last["content"]
    if isinstance(said, str) and not images:
        content = f"{said}\n\n{asked.text}" if said else asked.text
    else:
        parts = [{"type": "text", "text": said}] if isinstance(said, str) else list(said)
        content = [*parts, *images, {"type": "text", "text": f"\n\n{asked.text}"}]
    return [*before, {**last, "content": content}]
