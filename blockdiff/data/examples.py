"""Examples in an Arrow file that is mapped into memory, so that data of any size costs no more than what is used.

`datasets.Dataset.from_file` opens the same file.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import IO, Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from blockdiff.data.example import Example, ExampleImage, Slot

BATCH = 4096  # examples of a record batch: what is in memory while writing
BATCH_BYTES = 256 << 20  # of images that came as bytes, in a record batch
IMAGE = pa.struct(
    [
        ("path", pa.string()),  # as the row has it
        ("bytes", pa.large_binary()),  # of the file, where the row has no path
        ("column", pa.int32()),
        ("tokens", pa.int32()),
        ("digest", pa.binary()),  # of the pixels, which are not kept
    ]
)
SLOT = pa.struct([("column", pa.int32()), ("tokens", pa.list_(pa.int32())), ("weights", pa.list_(pa.float64()))])
SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("responses", pa.list_(pa.int32())),  # start, end, start, end, ...
        ("is_truncated", pa.bool_()),
        ("file", pa.int32()),  # which of the source's files, so that they may move
        ("place", pa.string()),  # "17" or "row 17"
        ("images", pa.list_(IMAGE)),
        ("excluded", pa.list_(pa.int32())),  # as responses
        ("slots", pa.list_(SLOT)),
    ]
)


def write_examples(file: IO[bytes], examples: Iterable[Example], files: Sequence[str]) -> int:
    """Write examples of rows that come from `files` as an Arrow stream, some at a time; returns how many."""
    number = {name: index for index, name in enumerate(files)}
    count = 0
    with pa.ipc.new_stream(file, SCHEMA) as writer:
        for chunk in _chunks(examples):
            places = [example.where.rpartition(":") for example in chunk]
            columns: list[Any] = [
                [example.sample_id for example in chunk],
                [example.tokens for example in chunk],
                [[edge for span in example.responses for edge in span] for example in chunk],
                [example.is_truncated for example in chunk],
                [number[name] for name, _, _ in places],
                [place for _, _, place in places],
                [[_record(image) for image in example.images] for example in chunk],
                [[edge for span in example.excluded for edge in span] for example in chunk],
                [[asdict(slot) for slot in example.slots] for example in chunk],
            ]
            writer.write_batch(pa.RecordBatch.from_pydict(dict(zip(SCHEMA.names, columns, strict=True)), SCHEMA))
            count += len(chunk)
    return count


def _chunks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    chunk, size = list[Example](), 0
    for example in examples:
        chunk.append(example)
        size += sum(len(image.source) for image in example.images if isinstance(image.source, bytes))
        if len(chunk) == BATCH or size > BATCH_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _record(image: ExampleImage) -> dict[str, Any]:
    which = "path" if isinstance(image.source, str) else "bytes"
    return {which: image.source, "column": image.column, "tokens": image.tokens, "digest": image.digest}


def _image(record: dict[str, Any]) -> ExampleImage:
    source = record.pop("bytes") if record["path"] is None else record["path"]
    return ExampleImage(source, record["column"], record["tokens"], record["digest"])


def read_table(file: IO[bytes]) -> pa.Table:
    """The table that `write_examples` wrote, as views into the file, which may be closed and removed afterwards."""
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return pa.ipc.open_stream(pa.py_buffer(mapped)).read_all()


class Examples(Sequence[Example]):
    """The examples of several tables, one after the other; `lengths` [N] are tokens per example.

    For each table there is the list of its files, and the number that is added to its sample ids.
    """

    def __init__(self, tables: Sequence[pa.Table], files: Sequence[Sequence[str]], first_ids: Sequence[int]) -> None:
        self.files: list[str] = []
        numbered = []
        for table, names, first_id in zip(tables, files, first_ids, strict=True):
            for column, before in (("sample_id", first_id), ("file", len(self.files))):
                at = SCHEMA.get_field_index(column)
                table = table.set_column(at, column, pc.add(table[column], pa.scalar(before, SCHEMA.types[at])))
            self.files += names
            numbered.append(table)
        self.columns = pa.concat_tables(numbered).columns
        self.lengths: NDArray[np.int64] = pc.list_value_length(self.columns[1]).to_numpy().astype(np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        values = [column[index].as_py() for column in self.columns]
        sample_id, tokens, edges, is_truncated, file, place, images, others, slots = values
        responses, excluded = (list(zip(each[::2], each[1::2], strict=True)) for each in (edges, others))
        where = f"{self.files[file]}:{place}"
        made = tuple(Slot(**slot) for slot in slots)
        return Example(
            sample_id, tokens, responses, is_truncated, where, tuple(map(_image, images)), tuple(excluded), made
        )
