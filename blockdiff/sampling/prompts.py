"""Reading a prompts file: one request per line; a line that is none becomes an error and the others go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from blockdiff.errors import DataError, RequestError
from blockdiff.sampling.request import Request, Result

EXPECTED = 'write {"prompt": ...} or {"messages": [...]}'


def read_prompts(path: str | Path) -> list[Request | Result]:
    """One entry per line of a JSONL file that is not blank: a request, or the failed result of a line that is none.

    A line has `prompt` or `messages`, and may have `seed` and `id` (else its number, from 1). `Sampler.generate` takes
    the entries as they are. Raises DataError for a file that cannot be read or in which no line is a request.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; name a JSONL file of prompts") from None
    entries: list[Request | Result] = []
    line_of_id: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        id: str | int = number
        try:
            record = _record(line)
            if record.get("id") is not None:
                id = _id(record["id"])
            if (first := line_of_id.setdefault(str(id), number)) != number:
                raise RequestError(f"the id {id!r} is that of line {first} already; give each its own")
            request = Request(id, record.get("prompt"), record.get("messages"), seed=record.get("seed"))
            request.check()
            entries.append(request)
        except RequestError as error:
            entries.append(Result.failed(id, f"{path}:{number}: {error}"))
    if not entries:
        raise DataError(f"{path}: holds no prompt; {EXPECTED} on each line")
    errors = [entry.error for entry in entries if isinstance(entry, Result)]
    if len(errors) == len(entries):
        others = f"; nor is any of the other {len(errors) - 1} lines a prompt" if len(errors) > 1 else ""
        raise DataError(f"{errors[0]}{others}")
    return entries


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise RequestError("not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not valid JSON ({error}); {EXPECTED}") from None
    if not isinstance(record, dict):
        raise RequestError(f"not an object; {EXPECTED}")
    if not record.keys() & {"prompt", "messages"}:
        raise RequestError(f"neither prompt nor messages; {EXPECTED}")
    return record


def _id(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RequestError(f"id must be a string or an integer, got {json.dumps(value)[:80]}")
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(r"id has half of a surrogate pair (\ud800-\udfff); repair the escape") from None
    return value
