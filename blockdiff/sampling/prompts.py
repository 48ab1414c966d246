"""Read a prompts file: one request per line. An invalid line becomes a failed result; the others are still read.

Lines are read as training reads rows, by `blockdiff.data.rows`.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from blockdiff.data.rows import check_row
from blockdiff.data.strict_json import BOM, decoded, parsed
from blockdiff.errors import DataError, RequestError
from blockdiff.sampling.request import Request, Result

EXPECTED = 'write {"prompt": ...} or {"messages": [...]}'
# The fields of a request that are the prompt itself. `tokens` is a field of output lines, not an option.
OF_PROMPT = ("id", "prompt", "messages", "tools", "tokens", "image", "images")
# Fields that a prompts file may not set, because others may have written it.
OF_CALLER = ("allow_control_tokens",)
OPTIONS = tuple(field.name for field in fields(Request) if field.name not in (*OF_PROMPT, *OF_CALLER))
# Names of settings in other programs; a line with one of them is meant to set an option of the sampler.
SETTINGS = (
    *("max_tokens", "max_length", "min_new_tokens", "max_denoising_steps", "num_inference_steps", "temperature"),
    *("t_min", "t_max", "top_k", "top_p", "min_p", "entropy_bound", "stability_threshold", "confidence_threshold"),
    *("presence_penalty", "frequency_penalty", "stop_token_ids", "eos_token_id", "logit_bias", "logprobs"),
    *("num_return_sequences", "response_format", "grammar", "guided_json", "guided_regex", "enable_thinking"),
    *("chat_template", "tool_choice", *OF_CALLER),
)

NEAR = 5  # longer keys are refused if they are spelled almost like an option


def read_prompts(path: str | Path) -> list[Request | Result]:
    """Read a prompts file: for each line that is not blank a request, or a failed result if the line is invalid.

    path: a JSONL file, or `-` for standard input. A line is a row as training reads it, whose response, or final answer
    of the messages, is left out. It may have `id` (default: its line number, from 1) and the fields of a `Request`.
    Paths of images are relative to the file's folder and must stay in it. A key that is spelled almost like an option
    is an error; other keys are data. `Sampler.generate` accepts the entries as they are. Raises DataError for a file
    that cannot be read or has no valid line.
    """
    entries: list[Request | Result] = []
    line_of_id: dict[str, int] = {}
    source, path = Path(path), "stdin" if str(path) == "-" else path
    for number, line in _lines(source):
        where = f"{path}:{number}"
        id: str | int = number
        try:
            record = _record(line, where)
            if record.get("id") is not None:
                id = _id(record["id"])
            if (first := line_of_id.setdefault(str(id), number)) != number:
                raise RequestError(f"the id {id!r} is that of line {first} already; give each its own")
            request = _request(id, record, where)
            request.check()
            entries.append(request)
        except DataError as error:
            entries.append(Result.failed(id, error))
        except RequestError as error:
            entries.append(Result.failed(id, f"{where}: {error}"))
    if not entries:
        raise DataError(f"{path}: holds no prompt; {EXPECTED} on each line")
    errors = [entry.error for entry in entries if isinstance(entry, Result)]
    if len(errors) == len(entries):
        others = f"; nor is any of the other {len(errors) - 1} lines a prompt" if len(errors) > 1 else ""
        raise DataError(f"{errors[0]}{others}")
    return entries


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not blank, with their numbers."""
    try:
        with _opened(path) as file:
            for number, line in enumerate(file, start=1):
                line = line.removeprefix(BOM) if number == 1 else line
                if line and not line.isspace():
                    yield number, line
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(f"{path}: {reason}; name a JSONL file of prompts") from None


def _opened(path: Path) -> AbstractContextManager[IO[bytes]]:
    if str(path) == "-":
        return nullcontext(sys.stdin.buffer)
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _record(line: bytes, where: str) -> dict[str, Any]:
    record = parsed(decoded(line, where), where)
    if not isinstance(record, dict):
        raise RequestError(f"not an object; {EXPECTED}")
    return record


def _request(id: str | int, record: dict[str, Any], where: str) -> Request:
    row = check_row({key: value for key, value in record.items() if key != "id"}, where, is_asked=True).located()
    messages = row.messages
    while messages and messages[-1]["role"] == "assistant":  # the answer of a row of training
        messages = messages[:-1]
    if messages == ():
        raise RequestError("nothing comes before the assistant's message, so nothing is left to answer")
    options = {key: value for key, value in record.items() if key in OPTIONS and value is not None}
    for key in record:
        if key not in OPTIONS and key not in OF_PROMPT and (option := _option(key)):
            raise RequestError(_refused(key, option))
    return Request(id, row.prompt, messages, images=row.images, tools=row.tools, **options)


@lru_cache(maxsize=1024)
def _option(key: str) -> str | None:
    """Return the option that a key is, or is nearly spelled like; None for a key that is data."""
    name = key.strip().lower().replace("-", "_").replace(" ", "_")
    known = {each.replace("_", ""): each for each in (*SETTINGS, *OPTIONS)}
    is_long = len(name) > NEAR  # a short word, such as score, resembles others by chance
    near = get_close_matches(name.replace("_", ""), known, 1, cutoff=0.88 if is_long else 1.0)
    return known[near[0]] if near else None


def _refused(key: str, option: str) -> str:
    if option in OPTIONS:
        return f"{key!r} is no option of a request; did you mean {option!r}?"
    return f"{key!r} is a setting that no line can have; leave it out, or set it for the whole file"


def _id(value: Any) -> str | int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise RequestError(f"id must be a string or an integer, got {json.dumps(value)[:80]}")
    try:
        str(value).encode("utf-8")
    except UnicodeEncodeError:
        raise RequestError(r"id has half of a surrogate pair (\ud800-\udfff); repair the escape") from None
    return value
