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
    in_turn,
    named_messages,
    type_in_words,
)
from blockdiff.data.spellings import JUDGEMENTS
from blockdiff.decisions.form import Asked
from blockdiff.errors import DataError

CONVERSATION_KEYS = ("messages", "conversations")
ALPACA_KEYS = ("instruction", "input", "output")
KEYS = ("prompt", "response", "messages", "tools", "system", "image", "images", "id")
CONTENT_KEYS = {"prompt", "response", "completion", "history", "text", *JUDGEMENTS, *ALPACA_KEYS, *CONVERSATION_KEYS}
LONGEST = 2 << 20  # characters of a row: some 500,000 tokens, which take half a GiB while they are made
# The keys that are read of a row, by the one that says which form it has.
COMMON = ("id", "image", "images", "system")
READ = {
    "messages": ("messages", "tools"),
    "conversations": ("conversations", "tools"),
    "prompt": ("prompt", "response", "completion", "tools"),
    "instruction": ALPACA_KEYS,
    "text": ("text",),
}


@dataclass(frozen=True)
class Row:
    """One row: either `prompt` and `response`, or `messages` and maybe `tools` that it declares.

    `where` is "file:line" or "file:row N". A row that is to be answered needs no response. Images are in the parts of
    messages; those of a prompt are `images`, at its markers or before it. A row that is one text (`is_text`) has it as
    response. A row that asks `decision` in its last message is answered by labels, of which `targets` has the
    probability of each for every question. `unread` are its keys, and those of its messages, that nothing reads.
    """

    where: str
    prompt: str | None = None
    response: str | None = None
    messages: tuple[Message, ...] | None = None
    id: str | None = None
    tools: tuple[Message, ...] | None = None
    images: tuple[ImageSource, ...] = ()
    is_text: bool = False
    decision: Asked | None = None
    targets: tuple[tuple[float, ...], ...] = ()
    unread: frozenset[str] = frozenset()

    @property
    def sources(self) -> list[ImageSource]:
        """All its images in the order of the text."""
        return list(self.images) if self.messages is None else images_in(self.messages)

    @property
    def characters(self) -> int:
        """The number of characters that are to be tokenised."""
        return characters((self.prompt, self.response, self.messages, self.tools))

    def located(self) -> Row:
        """The same row with absolute paths of its images; DataError for one that leads out of the file's folder."""
        found = tuple(located(each, self.where) for each in self.sources)
        if self.messages is None:
            return replace(self, images=found)
        return replace(self, messages=replaced(self.messages, found))

    def as_conversation(self) -> Row:
        """The same row with its prompt as the user's turn and its response as the assistant's."""
        if self.messages is not None or self.is_text:
            return self
        asked = text_with_images(self.prompt or "", self.images) if self.images else self.prompt or ""
        messages = {"role": "user", "content": asked}, {"role": "assistant", "content": self.response or ""}
        return replace(self, prompt=None, response=None, messages=messages, images=())


def characters(value: Any) -> int:
    """The number of characters in the texts of a row's value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + characters(each) for key, each in value.items())
    return sum(map(characters, value)) if isinstance(value, list | tuple) else 0


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
    Other forms are read as well: `prompt` and `completion`, as texts or as lists of messages; the ShareGPT form,
    `conversations` of `from` and `value`; the Alpaca form, `instruction`, `input` and `output`, which becomes a
    conversation; `text` alone. With `is_asked` the row is to be answered, so it needs no response, and one beside its
    prompt is left alone. A `value` that could not be read is the DataError itself.
    """
    if isinstance(value, DataError):
        raise value
    try:
        if not isinstance(value, Mapping):
            needed = "prompt" if is_asked else "prompt and response"
            raise BadRow(f"the row is {type_in_words(value)}, not an object; write {{...}} with messages, or {needed}")
        judged = [key for key in JUDGEMENTS if value.get(key) is False or value.get(key) in ("false", "False")]
        if judged and not is_asked:
            raise BadRow(f"{judged[0]} is false, so its answer is one not to learn; remove the row")
        unread: set[str] = set()
        named = _renamed(value, columns) if columns else value
        form = _form(named, is_asked)
        row = _row(named, form, where, is_asked, unread)
        if (length := row.characters) > LONGEST:
            raise BadRow(f"{length:,} characters, more than the {LONGEST:,} of a row; split it")
    except BadRow as bad:
        raise DataError(f"{where}: {bad}") from None
    read = {*READ[form], *COMMON, *(columns or {}).values(), *(key for key in JUDGEMENTS if value.get(key) is True)}
    unread |= {str(key) for key, each in value.items() if key not in read and each is not None}
    return replace(row, unread=frozenset(unread)) if unread else row


def _renamed(value: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """The row with its columns under our names; where `columns` names one form of rows, the other form is left out."""
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


def _form(value: Mapping[str, Any], is_asked: bool) -> str:
    """The key of READ that says which form a row has; one whose value is null says so only where no other does."""
    there = [key for key in value if value[key] is not None]
    conversations = [key for key in CONVERSATION_KEYS if key in there]
    pair = [key for key in ("prompt", "response") if key in there]
    if conversations and pair:
        raise BadRow(
            f"both {conversations[0]} and prompt/response are there; keep one form, or say which with data.columns, "
            f"such as messages: {conversations[0]}"
        )
    if len(conversations) > 1:
        raise BadRow("both messages and conversations are there; keep one")
    if conversations or pair:
        return (*conversations, "prompt")[0]
    if "instruction" in value and (is_asked or "output" in value):
        return "instruction"
    if "text" in there and not is_asked:
        return "text"
    found = next((key for key in (*CONVERSATION_KEYS, "prompt", "response") if key in value), None)
    if found is None:
        raise BadRow(_neither(value, "prompt" if is_asked else "prompt and response"))
    return found if found in READ else "prompt"


def _row(value: Mapping[str, Any], form: str, where: str, is_asked: bool, unread: set[str]) -> Row:
    """A row of one of the forms of READ; `unread` takes the keys of its messages that nothing reads."""
    identity, images = _identity(value.get("id")), column_of_images(value)
    turns = _turns(value, form, is_asked, unread)
    if turns is not None:
        if not turns:
            raise BadRow(f"{form} has no message; write what is asked")
        messages = _with_system(with_images(turns, images), value.get("system"))
        tools = None if form == "instruction" else checked_tools(value.get("tools"))
        return Row(where, messages=messages, id=identity, tools=tools)
    for key in ("system", "tools"):
        if value.get(key):
            raise BadRow(f"{key} is there, but {form} rows have no turns; put it into {form} or write messages")
    if form == "text":
        text = checked_text(value["text"], "text")
        if not text or images:
            raise BadRow(f"text {'has images beside it' if text else 'is empty'}; write prompt and response")
        return Row(where, prompt="", response=text, id=identity, is_text=True)
    if "prompt" not in value:
        raise BadRow(_missing(value, "prompt"))
    prompt = _of_pair(value, "prompt") if not is_asked else checked_text(value["prompt"], "prompt")
    if images:  # each needs a place
        text_with_images(prompt, images)
    if is_asked:
        return Row(where, prompt=prompt, id=identity, images=images)
    name = "response" if "response" in value else "completion"
    if name not in value:
        raise BadRow(_missing(value, "response"))
    response = _of_pair(value, name)
    if not response:
        raise BadRow(f"{name} is empty, so nothing can be learnt; fill it or remove the row")
    return Row(where, prompt=prompt, response=response, id=identity, images=images)


def _identity(value: Any) -> str | None:
    """The id of a row as a string."""
    if isinstance(value, float) and value.is_integer():  # an integer in a column with nulls
        value = int(value)
    if value is not None and (not isinstance(value, str | int) or isinstance(value, bool)):
        raise BadRow(f"id is {type_in_words(value)}; make it a string or an integer")
    return None if value is None else str(value)


def _turns(value: Mapping[str, Any], form: str, is_asked: bool, unread: set[str]) -> tuple[Message, ...] | None:
    """The messages of a row; None where it has texts. BadRow where a row to learn from has nothing to be learnt."""
    if form in CONVERSATION_KEYS:
        messages = checked_messages(value[form], form, unread=unread)
    elif form == "instruction":
        messages = _alpaca(value, is_asked)
    elif form == "prompt" and isinstance(value.get("prompt"), list | tuple):
        messages = _continued(value, is_asked, unread)
    else:
        return None
    answers = [message for message in messages if message["role"] == "assistant"]
    if not is_asked and not answers:
        raise BadRow("no assistant message, so nothing can be learnt; add one or remove the row")
    if not is_asked and not any(message.get("is_learnt", True) for message in answers):
        raise BadRow("each message of the assistant is marked as one not to learn; remove the row")
    return messages


def _continued(value: Mapping[str, Any], is_asked: bool, unread: set[str]) -> tuple[Message, ...]:
    """The turns of a row whose prompt and completion are lists of messages; those of the prompt are not learnt."""
    asked = named_messages(value["prompt"], "prompt", unread=unread)
    if is_asked:
        return in_turn(asked)
    for _, message in asked:
        message |= {"is_learnt": False} if message["role"] == "assistant" else {}
    name = "response" if "response" in value else "completion"
    if not isinstance(value.get(name), list | tuple):
        there = f"{name} is {type_in_words(value[name])}" if name in value else "there is no completion"
        raise BadRow(f"prompt is a list of messages, but {there}; write both as lists of messages")
    return in_turn([*asked, *named_messages(value[name], name, unread=unread)])


def _of_pair(value: Mapping[str, Any], key: str) -> str:
    """A text of a row with a prompt; a list of messages needs another one beside it."""
    if isinstance(value[key], list):
        raise BadRow(
            f"{key} is a list, but prompt is {type_in_words(value['prompt'])}; write both as texts or as lists of "
            "messages, or say with columns which columns hold them"
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
