"""A typed question about a state: whether a statement is true, which of several choices fits, or a score.

Two public forms are read: the questions of OpenAI's `POST /v1/decisions` (also in files), and those of TypeSafe's `POST
/v1/systemone`. Both become a `Question`, and an answer is written in the form in which its question came.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blockdiff.errors import RequestError

Type = Literal["predicate", "choice", "score"]
Value = str | bool | int
MOST_QUESTIONS, MOST_CHOICES, MOST_LEVELS = 400, 255, 10
# Limits of the JSON of a question or an input.
MOST_DEPTH, MOST_VALUES, MOST_BYTES = 32, 10_000, 256 * 1024


@dataclass(frozen=True)
class Option:
    """A possible answer: False or True for a predicate, the value of a choice, or the index of a level."""

    value: Value
    text: str
    description: str | None = None


@dataclass(frozen=True)
class Question:
    """A question and its options, in the given order.

    instructions: the question's text; images: follow the text; name: the key of its answer.
    """

    type: Type
    instructions: str
    options: tuple[Option, ...]
    name: str | None = None
    images: tuple[Any, ...] = ()

    def place_of(self, value: object) -> int:
        """Return the index of the option with this value; RequestError if there is none.

        The answer to a score may also be the text of a level.
        """
        for index, option in enumerate(self.options):
            is_text = self.type == "score" and option.text == value
            if is_text or (option.value == value and isinstance(option.value, bool) == isinstance(value, bool)):
                return index
        known = ", ".join(json.dumps(option.value) for option in self.options[:8])
        raise RequestError(f"{value!r:.80} is no answer to {self.instructions!r:.60}; give one of {known}")


def read_questions(values: object, where: str = "questions") -> tuple[Question, ...]:
    """Read questions in the form of `POST /v1/decisions`, which rows and files use, too.

    Raises RequestError, which names the place, for anything that is not a question.
    """
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise RequestError(f"{where} must be a list of questions, got {values!r:.80}")
    if not 1 <= len(values) <= MOST_QUESTIONS:
        raise RequestError(f"{where} must have 1 to {MOST_QUESTIONS} questions, got {len(values)}")
    return tuple(_question(each, f"{where}[{index}]") for index, each in enumerate(values))


def read_systemone(values: object, where: str = "questions") -> tuple[Question, ...]:
    """Read the questions of `POST /v1/systemone`, an object of questions by id.

    Raises RequestError, which names the id, for anything that is not a question.
    """
    if not isinstance(values, Mapping):
        raise RequestError(f"{where} must be an object that has a question for each id, got {values!r:.80}")
    if not 1 <= len(values) <= MOST_QUESTIONS:
        raise RequestError(f"{where} must have 1 to {MOST_QUESTIONS} questions, got {len(values)}")
    return tuple(_of_systemone(str(name), each, f"{where}.{name:.60}") for name, each in values.items())


def _question(values: object, where: str) -> Question:
    entry = _object(values, where, {"type", "instructions", "name", "choices", "levels"})
    kind, name = entry.get("type"), entry.get("name")
    if kind not in ("predicate", "choice", "score"):
        raise RequestError(f"{where}.type must be predicate, choice or score, got {kind!r:.80}")
    for key, owner in (("choices", "choice"), ("levels", "score")):
        if (key in entry) != (kind == owner):
            has = f"needs {key}" if kind == owner else f"has no {key}"
            raise RequestError(f"{where} is a {kind}, which {has}")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"{where}.name must be text, got {name!r:.80}")
    text, images = content_of(entry.get("instructions"), f"{where}.instructions")
    if kind == "predicate":
        options = predicate_options()
    elif kind == "choice":
        options = tuple(_choices(entry["choices"], f"{where}.choices"))
    else:
        options = tuple(_levels(entry["levels"], f"{where}.levels"))
    return Question(kind, text, options, name, images)


def predicate_options(false: str | None = None, true: str | None = None) -> tuple[Option, ...]:
    """Return the two options of a predicate, false first; `false` and `true` describe them."""
    return Option(False, "false", false), Option(True, "true", true)


def _choices(values: object, where: str) -> Iterable[Option]:
    seen = set[tuple[type, object]]()
    for index, each in enumerate(_list(values, where, 2, MOST_CHOICES)):
        entry = _object(each, f"{where}[{index}]", {"value", "description"})
        value = entry.get("value")
        if not isinstance(value, str | bool) or value == "":
            raise RequestError(f"{where}[{index}].value must be text, true or false, got {value!r:.80}")
        if (type(value), value) in seen:
            raise RequestError(f"{where} has {json.dumps(value)[:80]} twice; choices must differ")
        seen.add((type(value), value))
        yield Option(value, json.dumps(value, ensure_ascii=False), _text(entry, "description", f"{where}[{index}]"))


def _levels(values: object, where: str) -> Iterable[Option]:
    for index, each in enumerate(_list(values, where, 2, MOST_LEVELS)):
        entry = _object(each, f"{where}[{index}]", {"label", "description"})
        label = _text(entry, "label", f"{where}[{index}]")
        if not label:
            raise RequestError(f"{where}[{index}].label must be text")
        yield Option(index, label, _text(entry, "description", f"{where}[{index}]"))


def _of_systemone(name: str, values: object, where: str) -> Question:
    entry = _object(values, where, {"type", "instructions", "criteria"})
    kind, criteria = entry.get("type"), entry.get("criteria")
    text, images = content_of(entry.get("instructions", ""), f"{where}.instructions", may_be_empty=True)
    if kind == "noul":
        sides = {} if criteria is None else _object(criteria, f"{where}.criteria", {"true", "false"})
        described = [_text(sides, side, f"{where}.criteria") for side in ("false", "true")]
        return Question("predicate", text, predicate_options(*described), name, images)
    if kind == "choice":
        named = _object(criteria, f"{where}.criteria", None)
        _list([*named], f"{where}.criteria", 2, MOST_CHOICES)
        options = [Option(each, each, _text(named, each, f"{where}.criteria")) for each in named]
        return Question("choice", text, tuple(options), name, images)
    if kind == "score":
        levels = _list(criteria, f"{where}.criteria", 2, MOST_LEVELS)
        if not all(isinstance(level, str) and level for level in levels):
            raise RequestError(f"{where}.criteria must be a list of texts, got {criteria!r:.80}")
        return Question("score", text, tuple(Option(n, level) for n, level in enumerate(levels)), name, images)
    raise RequestError(f"{where}.type must be noul, choice or score, got {kind!r:.80}")


def content_of(value: object, where: str, may_be_empty: bool = False) -> tuple[str, tuple[Any, ...]]:
    """Return the text of instructions or of an input, and its images, both in order.

    value: a text, or a list of parts; JSON parts become text. Raises RequestError for other parts, and for empty
    content unless `may_be_empty`.
    """
    parts = [{"type": "input_text", "text": value}] if isinstance(value, str) else value
    if not isinstance(parts, Sequence):
        raise RequestError(f"{where} must be text or a list of parts, got {value!r:.80}")
    texts, images = list[str](), list[Any]()
    for index, part in enumerate(parts):
        name = where if isinstance(value, str) else f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "input_text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "input_json" and "data" in part:
            texts.append(json_text(part["data"], f"{name}.data"))
        elif kind == "input_image":
            images.append(part)
        else:
            raise RequestError(f"{name} must be a part of type input_text, input_json or input_image, got {part!r:.80}")
    text = "\n".join(texts)
    if not text.strip() and not images and not may_be_empty:
        raise RequestError(f"{where} is empty; say what is asked")
    return text, tuple(images)


def json_text(value: object, where: str) -> str:
    """Write a JSON value as the text that a model reads; RequestError if it is too deep, large or long."""
    values, level = 0, [value]
    for _ in range(MOST_DEPTH + 1):
        values += len(level)
        inner = [
            each.values() if isinstance(each, Mapping) else each for each in level if isinstance(each, list | dict)
        ]
        level = [each for those in inner for each in those]
        if not level or values > MOST_VALUES:
            break
    text = "" if level else json.dumps(value, ensure_ascii=False, indent=None)
    if level or values > MOST_VALUES or len(text.encode()) > MOST_BYTES:
        most = f"{MOST_DEPTH} levels, {MOST_VALUES:,} values or {MOST_BYTES // 1024} KiB"
        raise RequestError(f"{where} has more than {most}; shorten it")
    return text


def _object(value: object, where: str, known: set[str] | None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} must be an object, got {value!r:.80}")
    if known is not None and (unknown := sorted(map(str, value.keys() - known))):
        raise RequestError(f"{where} has an unknown key {unknown[0]!r:.60}; there are {', '.join(sorted(known))}")
    return value


def _list(value: object, where: str, least: int, most: int) -> Sequence[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not least <= len(value) <= most:
        raise RequestError(f"{where} must be a list of {least} to {most}, got {value!r:.80}")
    return value


def _text(values: Mapping[str, Any], key: str, where: str) -> str | None:
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise RequestError(f"{where}.{key} must be text, got {value!r:.80}")
    return value
