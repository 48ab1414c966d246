"""JSON that has one meaning only, read the same way wherever rows come from; needs nothing beside Python."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from blockdiff.errors import DataError

BOM = b"\xef\xbb\xbf"


def decoded(line: bytes, where: str) -> str:
    """A line as text; raises DataError naming `where` if it is not UTF-8."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 (byte {error.start + 1}); save it as UTF-8") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON; write a number or null")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice, and only one can count; remove the other")
    return value


# Reads JSON strictly: a key must not appear twice, and NaN is no number. Raises ValueError.
DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)


def parsed(text: str, where: str, decode: Callable[..., Any] = DECODER.decode, *begin: int) -> Any:
    """The value that a method of DECODER makes of a text; DataError naming `where` if the text is not valid."""
    try:
        return decode(text, *begin)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, " * bool(begin) + f"column {error.colno}"
        reason = error.msg.removesuffix(" at")  # as some of Python's end
        remedy = "repair it" if begin else "write one object per line"
        raise DataError(f"{where}: not valid JSON ({reason} at {place}); {remedy}") from None
    except RecursionError:
        raise DataError(f"{where}: JSON is nested too deeply; write flat objects") from None
    except ValueError as error:  # a key that appears twice, NaN, an integer of thousands of digits
        raise DataError(f"{where}: {error}") from None


class BadRow(Exception):
    """The reason for refusing a row; the reader of the file adds the place."""


def type_in_words(value: Any) -> str:
    """The type of a JSON value, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    number = "a number" if isinstance(value, int | float) else type(value).__name__
    return names.get(type(value), number)


def from_json(value: Any, name: str, opens: str) -> Any:
    """The JSON value in a string that begins with one of `opens` (CSV has no lists); any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(tuple(opens)):
        return value
    try:
        return DECODER.decode(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{name} is a string that is not valid JSON ({error}); write JSON") from None
