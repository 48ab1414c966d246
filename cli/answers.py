"""The file of answers that `blockdiff sample` writes. It grows with each answer, and a later call continues it."""

from __future__ import annotations

import codecs
import errno
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from blockdiff.errors import BlockdiffError, DataError
from blockdiff.files import write_text
from blockdiff.terminal import printable

if TYPE_CHECKING:
    from blockdiff.sampling import Request, Result


def fingerprint(request: Request | Result, settings: Mapping[str, Any]) -> str:
    """Return a hash of a request, its image files and the command's settings. Equal hashes mean the same answer."""
    images: list[str] = []
    with suppress(DataError):  # sampling reports it as the answer
        files = [source for source in getattr(request, "sources", []) if isinstance(source, str)]
        from blockdiff.data.image_file import image_bytes  # which imports torch

        images = [hashlib.blake2b(image_bytes(source)).hexdigest() for source in files]
    text = repr((request, *images, sorted(settings.items())))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def training_row(request: Request | Result, result: Result) -> dict[str, Any] | None:
    """Return a row to train on: the prompt, or messages and tools, with the answer; None if it failed or is empty."""
    if result.error is not None or not (result.text.strip() or result.tool_calls):
        return None
    messages = getattr(request, "messages", None)
    if messages is None:
        images = {"images": [*paths]} if (paths := getattr(request, "images", ())) else {}
        return {"id": result.id, "prompt": getattr(request, "prompt", ""), **images, "response": result.text}
    answer = {"role": "assistant", "content": result.text}
    answer |= {key: value for key in ("reasoning", "tool_calls") if (value := getattr(result, key)) is not None}
    tools = getattr(request, "tools", None)
    return {"id": result.id, "messages": [*messages, answer], **({"tools": [*tools]} if tools else {})}


class Answers:
    """A JSONL file of answers. Each line is written whole as it comes; a complete file is sorted by requests.

    path: the file; None writes the lines to stdout instead, in the order of the requests. asked: the fingerprint of
    each request. Each line of a file has its request's in `asked`, so that answers in the file are kept and not made
    again. rank: the number of this process; unless it `is_alone`, it writes a part next to the file, and `merge`
    joins the parts. rows: the requests, if lines are rows for training (None: lines are records of results); a request
    without an answer gets no line then.
    """

    def __init__(
        self,
        path: Path | None,
        asked: Sequence[str],
        rank: int = 0,
        is_alone: bool = True,
        rows: Sequence[Request | Result] | None = None,
    ):
        self.rows = rows
        self.path, self.asked = path, list(asked)
        self.written: dict[int, bytes] = {}
        self._next = 0  # index of the next request whose line goes to stdout
        self._own = path if path is None or is_alone else _part(path, rank)
        self._file: IO[bytes] | None = None

    def keep(self, overwrite: bool) -> None:
        """Read the answers in the file and its parts into one file; with `overwrite` delete them.

        Failed answers are dropped, to be made again. Raises BlockdiffError if a line answers none of the requests.
        """
        if self.path is None or (self.path.exists() and not self.path.is_file()):
            return
        parts = [self.path, *sorted(self.path.parent.glob(f".{self.path.name}.part-*"))]
        if not overwrite:
            places = {digest: index for index, digest in enumerate(self.asked)}
            for part in parts:
                for line in part.read_bytes().splitlines(keepends=True) if part.is_file() else ():
                    self._take(line, places)
        if self.written or self.path.is_file():
            self._rewrite()
        for part in parts[1:]:
            part.unlink()

    def _take(self, line: bytes, places: Mapping[str, int]) -> None:
        line, is_whole = line.removeprefix(codecs.BOM_UTF8).strip(), line.endswith(b"\n")
        if not line:
            return
        try:
            record = json.loads(line)
            index = places[record["asked"]]
        except (ValueError, TypeError, KeyError):
            if not is_whole:  # the process was killed while it wrote this line
                return
            raise BlockdiffError(
                f"{self.path}: is there already, and holds answers to other prompts or by other settings; "
                "choose another place, or replace it with --overwrite"
            ) from None
        if record.get("finish_reason") != "error":
            self.written[index] = line + b"\n"  # an editor may have left it out

    @property
    def missing(self) -> list[int]:
        """The indices of the requests without an answer, ascending."""
        return [index for index in range(len(self.asked)) if index not in self.written]

    def write(self, place: int, result: Result) -> None:
        """Write the answer to one request: to a file at once, to stdout after the answers before it."""
        record = result.to_record() if self.rows is None else training_row(self.rows[place], result)
        if record is None:
            self.written[place] = b""  # the next call of the command asks again
            return
        record |= {} if self.path is None else {"asked": self.asked[place]}
        text = json.dumps(record, ensure_ascii=False) + "\n"
        if self.path is not None:
            if self._file is None:
                assert self._own is not None
                self._file = self._own.open("ab", buffering=0)
            self.written[place] = line = text.encode("utf-8", "backslashreplace")
            _append(self._file, line, self.path, result)
            return
        out = sys.stdout.buffer
        self.written[place] = (printable(text) if out.isatty() else text).encode("utf-8", "backslashreplace")
        while self._next in self.written:
            out.write(self.written[self._next])
            self._next += 1
        out.flush()

    def flush(self) -> None:
        """Write to stdout the answers that still wait for earlier ones."""
        for index in sorted(self.written) if self.path is None else ():
            if index >= self._next:
                sys.stdout.buffer.write(self.written[index])

    def close(self) -> None:
        """Close the file; if it has all answers, put them in the order of the requests."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._own == self.path and self.path is not None and self.path.is_file() and not self.missing:
            self._rewrite()

    def merge(self) -> None:
        """Join the parts of all processes, which must be closed, into the file."""
        self.keep(overwrite=False)
        self._rewrite()

    def _rewrite(self) -> None:
        """Replace the file by the present answers, in the order of their requests, unless it is equal."""
        assert self.path is not None
        lines = b"".join(self.written[index] for index in sorted(self.written))
        if not self.path.is_file() or lines != self.path.read_bytes():
            write_text(self.path, lines.decode("utf-8"))


def _part(path: Path, rank: int) -> Path:
    return path.with_name(f".{path.name}.part-{rank}")


def _append(file: IO[bytes], line: bytes, path: Path, result: Result) -> None:
    """Append one line, whole or not at all. Raises BlockdiffError if the disk is full or fails."""
    start = file.tell() if file.seekable() else None
    try:
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        if start is not None:
            with suppress(OSError):  # such as /dev/full
                file.truncate(start)
        raise BlockdiffError(
            f"{path}: {error.strerror}; it has the answers before that of {result.id!r}, ask for the others elsewhere"
        ) from None
