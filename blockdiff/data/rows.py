"""Reading training rows from JSONL; bad ones are refused with file, line, reason and remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockdiff.errors import DataError

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "model": "assistant",
}
REASONING_KEYS = ("reasoning", "reasoning_content")


@dataclass(frozen=True)
class Row:
    """One training row: either `prompt` and `response`, or `messages`; `where` is "file:line"."""

    where: str
    prompt: str | None = None
    response: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    id: str | None = None


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a JSONL file, in order; lines of only white space are passed over.

    Raises DataError "file:line: reason; what to do" at the first bad row, and for a file without any row.
    """
    path = Path(path)
    rows = [parse_row(text, where) for where, text in _lines(path)]
    if not rows:
        raise DataError(f"{path}: has no rows; write one JSON object per line")
    return rows


def parse_row(text: str, where: str) -> Row:
    """Check one line and make it a `Row`; raises DataError naming `where`."""
    try:
        return _row(json.loads(text, parse_constant=_refuse_constant), where)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: not valid JSON ({error.msg} at column {error.colno}); write one object per line"
        ) from None
    except RecursionError:
        raise DataError(f"{where}: JSON is nested too deeply; write one flat object per line") from None
    except _BadRow as bad:
        raise DataError(f"{where}: {bad}") from None


class _BadRow(Exception):
    """Why a row is refused; `parse_row` puts the place in front."""


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{where}: not valid UTF-8 (byte {error.start + 1}); save it as UTF-8"
                    ) from None
                if text.strip():
                    yield where, text
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a directory; name a JSONL file in it") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the file") from None


def _refuse_constant(name: str) -> Any:
    raise _BadRow(f"{name} is not JSON; write a number or null")


def _row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise _BadRow(
            f"the row is {_kind(value)}, not an object; write {{...}} with messages, or prompt and response"
        )
    identity = value.get("id")
    if identity is not None and (not isinstance(identity, str | int) or isinstance(identity, bool)):
        raise _BadRow(f"id is {_kind(identity)}; make it a string or an integer")
    identity = None if identity is None else str(identity)
    has_pair = "prompt" in value or "response" in value
    if "messages" in value:
        if has_pair:
            raise _BadRow("both messages and prompt/response are there; keep one form")
        return Row(where, messages=_messages(value["messages"]), id=identity)
    if not has_pair:
        keys = ", ".join(map(repr, value)) or "none"
        raise _BadRow(f"neither messages nor prompt and response (keys: {keys}); add them")
    for key in ("prompt", "response"):
        if key not in value:
            raise _BadRow(f"{key} is missing; a row needs prompt and response")
    prompt, response = _text(value["prompt"], "prompt"), _text(value["response"], "response")
    if not response:
        raise _BadRow("response is empty, so nothing can be learnt; fill it or remove the row")
    return Row(where, prompt=prompt, response=response, id=identity)


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list):
        raise _BadRow(f"messages is {_kind(value)}; make it a list of objects with role and content")
    messages = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))
    if not any(message["role"] == "assistant" for message in messages):
        raise _BadRow("no assistant message, so nothing can be learnt; add one or remove the row")
    for index, message in enumerate(messages):
        if message["role"] == "system" and index > 0:
            raise _BadRow(f"messages[{index}] has role system; only the first message can")
    return messages


def _message(value: Any, name: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _BadRow(f"{name} is {_kind(value)}; make it an object with role and content")
    for key in ("role", "content"):
        if key not in value:
            raise _BadRow(f"{name} has no {key}; add it")
    role = value["role"]
    if not isinstance(role, str) or role not in ROLES:
        raise _BadRow(f"{name} has role {role!r}; use one of {', '.join(ROLES)}")
    if value.get("tool_calls"):
        raise _BadRow(
            f"{name} has tool_calls, which are not supported; write them into content or remove the row"
        )
    message = {"role": ROLES[role], "content": _content(value["content"], f"{name}.content")}
    for key in REASONING_KEYS:
        if value.get(key) is not None:
            if message["role"] != "assistant":
                raise _BadRow(f"{name} has {key} but role {role}; only an assistant message can have it")
            message["reasoning"] = _text(value[key], f"{name}.{key}")
    if message["role"] == "assistant" and not message["content"].strip():
        raise _BadRow(f"{name}.content of the assistant is empty; fill it or remove the message")
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
    return names.get(type(value), "a number")
