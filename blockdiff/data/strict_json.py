"""JSON with one meaning only, read in the same way from all sources of rows. It needs only Python's library."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from blockdiff.errors import DataError

BOM = b"\xef\xbb\xbf"


def decoded(line: bytes, where: str) -> str:
    """Decode a line as UTF-8. Raises DataError with `where` if it is not valid."""
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
    """Return the value of a text, read by a method of DECODER. Raises DataError with `where` if it is not valid.

    begin: the character at which `raw_decode` begins.
    """
    try:
        return decode(text, *begin)
    except json.JSONDecodeError as error:
        position = f"line {error.lineno}, " * bool(begin) + f"column {error.colno}"
        reason = error.msg.removesuffix(" at")  # some of Python's messages end so
        remedy = "repair it" if begin else "write one object per line"
        raise DataError(f"{where}: not valid JSON ({reason} at {position}); {remedy}") from None
    except RecursionError:
        raise DataError(f"{where}: JSON is nested too deeply; write flat objects") from None
    except ValueError as error:  # a key that appears twice, NaN, an integer of thousands of digits
        raise DataError(f"{where}: {error}") from None


class BadRow(Exception):
    """The reason why a row is refused. The reader of the file adds file and line."""


def type_in_words(value: Any) -> str:
    """Return the type of a JSON value in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    number = "a number" if isinstance(value, int | float) else type(value).__name__
    return names.get(type(value), number)


def from_json(value: Any, name: str, opens: str) -> Any:
    """Parse a string that begins with one of `opens` as JSON (CSV has no lists); return any other value unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith(tuple(opens)):
        return value
    try:
        return DECODER.decode(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{name} is a string that is not valid JSON ({error}); write JSON") from None
