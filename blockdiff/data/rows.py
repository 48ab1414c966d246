"""Rows to train on or to answer. Each is checked here, or refused with place, reason and remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from blockdiff.data.image_parts import (
    column_of_images,
    images_in,
    located,
    replaced,
    text_with_images,
    with_images,
)
from blockdiff.data.messages import (
    BadRow,
    ImageSource,
    Message,
    checked_messages,
    checked_text,
    checked_tools,
    type_in_words,
)
from blockdiff.errors import DataError

CONVERSATION_KEYS = ("messages", "conversations")
ALPACA_KEYS = ("instruction", "input", "output")
KEYS = ("prompt", "response", "messages", "tools", "system", "image", "images", "id")
CONTENT_KEYS = {"prompt", "response", "completion", "history", *ALPACA_KEYS, *CONVERSATION_KEYS}


@dataclass(frozen=True)
class Row:
    """One row: either `prompt` and `response`, or `messages` and maybe `tools` that it declares.

    `where` is "file:line" or "file:row N". A row that is to be answered needs no response. Images are in the parts of
    messages; those of a prompt are `images`, at its markers or before it.
    """

    where: str
    prompt: str | None = None
    response: str | None = None
    messages: tuple[Message, ...] | None = None
    id: str | None = None
    tools: tuple[Message, ...] | None = None
    images: tuple[ImageSource, ...] = ()

    @property
    def sources(self) -> list[ImageSource]:
        """All its images in the order of the text."""
        return list(self.images) if self.messages is None else images_in(self.messages)

    def located(self) -> Row:
        """The same row with absolute paths of its images; DataError for one that leads out of the file's folder."""
        found = tuple(located(each, self.where) for each in self.sources)
        if self.messages is None:
            return replace(self, images=found)
        return replace(self, messages=replaced(self.messages, found))

    def as_conversation(self) -> Row:
        """The same row with its prompt as the user's turn and its response as the assistant's."""
        if self.messages is not None:
            return self
        asked = text_with_images(self.prompt or "", self.images) if self.images else self.prompt or ""
        messages = {"role": "user", "content": asked}, {"role": "assistant", "content": self.response or ""}
        return replace(self, prompt=None, response=None, messages=messages, images=())


def written_texts(row: Row) -> Iterator[str]:
    """The texts that people wrote into a row: no names of roles, no turn tokens."""
    for text in (row.prompt, row.response):
        if text:
            yield text
    for message in row.messages or ():
        content = message.get("content")
        parts = content if isinstance(content, list) else ()
        texts = (message.get("reasoning"), content, *(part.get("text") for part in parts))
        yield from (text for text in texts if text and isinstance(text, str))


def check_row(value: Any, where: str, columns: Mapping[str, str] | None = None, *, is_asked: bool = False) -> Row:
    """Check one row, wherever it comes from, and make it a `Row`; raises DataError naming `where`.

    `columns` maps keys of KEYS to the column that holds them; without an entry a key is looked up by its name.
    Other forms are read as well: `prompt` and `completion`; the ShareGPT form, `conversations` of `from` and `value`;
    the Alpaca form, `instruction`, `input` and `output`, which becomes a conversation. With `is_asked` the row is to
    be answered, so it needs no response, and one beside its prompt is left alone. A `value` that could not be read is
    the DataError itself.
    """
    if isinstance(value, DataError):
        raise value
    try:
        return _row(_renamed(value, columns) if columns else value, where, is_asked)
    except BadRow as bad:
        raise DataError(f"{where}: {bad}") from None


def _renamed(value: Any, columns: Mapping[str, str]) -> Any:
    """The row with its columns under our names; where `columns` names one form of rows, the other form is left out."""
    if not isinstance(value, Mapping):
        return value
    for key, column in columns.items():
        if column not in value:
            columns_of_row = ", ".join(map(repr, value)) or "none"
            raise BadRow(f"column {column!r}, to be {key}, is not there (columns: {columns_of_row}); correct columns")
    others: tuple[str, ...] = CONVERSATION_KEYS if {"prompt", "response"} & columns.keys() else ()
    if "messages" in columns:
        others = tuple(CONTENT_KEYS)
    others = (*others, "image") if "images" in columns else others
    kept = {key: value[key] for key in (*KEYS, *CONTENT_KEYS) if key in value and key not in others}
    return {**kept, **{key: value[column] for key, column in columns.items()}}


def _row(value: Any, where: str, is_asked: bool) -> Row:
    pair_of = "prompt" if is_asked else "prompt and response"
    if not isinstance(value, Mapping):
        raise BadRow(f"the row is {type_in_words(value)}, not an object; write {{...}} with messages, or {pair_of}")
    identity = value.get("id")
    if identity is not None and (not isinstance(identity, str | int) or isinstance(identity, bool)):
        raise BadRow(f"id is {type_in_words(identity)}; make it a string or an integer")
    identity = None if identity is None else str(identity)
    is_pair = "prompt" in value or "response" in value
    images = column_of_images(value)
    conversations = [key for key in CONVERSATION_KEYS if key in value]
    if conversations:
        if is_pair:
            raise BadRow(f"both {conversations[0]} and prompt/response are there; keep one form")
        if len(conversations) > 1:
            raise BadRow("both messages and conversations are there; keep one")
        messages = checked_messages(value[conversations[0]], conversations[0])
        if not is_asked and not any(message["role"] == "assistant" for message in messages):
            raise BadRow("no assistant message, so nothing can be learnt; add one or remove the row")
        if not messages:
            raise BadRow(f"{conversations[0]} has no message; write what is asked")
        tools, messages = checked_tools(value.get("tools")), with_images(messages, images)
        return Row(where, messages=_with_system(messages, value.get("system")), id=identity, tools=tools)
    if not is_pair and "instruction" in value and (is_asked or "output" in value):
        messages = with_images(_alpaca(value, is_asked), images)
        return Row(where, messages=_with_system(messages, value.get("system")), id=identity)
    if not is_pair:
        raise BadRow(_neither(value, pair_of))
    for key in ("system", "tools"):
        if value.get(key):
            raise BadRow(f"{key} is there, but prompt rows have no turns; put it into prompt or write messages")
    if "prompt" not in value:
        raise BadRow(_missing(value, "prompt"))
    if is_asked:
        return Row(where, prompt=_asked(checked_text(value["prompt"], "prompt"), images), id=identity, images=images)
    name = "response" if "response" in value else "completion"
    if name not in value:
        raise BadRow(_missing(value, "response"))
    prompt, response = _of_pair(value, "prompt"), _of_pair(value, name)
    if not response:
        raise BadRow(f"{name} is empty, so nothing can be learnt; fill it or remove the row")
    return Row(where, prompt=_asked(prompt, images), response=response, id=identity, images=images)


def _asked(prompt: str, images: tuple[ImageSource, ...]) -> str:
    """A prompt that has a place for each of its images."""
    if images:
        text_with_images(prompt, images)
    return prompt


def _of_pair(value: Mapping[str, Any], key: str) -> str:
    """A text of a row with a prompt; lists of messages, which other programs write there, are refused with a remedy."""
    if isinstance(value[key], list):
        raise BadRow(
            f"{key} is a list, but prompt and response are texts; write all messages as one list, messages, or say "
            "with columns which columns hold the texts"
        )
    return checked_text(value[key], key)


def _alpaca(value: Mapping[str, Any], is_asked: bool) -> tuple[Message, ...]:
    """The turns of a row in the Alpaca form: what is asked, with its input under it, and the answer."""
    if value.get("history"):
        raise BadRow("history is there, which the form instruction, input, output does not have; write messages")
    asked = [checked_text(value["instruction"], "instruction"), checked_text(value.get("input") or "", "input")]
    user = {"role": "user", "content": "\n\n".join(text for text in asked if text)}
    if is_asked:
        return (user,)
    answer = checked_text(value["output"], "output")
    if not answer.strip():
        raise BadRow("output is empty, so nothing can be learnt; fill it or remove the row")
    return user, {"role": "assistant", "content": answer}


def _neither(value: Mapping[str, Any], pair_of: str) -> str:
    """The reason for refusing a row in no known form, with the key that may be a mistake in writing."""
    row_keys = (*CONTENT_KEYS, *KEYS)
    near = ((key, get_close_matches(str(key), row_keys, 1, cutoff=0.75)) for key in value if key not in row_keys)
    meant = "".join(f"; did you mean {found[0]!r} by {key!r}?" for key, found in near if found)
    keys = ", ".join(map(repr, value)) or "none"
    remedy = "add them, or name the columns that have them, such as prompt=question,response=answer"
    return f"neither messages nor {pair_of} (keys: {keys}){meant}; {remedy}"


def _missing(value: Mapping[str, Any], key: str) -> str:
    others = ", ".join(repr(name) for name in value if name not in KEYS)
    hint = f", or say with columns which column is the {key} (there are: {others})" if others else ""
    return f"{key} is missing; a row needs prompt and response{hint}"


def _with_system(messages: tuple[Message, ...], system: Any) -> tuple[Message, ...]:
    """The conversation with the row's own system text, which some files keep beside the messages."""
    if system is None or system == "":
        return messages
    if messages[0]["role"] == "system":
        raise BadRow("system is there and a system message too; keep one")
    return ({"role": "system", "content": checked_text(system, "system")}, *messages)
