"""Reading files of rows, one value at a time: JSON lines, JSON, CSV, TSV, parquet and Arrow. What a row is: `rows`."""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from blockdiff.data.rows import DECODER, parse_json
from blockdiff.errors import DataError

# (place in the file, value): the place is "17" for a line and "row 17" where lines mean nothing, both from 1.
Value = tuple[str, Any]

BOM = b"\xef\xbb\xbf"
BATCH = 1000  # rows of a parquet file that become Python objects together
FIELD = 1 << 30  # the csv module refuses fields of more than 128 KiB unless told otherwise
GZIP = ".gz"
BLANK = re.compile(r"[ \t\r\n]*")

Kept = Callable[[list[str]], list[str]]


class Skip:
    """How many rows are still to be passed over, in one file or in several one after the other."""

    def __init__(self, left: int = 0) -> None:
        self.left = left

    def takes(self) -> bool:
        """Whether the next row is one of them; it counts as passed over then."""
        if not self.left:
            return False
        self.left -= 1
        return True


def format_of(path: Path) -> str | None:
    """The suffix that says how to read a file, `.gz` put aside; None if it is none of FORMATS."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes[-1:] == [GZIP]:
        suffixes.pop()
        return suffixes[-1] if suffixes and suffixes[-1] in TEXT_FORMATS else None
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else None


def values(path: Path, skip: Skip, kept: Kept) -> Iterator[Value]:
    """The rows of a file in order but those that `skip` takes, which are read no further than needed.

    Where reading fewer columns is cheaper, only `kept(names)` are read. Raises DataError naming file and place,
    and what to do, for whatever cannot be read.
    """
    kind = format_of(path)
    if kind is None:
        raise DataError(f"{path}: not a kind of file that holds rows; name one of {', '.join(FORMATS)} (.gz for text)")
    with _refusing(path):
        yield from FORMATS[kind](path, skip, kept)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a directory; name a file in it") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: not a whole gzip file ({error}); compress it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}); check the file") from None


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    if path.suffix.lower() == GZIP:
        with gzip.open(path, "rb") as file:
            yield file  # type: ignore[misc]
    else:
        with path.open("rb") as file:
            yield file


def _decoded(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8 (byte {error.start + 1}); save it as UTF-8") from None


def json_lines(path: Path, skip: Skip, kept: Kept) -> Iterator[Value]:
    """One JSON object per line; lines of only white space are passed over."""
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(BOM) if number == 1 else line
            if line.isspace() or not line:
                continue
            if not skip.takes():
                where = f"{path}:{number}"
                yield str(number), parse_json(_decoded(line, where), where)


def json_document(path: Path, skip: Skip, kept: Kept) -> Iterator[Value]:
    """A list of objects, {"data": [...]}, or objects one after the other; held in memory as a whole."""
    with _open(path) as file:
        content = file.read().removeprefix(BOM)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not valid UTF-8; save it as UTF-8") from None
    begin = _blank(text, 0)
    elements: Iterator[Value]
    if text[begin : begin + 1] == "{":
        first, end = _element(text, begin, f"{path}:{_line(text, begin)}")
        if _blank(text, end) < len(text):
            yield from json_lines(path, skip, kept)
            return
        rows = first.get("data")
        if isinstance(rows, list) and not {"prompt", "response", "messages", "conversations"} & first.keys():
            elements = ((f"row {row}", value) for row, value in enumerate(rows, start=1))
        else:
            elements = iter([("row 1", first)])
    elif text[begin : begin + 1] == "[":
        elements = _elements(text, begin, path)
    elif begin == len(text):
        return
    else:
        raise DataError(f"{path}:{_line(text, begin)}: neither a list nor an object; write a JSON list of rows")
    for row, value in elements:
        if not skip.takes():
            yield row, value


def _elements(text: str, begin: int, path: Path) -> Iterator[Value]:
    """The elements of the list that begins at `begin`, each parsed when its turn comes so that a bad one is named."""
    row, at = 0, _blank(text, begin + 1)
    if text[at : at + 1] != "]":
        while True:
            row += 1
            value, at = _element(text, at, f"{path}:row {row}")
            yield f"row {row}", value
            at = _blank(text, at)
            if text[at : at + 1] == "]":
                break
            if text[at : at + 1] != ",":
                reason = "the list ends in the middle" if at == len(text) else "a comma is missing"
                raise DataError(f"{path}:row {row}: {reason} after it (line {_line(text, at)}); repair the file")
            at = _blank(text, at + 1)
    if _blank(text, at + 1) < len(text):
        raise DataError(f"{path}:{_line(text, at)}: something follows the list; write one list, or one object per line")


def _element(text: str, at: int, where: str) -> tuple[Any, int]:
    try:
        return DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise DataError(f"{where}: not valid JSON ({error.msg} at {place}); repair it") from None
    except RecursionError:
        raise DataError(f"{where}: JSON is nested too deeply; write flat objects") from None
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None


def _blank(text: str, at: int) -> int:
    match = BLANK.match(text, at)
    return match.end() if match else at


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def comma_separated(path: Path, skip: Skip, kept: Kept) -> Iterator[Value]:
    """Fields separated by commas under a line with their names; the place is the line a row begins on."""
    return _separated(path, skip, ",")


def tab_separated(path: Path, skip: Skip, kept: Kept) -> Iterator[Value]:
    """Fields separated by tabs under a line with their names; the place is the line a row begins on."""
    return _separated(path, skip, "\t")


def _separated(path: Path, skip: Skip, delimiter: str) -> Iterator[Value]:
    csv.field_size_limit(FIELD)
    with _open(path) as file:
        lines = (
            _decoded(line.removeprefix(BOM) if number == 1 else line, f"{path}:{number}")
            for number, line in enumerate(file, start=1)
        )
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        names: list[str] = []
        begin = 1
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                kind = "CSV" if delimiter == "," else "TSV"
                raise DataError(f"{path}:{begin}: not valid {kind} ({error}); repair it") from None
            place, begin = begin, reader.line_num + 1
            if not fields or (len(fields) == 1 and not fields[0].strip()):
                continue
            if not names:
                names = _header(fields, f"{path}:{place}")
            elif skip.takes():
                continue
            elif len(fields) != len(names):
                raise DataError(
                    f"{path}:{place}: {len(fields)} fields under {len(names)} column names; "
                    'quote a field that has the separator in it: "..."'
                )
            else:
                yield str(place), dict(zip(names, fields, strict=True))


def _header(fields: list[str], where: str) -> list[str]:
    for name in fields:
        if not name.strip():
            raise DataError(f"{where}: a column has no name; write the names of all columns into the first line")
        if fields.count(name) > 1:
            raise DataError(f"{where}: the column {name!r} appears twice; rename one")
    return fields


def parquet(path: Path, skip: Skip, kept: Kept) -> Iterator[Value]:
    """A parquet file, a thousand rows in memory at a time; row groups that are passed over are not read."""
    import pyarrow.parquet as pq

    with _open(path) as raw, _whole(path, "parquet"), pq.ParquetFile(raw) as file:
        columns, row = kept(file.schema_arrow.names), 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if skip.left >= rows:
                skip.left -= rows
                row += rows
                continue
            for batch in file.iter_batches(BATCH, row_groups=[group], columns=columns):
                yield from _values(batch, row, path, skip)
                row += batch.num_rows


def arrow(path: Path, skip: Skip, kept: Kept) -> Iterator[Value]:
    """An Arrow stream or file, as `datasets` keeps on disk."""
    import pyarrow as pa

    with _open(path) as raw, _whole(path, "Arrow"):
        try:
            batches: Any = pa.ipc.open_stream(raw)
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(raw)
            batches = map(file.get_batch, range(file.num_record_batches))
        row = 0
        for batch in batches:
            chosen = batch.select(kept(batch.schema.names))
            for start in range(0, batch.num_rows, BATCH):
                yield from _values(chosen.slice(start, BATCH), row + start, path, skip)
            row += batch.num_rows


def _values(batch: Any, before: int, path: Path, skip: Skip) -> Iterator[Value]:
    """The rows of a record batch as objects; `before` rows of the file come before it."""
    passed = min(skip.left, batch.num_rows)
    skip.left -= passed
    batch, first = batch.slice(passed), before + passed + 1
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:  # one row at a time, to say which
        rows = (_value(batch, index, f"{path}:row {first + index}") for index in range(batch.num_rows))
    for row, value in enumerate(rows, start=first):
        yield f"row {row}", value


def _value(batch: Any, index: int, where: str) -> Any:
    try:
        return batch.slice(index, 1).to_pylist()[0]
    except UnicodeDecodeError:
        raise DataError(f"{where}: not valid UTF-8; write its text as UTF-8") from None


@contextmanager
def _whole(path: Path, kind: str) -> Iterator[None]:
    """Arrow's own errors, which are several lines long, as one."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split())[:120]
        raise DataError(f"{path}: not a whole {kind} file ({reason}); write or download it again") from None


Reader = Callable[[Path, Skip, Kept], Iterator[Value]]
FORMATS: dict[str, Reader] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_document,
    ".csv": comma_separated,
    ".tsv": tab_separated,
    ".parquet": parquet,
    ".arrow": arrow,
}
TEXT_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
