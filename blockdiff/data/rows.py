"""What a training row is. Each one is checked here, wherever it is from, or refused with place, reason and remedy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from blockdiff.data.formats import DECODER
from blockdiff.errors import DataError

# What rows call the roles, and what they are called here.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "model": "assistant"}
# Further names, in conversations of the ShareGPT form.
SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant"}
REASONING_KEYS = ("reasoning", "reasoning_content")
CONVERSATION_KEYS = ("messages", "conversations")
CONTENT_KEYS = {"prompt", "response", *CONVERSATION_KEYS}
KEYS = ("prompt", "response", "messages", "system", "id")


@dataclass(frozen=True)
class Row:
    """One training row: either `prompt` and `response`, or `messages`; `where` is "file:line" or "file:row N"."""

    where: str
    prompt: str | None = None
    response: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    id: str | None = None

    def as_conversation(self) -> Row:
        """The same row with its prompt as the user's turn and its response as the assistant's."""
        if self.messages is not None:
            return self
        turns = (("user", self.prompt), ("assistant", self.response))
        messages = tuple({"role": role, "content": text or ""} for role, text in turns)
        return replace(self, prompt=None, response=None, messages=messages)


def texts_of(row: Row) -> Iterator[str]:
    """The texts that people wrote into a row: no names of roles, no turn tokens."""
    for text in (row.prompt, row.response):
        if text:
            yield text
    for message in row.messages or ():
        yield from (message[key] for key in ("reasoning", "content") if message.get(key))


def check_row(value: Any, where: str, columns: Mapping[str, str] | None = None) -> Row:
    """Check one row, wherever it comes from, and make it a `Row`; raises DataError naming `where`.

    `columns` maps keys of KEYS to the column that holds them; without an entry a key is looked up by its name.
    Conversations may be in the ShareGPT form too: `conversations` of `from` and `value`.
    """
    try:
        return _row(_renamed(value, columns) if columns else value, where)
    except _BadRow as bad:
        raise DataError(f"{where}: {bad}") from None


class _BadRow(Exception):
    """Why a row is refused; `check_row` adds the place."""


def _renamed(value: Any, columns: Mapping[str, str]) -> Any:
    """The row with its columns under our names; where `columns` names one form of rows, the other form is left out."""
    if not isinstance(value, Mapping):
        return value
    for key, column in columns.items():
        if column not in value:
            columns_of_row = ", ".join(map(repr, value)) or "none"
            raise _BadRow(f"column {column!r}, to be {key}, is not there (columns: {columns_of_row}); correct columns")
    others: tuple[str, ...] = CONVERSATION_KEYS if {"prompt", "response"} & columns.keys() else ()
    if "messages" in columns:
        others = ("prompt", "response", *CONVERSATION_KEYS)
    kept = {key: value[key] for key in (*KEYS, *CONVERSATION_KEYS) if key in value and key not in others}
    return {**kept, **{key: value[column] for key, column in columns.items()}}


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, Mapping):
        raise _BadRow(
            f"the row is {_kind(value)}, not an object; write {{...}} with messages, or prompt and response"
        )
    identity = value.get("id")
    if identity is not None and (not isinstance(identity, str | int) or isinstance(identity, bool)):
        raise _BadRow(f"id is {_kind(identity)}; make it a string or an integer")
    identity = None if identity is None else str(identity)
    has_pair = "prompt" in value or "response" in value
    system = value.get("system")
    conversations = [key for key in CONVERSATION_KEYS if key in value]
    if conversations:
        if has_pair:
            raise _BadRow(f"both {conversations[0]} and prompt/response are there; keep one form")
        if len(conversations) > 1:
            raise _BadRow("both messages and conversations are there; keep one")
        messages = _messages(value[conversations[0]], conversations[0])
        return Row(where, messages=_with_system(messages, system), id=identity)
    if not has_pair:
        keys = ", ".join(map(repr, value)) or "none"
        raise _BadRow(
            f"neither messages nor prompt and response (keys: {keys}); add them, or say with columns what they are"
        )
    for key in ("prompt", "response"):
        if key not in value:
            others = ", ".join(repr(name) for name in value if name not in KEYS)
            hint = f", or say with columns which column is the {key} (there are: {others})" if others else ""
            raise _BadRow(f"{key} is missing; a row needs prompt and response{hint}")
    if system is not None and system != "":
        raise _BadRow("system is there, but prompt/response rows have no turns; put it into prompt or write messages")
    prompt, response = _text(value["prompt"], "prompt"), _text(value["response"], "response")
    if not response:
        raise _BadRow("response is empty, so nothing can be learnt; fill it or remove the row")
    return Row(where, prompt=prompt, response=response, id=identity)


def _messages(value: Any, name: str) -> tuple[dict[str, str], ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):  # a CSV file has no lists
        try:
            value = DECODER.decode(value)
        except (ValueError, RecursionError) as error:
            raise _BadRow(f"{name} is a string that is not valid JSON ({error}); write a JSON list") from None
    if not isinstance(value, list):
        raise _BadRow(f"{name} is {_kind(value)}; make it a list of objects with role and content")
    messages = tuple(_message(message, f"{name}[{index}]") for index, message in enumerate(value))
    if not any(message["role"] == "assistant" for message in messages):
        raise _BadRow("no assistant message, so nothing can be learnt; add one or remove the row")
    for index, message in enumerate(messages):
        if message["role"] == "system" and index > 0:
            raise _BadRow(f"{name}[{index}] has role system; only the first message can")
    return messages


def _with_system(messages: tuple[dict[str, str], ...], system: Any) -> tuple[dict[str, str], ...]:
    """The conversation with the row's own system text, which some files keep beside the messages."""
    if system is None or system == "":
        return messages
    if messages[0]["role"] == "system":
        raise _BadRow("system is there and a system message too; keep one")
    return ({"role": "system", "content": _text(system, "system")}, *messages)


def _message(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _BadRow(f"{name} is {_kind(value)}; make it an object with role and content")
    is_sharegpt = "from" in value and "role" not in value
    role_key, content_key = ("from", "value") if is_sharegpt else ("role", "content")
    for key in (role_key, content_key):
        if key not in value:
            raise _BadRow(f"{name} has no {key}; add it")
    role, roles = value[role_key], {**ROLES, **SPEAKERS} if is_sharegpt else ROLES
    if not isinstance(role, str) or role not in roles:
        raise _BadRow(f"{name} has {'role' if not is_sharegpt else 'from'} {role!r}; use one of {', '.join(roles)}")
    if value.get("tool_calls"):
        raise _BadRow(
            f"{name} has tool_calls, which are not supported; write them into content or remove the row"
        )
    message = {"role": roles[role], "content": _content(value[content_key], f"{name}.{content_key}")}
    for key in REASONING_KEYS:
        if value.get(key) is not None:
            if message["role"] != "assistant":
                raise _BadRow(f"{name} has {key} but role {role}; only an assistant message can have it")
            message["reasoning"] = _text(value[key], f"{name}.{key}")
    if message["role"] == "assistant" and not message["content"].strip():
        raise _BadRow(f"{name}.{content_key} of the assistant is empty; fill it or remove the message")
    return message


def _content(value: Any, name: str) -> str:
    """Content is text, or a list of text parts as multimodal files write it."""
    if not isinstance(value, list):
        return _text(value, name)
    parts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise _BadRow(f"{name}[{index}] is {kind!r}; only text parts are supported")
        parts.append(_text(part.get("text"), f"{name}[{index}].text"))
    return "".join(parts)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise _BadRow(f"{name} is {_kind(value)}; make it a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadRow(f"{name} has half of a surrogate pair (\\ud800-\\udfff); repair the escape") from None
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    number = "a number" if isinstance(value, int | float) else type(value).__name__
    return names.get(type(value), number)
