"""Examples in an Arrow file that is mapped into memory, so that only the parts in use need memory.

`datasets.Dataset.from_file` can open the file.
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

BATCH = 4096  # examples of a record batch, which is in memory while it is written
BATCH_BYTES = 256 << 20  # of images without a path, in a record batch
IMAGE = pa.struct(
    [
        ("path", pa.string()),  # as in the row
        ("bytes", pa.large_binary()),  # of the file, if the row has no path
        ("column", pa.int32()),
        ("tokens", pa.int32()),
        ("digest", pa.binary()),  # of the pixels, which are not stored
    ]
)
SLOT = pa.struct([("column", pa.int32()), ("tokens", pa.list_(pa.int32())), ("weights", pa.list_(pa.float64()))])
SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("responses", pa.list_(pa.int32())),  # start, end, start, end, ...
        ("is_truncated", pa.bool_()),
        ("file", pa.int32()),  # the index of the source's file, so that files may be moved
        ("place", pa.string()),  # "17" or "row 17"
        ("images", pa.list_(IMAGE)),
        ("excluded", pa.list_(pa.int32())),  # in the form of `responses`
        ("slots", pa.list_(SLOT)),
    ]
)


def write_examples(file: IO[bytes], examples: Iterable[Example], files: Sequence[str]) -> int:
    """Write examples of the rows of `files` as an Arrow stream, in batches. Returns their number."""
    number = {name: index for index, name in enumerate(files)}
    count = 0
    with pa.ipc.new_stream(file, SCHEMA) as writer:
        for chunk in _chunks(examples):
            origins = [example.where.rpartition(":") for example in chunk]
            columns: list[Any] = [
                [example.sample_id for example in chunk],
                [example.tokens for example in chunk],
                [[edge for span in example.responses for edge in span] for example in chunk],
                [example.is_truncated for example in chunk],
                [number[name] for name, _, _ in origins],
                [line for _, _, line in origins],
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
    """Map the table that `write_examples` wrote into memory. The file may be closed and removed afterwards."""
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return pa.ipc.open_stream(pa.py_buffer(mapped)).read_all()


class Examples(Sequence[Example]):
    """The examples of several tables in order. lengths: the tokens of each example [N].

    files: the files of each table. first_ids: the number that is added to each table's sample ids.
    """

    def __init__(self, tables: Sequence[pa.Table], files: Sequence[Sequence[str]], first_ids: Sequence[int]) -> None:
        self.files: list[str] = []
        numbered = []
        for table, names, first_id in zip(tables, files, first_ids, strict=True):
            for column, before in (("sample_id", first_id), ("file", len(self.files))):
                index = SCHEMA.get_field_index(column)
                shifted = pc.add(table[column], pa.scalar(before, SCHEMA.types[index]))
                table = table.set_column(index, column, shifted)
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
        sample_id, tokens, edges, is_truncated, file, line, images, others, slots = values
        responses, excluded = (list(zip(each[::2], each[1::2], strict=True)) for each in (edges, others))
        return Example(
            sample_id,
            tokens,
            responses,
            is_truncated,
            where=f"{self.files[file]}:{line}",
            images=tuple(map(_image, images)),
            excluded=tuple(excluded),
            slots=tuple(Slot(**slot) for slot in slots),
        )
