"""`Row`, a row to train on or to answer, and `check_row`, which makes one or raises DataError with a remedy."""

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
MAX_CHARACTERS = 2 << 20  # of a row: some 500,000 tokens, which need half a GiB while they are made
# The keys that are read of a row, by the key that decides its form.
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
    """A checked row: either `prompt` and `response`, or `messages` and perhaps `tools`.

    where: "file:line" or "file:row N".
    response: None if the row is to be answered.
    images: the images of a prompt, at its markers or before it. Images of messages are in their parts.
    is_text: the row is one text, which is the response.
    decision: the questions in the last message, answered by labels; `targets` has each label's probability.
    unread: keys of the row and of its messages that nothing reads.
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
        """All images in the order of the text."""
        return list(self.images) if self.messages is None else images_in(self.messages)

    @property
    def characters(self) -> int:
        """The number of characters to tokenise."""
        return characters((self.prompt, self.response, self.messages, self.tools))

    def located(self) -> Row:
        """Make the paths of images absolute. Raises DataError for a path that leads out of the file's folder."""
        images = tuple(located(each, self.where) for each in self.sources)
        if self.messages is None:
            return replace(self, images=images)
        return replace(self, messages=replaced(self.messages, images))

    def as_conversation(self) -> Row:
        """Turn prompt and response into a user's and an assistant's message. Other rows stay."""
        if self.messages is not None or self.is_text:
            return self
        question = text_with_images(self.prompt or "", self.images) if self.images else self.prompt or ""
        messages = {"role": "user", "content": question}, {"role": "assistant", "content": self.response or ""}
        return replace(self, prompt=None, response=None, messages=messages, images=())


def characters(value: Any) -> int:
    """The number of characters in the texts of a row's value."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(str(key)) + characters(each) for key, each in value.items())
    return sum(map(characters, value)) if isinstance(value, list | tuple) else 0


def written_texts(row: Row) -> Iterator[str]:
    """Yield the texts that people wrote into a row, without names of roles and turn tokens."""
    for text in (row.prompt, row.response):
        if text:
            yield text
    for message in row.messages or ():
        content = message.get("content")
        parts = content if isinstance(content, list) else ()
        texts = (message.get("reasoning"), content, *(part.get("text") for part in parts))
        yield from (text for text in texts if text and isinstance(text, str))


def check_row(value: Any, where: str, columns: Mapping[str, str] | None = None, *, is_asked: bool = False) -> Row:
    """Check a row and make it a `Row`. Raises DataError with `where`.

    Accepted are `prompt` and `response` or `completion`, as texts or as lists of messages; `messages`; the ShareGPT
    form, `conversations` of `from` and `value`; the Alpaca form, `instruction`, `input` and `output`, which becomes a
    conversation; and `text` alone.

    value: the row, or the DataError that reading it raised.
    columns: the column of each key of KEYS (default: the column of that name).
    is_asked: the row is to be answered, so it needs no response, and one next to its prompt is ignored.
    """
    if isinstance(value, DataError):
        raise value
    try:
        if not isinstance(value, Mapping):
            needed = "prompt" if is_asked else "prompt and response"
            raise BadRow(f"the row is {type_in_words(value)}, not an object; write {{...}} with messages, or {needed}")
        judged = [key for key in JUDGEMENTS if value.get(key) is False or value.get(key) in ("false", "False")]
        if judged and not is_asked:
            raise BadRow(f"{judged[0]} is false, so its answer should not be learnt; remove the row")
        unread: set[str] = set()
        named = _renamed(value, columns) if columns else value
        form = _form(named, is_asked)
        row = _row(named, form, where, is_asked, unread)
        if (length := row.characters) > MAX_CHARACTERS:
            raise BadRow(f"{length:,} characters, more than the limit of {MAX_CHARACTERS:,} for a row; split it")
    except BadRow as bad:
        raise DataError(f"{where}: {bad}") from None
    read = {*READ[form], *COMMON, *(columns or {}).values(), *(key for key in JUDGEMENTS if value.get(key) is True)}
    unread |= {str(key) for key, each in value.items() if key not in read and each is not None}
    return replace(row, unread=frozenset(unread)) if unread else row


def _renamed(value: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Rename columns to keys. If `columns` names keys of one form of rows, keys of other forms are left out."""
    for key, column in columns.items():
        if column not in value:
            columns_of_row = ", ".join(map(repr, value)) or "none"
            raise BadRow(f"data.columns.{key}: there is no column {column!r} (there are: {columns_of_row}); correct it")
    others: tuple[str, ...] = CONVERSATION_KEYS if {"prompt", "response"} & columns.keys() else ()
    if "messages" in columns:
        others = tuple(CONTENT_KEYS)
    others = (*others, "image") if "images" in columns else others
    named = {key: value[key] for key in (*KEYS, *CONTENT_KEYS) if key in value and key not in others}
    return {**named, **{key: value[column] for key, column in columns.items()}}


def _form(value: Mapping[str, Any], is_asked: bool) -> str:
    """Return the key of READ that decides the form of a row. Keys with null values decide only if no other does."""
    present = [key for key in value if value[key] is not None]
    conversations = [key for key in CONVERSATION_KEYS if key in present]
    pair = [key for key in ("prompt", "response") if key in present]
    if conversations and pair:
        raise BadRow(
            f"has both {conversations[0]} and prompt/response; keep one form, or choose one with data.columns, such as "
            f"messages: {conversations[0]}"
        )
    if len(conversations) > 1:
        raise BadRow("has both messages and conversations; keep one")
    if conversations or pair:
        return (*conversations, "prompt")[0]
    if "instruction" in value and (is_asked or "output" in value):
        return "instruction"
    if "text" in present and not is_asked:
        return "text"
    null_key = next((key for key in (*CONVERSATION_KEYS, "prompt", "response") if key in value), None)
    if null_key is None:
        raise BadRow(_neither(value, "prompt" if is_asked else "prompt and response"))
    return null_key if null_key in READ else "prompt"


def _row(value: Mapping[str, Any], form: str, where: str, is_asked: bool, unread: set[str]) -> Row:
    """Make a row of a form of READ. Keys of its messages that nothing reads are added to `unread`."""
    identity, images = _identity(value.get("id")), column_of_images(value)
    turns = _turns(value, form, is_asked, unread)
    if turns is not None:
        if not turns:
            raise BadRow(f"{form} has no message; write a question")
        messages = _with_system(with_images(turns, images), value.get("system"))
        tools = None if form == "instruction" else checked_tools(value.get("tools"))
        return Row(where, messages=messages, id=identity, tools=tools)
    for key in ("system", "tools"):
        if value.get(key):
            raise BadRow(f"has {key}, but rows with {form} have no turns; put it into {form} or write messages")
    if form == "text":
        text = checked_text(value["text"], "text")
        if not text or images:
            raise BadRow(f"{'text rows have no images' if text else 'text is empty'}; write prompt and response")
        return Row(where, prompt="", response=text, id=identity, is_text=True)
    if "prompt" not in value:
        raise BadRow(_missing(value, "prompt"))
    prompt = _of_pair(value, "prompt") if not is_asked else checked_text(value["prompt"], "prompt")
    if images:  # raises BadRow unless each has a position
        text_with_images(prompt, images)
    if is_asked:
        return Row(where, prompt=prompt, id=identity, images=images)
    name = "response" if "response" in value else "completion"
    if name not in value:
        raise BadRow(_missing(value, "response"))
    response = _of_pair(value, name)
    if not response:
        raise BadRow(f"{name} is empty, so there is nothing to learn; fill it or remove the row")
    return Row(where, prompt=prompt, response=response, id=identity, images=images)


def _identity(value: Any) -> str | None:
    """Return the value of a row's `id` as a string (1.0 as "1"), None if it has none.

    Raises BadRow unless it is a string or an integer.
    """
    if isinstance(value, float) and value.is_integer():  # an integer in a column with nulls
        value = int(value)
    if value is not None and (not isinstance(value, str | int) or isinstance(value, bool)):
        raise BadRow(f"id is {type_in_words(value)}; make it a string or an integer")
    return None if value is None else str(value)


def _turns(value: Mapping[str, Any], form: str, is_asked: bool, unread: set[str]) -> tuple[Message, ...] | None:
    """Return the messages of a row; None if it has texts. Raises BadRow if a row to train on has nothing to learn."""
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
        raise BadRow("no assistant message, so there is nothing to learn; add one or remove the row")
    if not is_asked and not any(message.get("is_learnt", True) for message in answers):
        raise BadRow("every assistant message is marked as not to be learnt; remove the row")
    return messages


def _continued(value: Mapping[str, Any], is_asked: bool, unread: set[str]) -> tuple[Message, ...]:
    """The messages of a row whose prompt and completion are lists of messages. Those of the prompt are not learnt."""
    prompt = named_messages(value["prompt"], "prompt", unread=unread)
    if is_asked:
        return in_turn(prompt)
    for _, message in prompt:
        message |= {"is_learnt": False} if message["role"] == "assistant" else {}
    name = "response" if "response" in value else "completion"
    if not isinstance(value.get(name), list | tuple):
        there = f"{name} is {type_in_words(value[name])}" if name in value else "there is no completion"
        raise BadRow(f"prompt is a list of messages, but {there}; write both as lists of messages")
    return in_turn([*prompt, *named_messages(value[name], name, unread=unread)])


def _of_pair(value: Mapping[str, Any], key: str) -> str:
    """The text of `prompt` or `response`. Raises BadRow if only one of them is a list of messages."""
    if isinstance(value[key], list):
        raise BadRow(
            f"{key} is a list, but prompt is {type_in_words(value['prompt'])}; write both as texts or both as lists of "
            "messages, or name their columns in data.columns"
        )
    return checked_text(value[key], key)


def _alpaca(value: Mapping[str, Any], is_asked: bool) -> tuple[Message, ...]:
    """The messages of a row in the Alpaca form: the instruction with its input below it, and the output."""
    if value.get("history"):
        raise BadRow("has history, but rows of instruction, input and output have none; write messages")
    parts = [checked_text(value["instruction"], "instruction"), checked_text(value.get("input") or "", "input")]
    user = {"role": "user", "content": "\n\n".join(text for text in parts if text)}
    if is_asked:
        return (user,)
    answer = checked_text(value["output"], "output")
    if not answer.strip():
        raise BadRow("output is empty, so there is nothing to learn; fill it or remove the row")
    return user, {"role": "assistant", "content": answer}


def _neither(value: Mapping[str, Any], pair_of: str) -> str:
    """Return the message for a row in no known form, with suggestions for keys that may be misspelt.

    pair_of: the keys that could replace `messages`, in words ("prompt and response").
    """
    row_keys = (*CONTENT_KEYS, *KEYS)
    near = ((key, get_close_matches(str(key), row_keys, 1, cutoff=0.75)) for key in value if key not in row_keys)
    meant = "".join(f"; did you mean {matches[0]!r} by {key!r}?" for key, matches in near if matches)
    keys = ", ".join(map(repr, value)) or "none"
    remedy = "add them, or name their columns in data.columns, such as {prompt: question, response: answer}"
    return f"neither messages nor {pair_of} (keys: {keys}){meant}; {remedy}"


def _missing(value: Mapping[str, Any], key: str) -> str:
    others = ", ".join(repr(name) for name in value if name not in KEYS)
    hint = f", or data.columns.{key} with one of the columns {others}" if others else ""
    return f"{key} is missing; a row needs prompt and response{hint}"


def _with_system(messages: tuple[Message, ...], system: Any) -> tuple[Message, ...]:
    """Add the row's system text, which some files store next to the messages, to the conversation."""
    if system is None or system == "":
        return messages
    if messages[0]["role"] == "system":
        raise BadRow("has both system and a system message; keep one")
    return ({"role": "system", "content": checked_text(system, "system")}, *messages)
