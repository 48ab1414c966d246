"""Examples in an Arrow file that is mapped into memory, so that data of any size costs no more than what is used.

`datasets.Dataset.from_file` opens the same file.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import IO, Any, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from blockdiff.data.chat import Example

BATCH = 4096  # examples of a record batch: what is in memory while writing
SCHEMA = pa.schema(
    [
        ("sample_id", pa.int64()),
        ("tokens", pa.list_(pa.int32())),
        ("responses", pa.list_(pa.int32())),  # start, end, start, end, ...
        ("is_truncated", pa.bool_()),
        ("file", pa.int32()),  # which of the source's files, so that they may move
        ("place", pa.string()),  # "17" or "row 17"
    ]
)


def write_examples(file: IO[bytes], examples: Iterable[Example], files: Sequence[str]) -> int:
    """Write examples of rows that come from `files` as an Arrow stream, some at a time; returns how many."""
    number = {name: index for index, name in enumerate(files)}
    examples, count = iter(examples), 0
    with pa.ipc.new_stream(file, SCHEMA) as writer:
        while chunk := list(islice(examples, BATCH)):
            places = [example.where.rpartition(":") for example in chunk]
            columns: list[Any] = [
                pa.array([example.sample_id for example in chunk], pa.int64()),
                _lists([example.tokens for example in chunk]),
                _lists([[edge for span in example.responses for edge in span] for example in chunk]),
                pa.array([example.is_truncated for example in chunk], pa.bool_()),
                pa.array([number[name] for name, _, _ in places], pa.int32()),
                pa.array([place for _, _, place in places], pa.string()),
            ]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
            count += len(chunk)
    return count


def _lists(rows: Sequence[Sequence[int]]) -> Any:
    """A column of integer lists, by way of one flat array: far quicker than one Python object at a time."""
    flat = array("i")
    for row in rows:
        flat.extend(row)
    offsets = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.frombuffer(flat, np.int32)))


class _InParts(Sequence[Example]):
    """Examples that lie in parts one after the other; `_ends` [parts + 1] are where the parts begin, and the end."""

    _ends: NDArray[np.int64]

    def _at(self, part: int, inside: int) -> Example:
        raise NotImplementedError

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        index %= len(self)
        part = int(np.searchsorted(self._ends, index, side="right")) - 1
        return self._at(part, index - int(self._ends[part]))


class Examples(_InParts):
    """The examples of a file that `write_examples` wrote; `first_id` is added to every sample id.

    The file object may be closed, and the file removed, as soon as this is made.
    """

    def __init__(self, file: IO[bytes], files: Sequence[str], first_id: int = 0) -> None:
        self.files, self.first_id = list(files), first_id
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._batches = [_Batch(batch) for batch in pa.ipc.open_stream(pa.py_buffer(mapped))]
        self._ends = np.cumsum([0, *(len(batch) for batch in self._batches)])
        per_batch = [np.diff(batch.token_edges) for batch in self._batches]
        self.lengths: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *per_batch])

    def _at(self, part: int, inside: int) -> Example:
        return self._batches[part].example(inside, self.files, self.first_id)


class _Batch:
    """The columns of one record batch as numpy views into the file."""

    def __init__(self, batch: Any) -> None:
        self.sample_id = batch.column("sample_id").to_numpy()
        self.token_edges = batch.column("tokens").offsets.to_numpy()
        self.tokens = batch.column("tokens").values.to_numpy()
        self.response_edges = batch.column("responses").offsets.to_numpy()
        self.responses = batch.column("responses").values.to_numpy()
        self.is_truncated = batch.column("is_truncated")
        self.file = batch.column("file").to_numpy()
        self.place = batch.column("place")

    def __len__(self) -> int:
        return len(self.sample_id)

    def example(self, at: int, files: Sequence[str], first_id: int) -> Example:
        edges = self.responses[self.response_edges[at] : self.response_edges[at + 1]].tolist()
        return Example(
            first_id + int(self.sample_id[at]),
            self.tokens[self.token_edges[at] : self.token_edges[at + 1]].tolist(),
            list(zip(edges[::2], edges[1::2], strict=True)),
            bool(self.is_truncated[at].as_py()),
            f"{files[self.file[at]]}:{self.place[at].as_py()}",
        )


class Joined(_InParts):
    """The examples of several sources, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Example]]) -> None:
        self.parts = list(parts)
        self._ends = np.cumsum([0, *map(len, self.parts)])

    def _at(self, part: int, inside: int) -> Example:
        return self.parts[part][inside]
