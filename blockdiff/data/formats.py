"""Readers of row files, which yield one value at a time: JSON lines, JSON, CSV, TSV, parquet and Arrow.

`rows` checks the values.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

from blockdiff.data.strict_json import BOM, DECODER, decoded, parsed
from blockdiff.errors import DataError

# (where in the file, value): "17" for line 17, or "row 17" in formats without lines, both counted from 1. The value of
# a row that cannot be read is the DataError with the reason, if rows after it can be read.
Value = tuple[str, Any]
# From the names of all columns of a file to the names of those to read.
Choose = Callable[[list[str]], list[str]]

# Limits:
BATCH = 1000  # rows of a parquet file that become Python objects together
LINE = 128 << 20  # bytes of a line, and of a row of CSV, which may have several lines; enough for an image of 64 MiB
PARTS = 8 << 20  # commas and opening brackets of JSON, fields of CSV, in a row; each may become an object of 64 bytes
DOCUMENT = 1 << 30  # bytes of a JSON file, which is in memory as a whole
DECODED = 256 << 20  # bytes of the rows of parquet and Arrow that become Python objects together
VALUES = 1 << 27  # values of a column in a row group of parquet
GZIP = ".gz"
BLANK = re.compile(r"[ \t\r\n]*")


class Skip:
    """Counts down the rows that remain to be skipped, over one or several files."""

    def __init__(self, remaining: int = 0) -> None:
        self.remaining = remaining

    def skips_next(self) -> bool:
        """Return True if the next row is to be skipped, and count it."""
        if not self.remaining:
            return False
        self.remaining -= 1
        return True


def file_format(path: Path) -> str | None:
    """Return the suffix of a file without `.gz`; None if it is none of FORMATS."""
    name = path.name.lower()
    suffix = Path(name.removesuffix(GZIP)).suffix
    return suffix if suffix in (TEXT_FORMATS if name.endswith(GZIP) else FORMATS) else None


def values(path: Path, skip: Skip, choose: Choose) -> Iterator[Value]:
    """Yield the rows of a file in order, except the rows to skip, which are read no further than necessary.

    If reading fewer columns is cheaper, only the columns that `choose` returns are read. Raises DataError with file,
    place and remedy for anything that cannot be read.
    """
    kind = file_format(path)
    if kind is None:
        raise DataError(f"{path}: not a file of rows; name one with the suffix {', '.join(FORMATS)} (.gz for text)")
    with _one_line_errors(path):
        yield from FORMATS[kind](path, skip, choose)


@contextmanager
def _one_line_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; check the path") from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a directory; name a file in it") from None
    except (EOFError, zlib.error, pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"{path}: cannot be read ({error.strerror}); check the file") from None
        reason = " ".join(str(error).split())[:120]  # Arrow's own messages are several lines long
        kind = path.suffix.lower().removeprefix(".").replace("gz", "gzip").replace("arrow", "Arrow")
        raise DataError(f"{path}: not a whole {kind} file ({reason}); write or download it again") from None


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix.lower() == GZIP else path.open("rb")  # type: ignore[return-value]


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of a file. Raises DataError for a line that is too long."""
    number = 0
    while line := file.readline(LINE + 1):
        number += 1
        if len(line) > LINE:
            raise DataError(f"{path}:{number}: a line of more than {LINE:,} bytes; write a row in fewer")
        yield number, line.removeprefix(BOM) if number == 1 else line


def json_lines(path: Path, skip: Skip, choose: Choose) -> Iterator[Value]:
    """Read one JSON object per line. Blank lines are ignored."""
    with _open(path) as file:
        for number, line in _lines(file, path):
            if line and not line.isspace() and not skip.skips_next():
                yield str(number), _json_line(line, f"{path}:{number}")


def _json_line(line: bytes, where: str) -> Any:
    try:
        if _has_many_parts(line):
            raise DataError(f"{where}: more than {PARTS:,} commas and brackets; write a row in fewer")
        return parsed(decoded(line, where), where)
    except DataError as error:
        return error


def _has_many_parts(content: bytes) -> bool:
    """Return True if JSON may have more objects than a row is allowed to have."""
    return sum(map(content.count, (b",", b"[", b"{"))) > PARTS


def json_document(path: Path, skip: Skip, choose: Choose) -> Iterator[Value]:
    """Read a list of objects, {"data": [...]}, or consecutive objects. The whole file is in memory."""
    with _open(path) as file:
        content = file.read(DOCUMENT + 1).removeprefix(BOM)
    if len(content) > DOCUMENT:
        raise DataError(
            f"{path}: more than {DOCUMENT:,} bytes of one JSON document; write one object per line (.jsonl)"
        )
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not valid UTF-8; save it as UTF-8") from None
    begin = _after_blanks(text, 0)
    elements: Iterator[Value]
    if text[begin : begin + 1] == "{":
        if _has_many_parts(content):  # an object can only be parsed as a whole
            if not content[begin:].splitlines()[0].rstrip().endswith(b"}"):
                raise DataError(f"{path}: more than {PARTS:,} commas and brackets in an object; write a list of rows")
            yield from json_lines(path, skip, choose)
            return
        first, end = parsed(text, f"{path}:{_line(text, begin)}", DECODER.raw_decode, begin)
        if _after_blanks(text, end) < len(text):
            yield from json_lines(path, skip, choose)
            return
        rows = first.get("data")
        is_wrapper = isinstance(rows, list) and not {"prompt", "response", "messages", "conversations"} & first.keys()
        elements = ((f"row {row}", value) for row, value in enumerate(rows if is_wrapper else [first], start=1))
    elif text[begin : begin + 1] == "[":
        elements = _elements(text, begin, path)
    elif begin == len(text):
        return
    else:
        raise DataError(f"{path}:{_line(text, begin)}: neither a list nor an object; write a JSON list of rows")
    yield from (element for element in elements if not skip.skips_next())


def _elements(text: str, begin: int, path: Path) -> Iterator[Value]:
    """Yield the elements of the list at character `begin`. Each is parsed on its own, so that errors name it."""
    row, position = 0, _after_blanks(text, begin + 1)
    while row or text[position : position + 1] != "]":
        row += 1
        value, position = parsed(text, f"{path}:row {row}", DECODER.raw_decode, position)
        yield f"row {row}", value
        position = _after_blanks(text, position)
        if text[position : position + 1] == "]":
            break
        if text[position : position + 1] != ",":
            reason = "the list ends in the middle" if position == len(text) else "a comma is missing"
            raise DataError(f"{path}:row {row}: {reason} after it (line {_line(text, position)}); repair the file")
        position = _after_blanks(text, position + 1)
    if _after_blanks(text, position + 1) < len(text):
        line = _line(text, position)
        raise DataError(f"{path}:{line}: something follows the list; write one list, or one object per line")


def _after_blanks(text: str, position: int) -> int:
    match = BLANK.match(text, position)
    return match.end() if match else position


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def separated(path: Path, skip: Skip, choose: Choose, delimiter: str) -> Iterator[Value]:
    """Read delimited fields below a line with their names. `where` is the line that a row begins on."""
    csv.field_size_limit(LINE)  # 128 KiB by default
    names: list[str] = []
    begin, size, parts = 1, 0, 0  # of the row that is read

    def lines(file: IO[bytes]) -> Iterator[str]:
        nonlocal size, parts
        for number, line in _lines(file, path):
            size, parts = size + len(line), parts + 1 + line.count(delimiter.encode())
            if parts > PARTS:
                raise DataError(f"{path}:{begin}: a row of more than {PARTS:,} fields and lines; write fewer")
            if size > LINE:
                raise DataError(f"{path}:{begin}: a row of more than {LINE:,} bytes; close its quotes, or write fewer")
            yield decoded(line, f"{path}:{number}")

    with _open(path) as file:
        reader = csv.reader(lines(file), delimiter=delimiter, strict=True)
        try:
            for fields in reader:
                line, begin = begin, reader.line_num + 1
                if not fields or (len(fields) == 1 and not fields[0].strip()):
                    continue  # the size of a blank line counts for the next row
                size = parts = 0
                if not names:
                    names = _header(fields, f"{path}:{line}")
                elif skip.skips_next():
                    continue
                elif len(fields) != len(names):
                    reason = f"{len(fields)} fields under {len(names)} column names"
                    remedy = 'quote a field that has the separator in it: "..."'
                    yield str(line), DataError(f"{path}:{line}: {reason}; {remedy}")
                else:
                    yield str(line), dict(zip(names, fields, strict=True))
        except csv.Error as error:
            kind = "CSV" if delimiter == "," else "TSV"
            raise DataError(f"{path}:{begin}: not valid {kind} ({error}); repair it") from None


def _header(fields: list[str], where: str) -> list[str]:
    seen = set[str]()
    for name in fields:
        if not name.strip():
            raise DataError(f"{where}: a column has no name; write the names of all columns into the first line")
        if name in seen:
            raise DataError(f"{where}: the column {name!r} appears twice; rename one")
        seen.add(name)
    return fields


def parquet(path: Path, skip: Skip, choose: Choose) -> Iterator[Value]:
    """Read a parquet file, a thousand rows at a time. Row groups that are skipped are not read.

    Texts are decoded from their dictionary only with their row: a few bytes may repeat a text a billion times.
    """
    import pyarrow.parquet as pq

    with _open(path) as raw, pq.ParquetFile(raw) as file:
        columns, group, row = choose(file.schema_arrow.names), 0, 0
        leaves = [file.schema.column(index) for index in range(len(file.schema))]
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        while group < file.num_row_groups and skip.remaining >= file.metadata.row_group(group).num_rows:
            row += file.metadata.row_group(group).num_rows
            skip.remaining -= file.metadata.row_group(group).num_rows
            group += 1
        groups = list(range(group, file.num_row_groups))
        for number in groups:
            _check_group(file.metadata.row_group(number), columns, f"{path}: row group {number}")
        with pq.ParquetFile(raw, read_dictionary=texts, metadata=file.metadata) as folded:
            yield from _rows(folded.iter_batches(BATCH, row_groups=groups, columns=columns), row, path, skip)


def _check_group(group: Any, columns: list[str], where: str) -> None:
    """Raise DataError for a row group with more values in a column than the limit."""
    for index in range(group.num_columns):
        column = group.column(index)
        if column.path_in_schema.partition(".")[0] in columns and column.num_values > VALUES:
            raise DataError(
                f"{where}: {column.num_values:,} values in {column.path_in_schema}, more than {VALUES:,}; write "
                "smaller row groups"
            )


def arrow(path: Path, skip: Skip, choose: Choose) -> Iterator[Value]:
    """Read an Arrow stream or file, such as those that `datasets` saves."""
    with _open(path) as raw:
        try:
            batches: Any = pa.ipc.open_stream(raw)
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(raw)
            batches = map(file.get_batch, range(file.num_record_batches))
        yield from _rows((batch.select(choose(batch.schema.names)) for batch in batches), 0, path, skip)


def _rows(batches: Iterable[Any], before: int, path: Path, skip: Skip) -> Iterator[Value]:
    """Yield the rows of record batches as objects. before: the number of rows before them in the file."""
    for batch in batches:
        passed = min(skip.remaining, batch.num_rows)
        skip.remaining -= passed
        for start in range(passed, batch.num_rows, BATCH):
            yield from _objects(batch.slice(start, BATCH), before + start + 1, path)
        before += batch.num_rows


def _size(array: Any) -> int:
    """An upper bound of the bytes of an array without dictionaries."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        is_text = any(is_kind(kind.value_type) for is_kind in (pa.types.is_string, pa.types.is_binary))
        longest = pc.max(pc.binary_length(array.dictionary)).as_py() if is_text else array.dictionary.nbytes
        return len(array) * int(longest or 0)
    if pa.types.is_struct(kind):
        return sum(_size(each) for each in array.flatten())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _size(array.flatten()) + int(4 * len(array))
    return int(array.nbytes)


def _objects(batch: Any, first: int, path: Path) -> Iterator[Value]:
    """Yield the rows of a record batch as objects, numbered from `first`. Large batches are halved."""
    size = sum(map(_size, batch.columns))
    if size > DECODED:
        if batch.num_rows == 1:
            yield f"row {first}", DataError(f"{path}:row {first}: more than {DECODED:,} bytes ({size:,}); split it")
            return
        half = batch.num_rows // 2
        yield from _objects(batch.slice(0, half), first, path)
        yield from _objects(batch.slice(half), first + half, path)
        return
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            yield f"row {first}", DataError(f"{path}:row {first}: not valid UTF-8; write its text as UTF-8")
            return
        for index in range(batch.num_rows):  # one at a time, to name the row
            yield from _objects(batch.slice(index, 1), first + index, path)
        return
    yield from ((f"row {row}", as_written(value)) for row, value in enumerate(rows, first))


def as_written(row: Any) -> Any:
    """Remove the nulls that Arrow adds to a row's inner objects for the keys of other rows' objects."""
    return {key: _without_nulls(value) for key, value in row.items()} if isinstance(row, dict) else row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


Reader = Callable[[Path, Skip, Choose], Iterator[Value]]
FORMATS: dict[str, Reader] = {
    ".jsonl": json_lines,
    ".ndjson": json_lines,
    ".json": json_document,
    ".csv": partial(separated, delimiter=","),
    ".tsv": partial(separated, delimiter="\t"),
    ".parquet": parquet,
    ".arrow": arrow,
}
TEXT_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
