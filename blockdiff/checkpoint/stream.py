"""A safetensors file written one tensor after another, so that the host never holds two of them.

The bytes are those that `safetensors.torch.save_file` writes of the same tensors. The format: eight bytes with the
length of the header, a JSON header with dtype, shape and place of every tensor, padded with spaces, and the numbers.
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

# safetensors' words, in the order in which a file has its tensors: the last of these first.
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
    """A tensor to be written: its shape and dtype, the function that reads it, and the sources that it is made of."""

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
        """The source of a tensor in memory, cast to `dtype`."""
        target = dtype or tensor.dtype
        return cls(tuple(tensor.shape), target, lambda: tensor.detach().to("cpu", target))

    @classmethod
    def joined(cls, parts: Sequence[TensorSource]) -> TensorSource:
        """Several tensors as one, one under the other."""
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        return cls(shape, parts[0].dtype, lambda: torch.cat([part.read() for part in parts]), tuple(parts))

    def first_sources(self) -> list[TensorSource]:
        """The sources that are made of no other, in the order in which reading this one reads them."""
        return [first for source in self.of_sources for first in source.first_sources()] or [self]

    @classmethod
    def stored(cls, name: str, entry: Stored) -> TensorSource:
        """A tensor in a file, as it lies there."""
        return cls(entry.shape, DTYPE_OF[entry.dtype], lambda: next(read_tensors({name: entry}, [name]))[1])


def in_order(sources: Mapping[str, TensorSource]) -> list[str]:
    """The names of tensors in the order in which a file has them, which is that in which they are read."""
    return sorted(sources, key=lambda name: (-_PLACE[sources[name].dtype], name))


def write_stream(file: Path, sources: Mapping[str, TensorSource], metadata: Mapping[str, str] | None = None) -> str:
    """Write tensors to a file, each read when its turn comes, and wait until they are on the disk.

    Returns the digest of the file, made of what was to be written and not of what is read back. Raises OSError, and
    ValueError for a tensor that is not as its source said.
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
