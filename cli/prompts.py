"""Reading a prompts file: one request per line; a bad line becomes an error record, the others go on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from blockdiff.errors import DataError, RequestError
from blockdiff.sampling.request import Request, Result

EXPECTED = 'write {"prompt": ...} or {"messages": [...]}'


def read_prompts(path: Path) -> list[Request | Result]:
    """One entry per line that is not blank: a request, or the error record of a line that is none.

    A line without an id has its line number (from 1) as id. Raises DataError for a file that cannot be read.
    """
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name a JSONL file of prompts") from None
    entries = list(parse_prompts(lines, str(path)))
    if not entries:
        raise DataError(f"{path}: holds no prompt; {EXPECTED} on each line")
    return entries


def parse_prompts(lines: Iterable[bytes], name: str) -> Iterable[Request | Result]:
    """The entries of some lines; `name` stands before the line number in error records."""
    used: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        identity: str | int = number
        try:
            record = _record(line)
            identity = _identity(record, number)
            if (first := used.setdefault(str(identity), number)) != number:
                raise RequestError(f"the id {identity!r} is that of line {first} already; give each its own")
            yield _request(record, identity)
        except RequestError as error:
            yield Result(identity, "", [], "error", [], error=f"{name}:{number}: {error}")


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise RequestError("not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON ({error}); {EXPECTED}") from None
    if not isinstance(record, dict):
        raise RequestError(f"not an object; {EXPECTED}")
    return record


def _identity(record: dict[str, Any], number: int) -> str | int:
    identity = record.get("id")
    if identity is None:
        return number
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise RequestError(f"id must be a string or an integer, got {json.dumps(identity)[:80]}")
    return identity


def _request(record: dict[str, Any], identity: str | int) -> Request:
    prompt, messages, seed = record.get("prompt"), record.get("messages"), record.get("seed")
    if (prompt is None) == (messages is None):
        both = "both prompt and messages" if prompt is not None else "neither prompt nor messages"
        raise RequestError(f"{both}; {EXPECTED}")
    if prompt is not None and not isinstance(prompt, str):
        raise RequestError(f"prompt must be text, got {json.dumps(prompt)[:80]}")
    if messages is not None and (not isinstance(messages, list) or not messages):
        raise RequestError("messages must be a list of {role, content} objects with at least one entry")
    last = messages[-1] if messages else None
    if isinstance(last, dict) and last.get("role") in ("assistant", "model"):
        raise RequestError("the last message is the assistant's, so nothing is left to answer; leave it out")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64):
        raise RequestError(f"seed must be an integer from 0 to 2^64 - 1, got {json.dumps(seed)[:80]}")
    return Request(identity, prompt=prompt, messages=messages, seed=seed)
