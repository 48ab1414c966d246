"""The tensors of a checkpoint of a run, whichever ranks wrote them: their digests, and any block of any of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from blockdiff.checkpoint.files import tensors_in
from blockdiff.checkpoint.stream import DTYPE_OF
from blockdiff.files import piecewise_digest
from blockdiff.parallel.ranks import Ranks
from blockdiff.tensor_pieces import Block
from blockdiff.training.checkpoint_content import PIECES


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint: what it is, and in which files its pieces lie."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[tuple[str, Block], ...]


class SavedTensors:
    """The tensors of a checkpoint, to be read in pieces.

    digests: of all its files but trainer.json. Raises OSError, ValueError, KeyError, TypeError, SafetensorError or
    CheckpointError for files that are not as they were written.
    """

    def __init__(self, checkpoint: Path, digests: Mapping[str, str]) -> None:
        self.checkpoint, self.digests = checkpoint, digests
        self._index: dict[str, dict[str, SavedTensor]] | None = None
        self._kinds: dict[str, dict[str, SavedTensor]] = {}
        self._open: dict[str, Any] = {}

    @property
    def is_sharded(self) -> bool:
        """True where several ranks wrote pieces."""
        return PIECES in self.digests

    def has(self, kind: str) -> bool:
        """True where there are tensors of a kind."""
        return any(_holds(name, kind) for name in self.digests)

    def files(self, kinds: Iterable[str]) -> list[str]:
        """The names of the files with tensors of these kinds; KeyError where there are none of one."""
        found = {kind: [name for name in self.digests if _holds(name, kind)] for kind in kinds}
        for kind, names in found.items():
            if not names:
                raise KeyError(f"{kind}.safetensors")
        return sorted(name for names in found.values() for name in names) + [PIECES] * self.is_sharded

    def verify(self, kinds: Iterable[str], ranks: Ranks) -> str | None:
        """Compare the digests of this rank's share of the files of some kinds; says which one is not as it was.

        The largest files go first, each to the rank with the fewest bytes so far.
        """
        try:
            names = self.files(kinds)
            for name in _dealt({name: self._path(name).stat().st_size for name in names}, ranks.world)[ranks.rank]:
                if piecewise_digest(self._path(name)) != self.digests[name]:
                    return f"{name} has changed since it was written"
        except OSError as error:
            return f"{Path(error.filename or self.checkpoint).name}: {error.strerror}"
        except KeyError as error:
            return f"{error.args[0]} is missing"
        return None

    def tensors(self, kind: str) -> dict[str, SavedTensor]:
        """The tensors of a kind by name."""
        if kind not in self._kinds:
            self._kinds[kind] = self._pieces()[kind] if self.is_sharded else self._whole(f"{kind}.safetensors")
        return self._kinds[kind]

    def read(self, kind: str, name: str, block: Block | None = None) -> Tensor:
        """A block of a tensor (None: all of it) in memory of its own, put together of the pieces that were saved."""
        found = self.tensors(kind)[name]
        read = torch.empty((block or Block.whole(found.shape)).sizes, dtype=found.dtype)
        self.copy(kind, name, block, read)
        return read

    def copy(self, kind: str, name: str, block: Block | None, target: Tensor) -> None:
        """The same into a tensor of the block's shape."""
        found = self.tensors(kind)[name]
        target_block = block or Block.whole(found.shape)
        left = target_block.numel
        for file, piece in found.pieces:
            if (common := target_block.within(piece)) is not None:
                # Of a tensor in a file, which is mapped into memory, nothing is read but what is copied.
                content = self._handle(file).get_tensor(name)[common.seen_from(piece.offsets).slices]
                target[common.seen_from(target_block.offsets).slices].copy_(content)
                left -= common.numel
        if left:
            raise ValueError(f"{name} is not whole")

    def _whole(self, file: str) -> dict[str, SavedTensor]:
        return {
            name: SavedTensor(DTYPE_OF[stored.dtype], stored.shape, ((file, Block.whole(stored.shape)),))
            for name, stored in tensors_in(self._path(file)).items()
        }

    def _pieces(self) -> dict[str, dict[str, SavedTensor]]:
        if self._index is None:
            said = json.loads(self._path(PIECES).read_text(encoding="utf-8"))
            self._index = {
                kind: {
                    name: SavedTensor(
                        DTYPE_OF[entry["dtype"]],
                        tuple(entry["shape"]),
                        tuple((file, Block(tuple(offsets), tuple(sizes))) for file, offsets, sizes in entry["pieces"]),
                    )
                    for name, entry in tensors.items()
                }
                for kind, tensors in said.items()
            }
        return self._index

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = safe_open(self._path(file), framework="pt", device="cpu")
        return self._open[file]

    def _path(self, file: str) -> Path:
        return self.checkpoint / file


def _holds(file: str, kind: str) -> bool:
    name, _, suffix = file.partition(".")
    return suffix == "safetensors" and (name == kind or name.rpartition("-")[0] == kind)


def _dealt(sizes: Mapping[str, int], world: int) -> list[list[str]]:
    """Files for each rank, so that all have about as many bytes."""
    shares: list[list[str]] = [[] for _ in range(world)]
    bytes_of = [0] * world
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = bytes_of.index(min(bytes_of))
        shares[least].append(name)
        bytes_of[least] += sizes[name]
    return shares
