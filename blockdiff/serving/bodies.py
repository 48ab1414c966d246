"""The bodies of requests: read as JSON (large ones off the event loop), and checked up to the first error."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from pydantic import ValidationError

from blockdiff.serving.protocol import Body
from blockdiff.serving.refusals import Refused

_LARGE = threading.Lock()
MOST_VALUES = 1 << 20  # JSON values of a body: each takes a microsecond, and up to 30 times its bytes to parse
LARGE_BYTES = 1 << 16  # bytes from which on another thread parses a body
NO_OBJECT = "the body is not a JSON object; send one with the header Content-Type: application/json"
B = TypeVar("B", bound=Body)


async def read_body(http: HttpRequest, kind: type[B]) -> B:
    """Read and check the body of a request. Raises Refused with the first error in it."""
    content = b"".join([part async for part in http.stream()])  # `http.body()` would keep a copy
    media_type = http.headers.get("content-type", "").partition(";")[0].strip()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise Refused(NO_OBJECT)
    if len(content) < LARGE_BYTES:
        return parsed_body(content, kind, http.url.path)
    return await run_in_threadpool(_alone, parsed_body, content, kind, http.url.path)


def _alone(parse: Callable[..., B], *arguments: Any) -> B:
    """Call `parse` under a lock, so that only one large body is parsed at a time."""
    with _LARGE:
        return parse(*arguments)


def parsed_body(content: bytes, kind: type[B], path: str) -> B:
    """Parse JSON text as a body of type `kind`. Raises Refused with the first error in it.

    path: the route's, for messages.
    """
    if sum(map(content.count, (b",", b"[", b"{"))) > MOST_VALUES:  # also counts signs in texts; no prompt has so many
        raise Refused(f"the body has more than {MOST_VALUES:,} values; send fewer", 413, "body_too_large")
    try:
        value = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise Refused(NO_OBJECT) from None
    if not isinstance(value, dict):
        raise Refused(NO_OBJECT)
    return checked_body(value, kind, path)


def checked_body(given: dict[str, Any], kind: type[B], path: str) -> B:
    """Make a body of type `kind` from a JSON object.

    Raises Refused with the first error, of which it quotes little, and with the field as `param`.
    """
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = _nearest(error.errors(include_url=False, include_input=False), given)
    field = _place(first["loc"], given, first["type"] == "missing")
    words = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        words = f"is not a field of {path}; leave it out"
    elif first["type"] == "value_error":
        field, _, words = words.partition(" ")
        field = field.rstrip(":")
    else:
        words = f"{words[:1].lower()}{words[1:]}"
    raise Refused(f"{field}: {words}" if field else words, param=field or None)


def _nearest(errors: list[Any], body: dict[str, Any]) -> Any:
    """Choose the error to report of those that pydantic lists for the types of a field.

    It is the first. But if that says only that the value has another type, it is the first error inside the value,
    found where the value has a type that the field allows.
    """
    field = _place(errors[0]["loc"], body, False)
    if errors[0]["type"].endswith("_type"):
        for each in errors:
            if not each["type"].endswith("_type") and f"{_place(each['loc'], body, False)}.".startswith(f"{field}."):
                return each
    return errors[0]


def _place(location: Sequence[Any], value: Any, is_missing: bool) -> str:
    """Return the path of a field, such as `messages.0.role`, without pydantic's names for alternatives of its type.

    is_missing: the last name is of a field that `value` lacks.
    """
    path = []
    for part in location:
        is_there = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if not is_there and not (is_missing and isinstance(value, dict)):
            break
        path.append(f"{part!s:.80}")
        value = value.get(part) if isinstance(value, dict) else value[part]
    return ".".join(path)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
