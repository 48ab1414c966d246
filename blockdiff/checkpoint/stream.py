"""Write a safetensors file one tensor after another, so that the host never holds two of them.

The bytes equal those that `safetensors.torch.save_file` writes. The format: eight bytes with the length of the header;
a JSON header with dtype, shape and offsets of every tensor, padded with spaces; the numbers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockdiff.checkpoint.files import Stored, read_tensors
from blockdiff.files import PIECE, PiecewiseDigest

# safetensors' names of dtypes. A file has the tensors of the last dtype first.
WORDS: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
DTYPE_OF = {word: dtype for dtype, word in WORDS.items()}
_PLACE = {dtype: rank for rank, dtype in enumerate(WORDS)}


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written: its shape, its dtype, the function that reads it, and the sources it is joined from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    of_sources: tuple[TensorSource, ...] = ()

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorSource:
        """Return the source of a tensor in memory, cast to `dtype` (None: not cast)."""
        target = dtype or tensor.dtype
        return cls(tuple(tensor.shape), target, lambda: tensor.detach().to("cpu", target))

    @classmethod
    def joined(cls, parts: Sequence[TensorSource]) -> TensorSource:
        """Return the source of several tensors concatenated along the first axis."""
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return cls(shape, parts[0].dtype, lambda: torch.cat([part.read() for part in parts]), tuple(parts))

    def first_sources(self) -> list[TensorSource]:
        """Return the sources that are not joined from others, in the order in which reading this one reads them."""
        return [first for source in self.of_sources for first in source.first_sources()] or [self]

    @classmethod
    def stored(cls, name: str, entry: Stored) -> TensorSource:
        """Return the source of a tensor in a file, unchanged."""
        return cls(entry.shape, DTYPE_OF[entry.dtype], lambda: next(read_tensors({name: entry}, [name]))[1])


def in_order(sources: Mapping[str, TensorSource]) -> list[str]:
    """Return the names of tensors in the order in which a file has them; they are read in this order."""
    return sorted(sources, key=lambda name: (-_PLACE[sources[name].dtype], name))


def write_stream(file: Path, sources: Mapping[str, TensorSource], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors to a file, each read when its turn comes, and wait until they are on the disk.

    Returns the digest of the file, computed from the bytes to be written, not from reading back. Raises OSError, and
    ValueError if a tensor differs from its source in shape or dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end, order = 0, in_order(sources)
    for name in order:
        source = sources[name]
        start, end = end, end + source.nbytes
        words = {"dtype": WORDS[source.dtype], "shape": list(source.shape)}
        header[name] = {**words, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out, PiecewiseDigest() as hashed:
        for content in (len(text).to_bytes(8, "little"), text):
            hashed.update(memoryview(content))
            out.write(content)
        for name in order:
            tensor = sources[name].read()
            if tuple(tensor.shape) != sources[name].shape or tensor.dtype != sources[name].dtype:
                raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}, not what was announced")
            numbers: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            view = memoryview(numbers)
            for start in range(0, len(view), PIECE):
                hashed.update(view[start : start + PIECE])
                out.write(view[start : start + PIECE])
            hashed.settle()
        out.flush()
        os.fsync(out.fileno())
        return hashed.hexdigest()
