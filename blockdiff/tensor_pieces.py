"""Pieces of tensors: the part in this process, which is all of an ordinary tensor and a block of a DTensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Block:
    """A block of a tensor: its offset and size in every dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Block:
        """The block that is a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the block in the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def within(self, other: Block) -> Block | None:
        """The intersection of two blocks of a tensor; None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(min(a + n, b + m) for a, n, b, m in zip(*_sides(self), *_sides(other), strict=True))
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Block(starts, sizes) if all(size > 0 for size in sizes) else None

    def seen_from(self, offsets: tuple[int, ...]) -> Block:
        """The same block with offsets relative to `offsets`."""
        return Block(tuple(a - b for a, b in zip(self.offsets, offsets, strict=True)), self.sizes)


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that lies in this process.

    shape: of the whole tensor; block: which part of it `local` is, which shares the tensor's memory. is_owned: whether
    this process is the one that saves it, of all that hold the same.
    """

    shape: tuple[int, ...]
    block: Block
    local: Tensor
    is_owned: bool


def is_spread(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which this process may have only a part. DTensor is not imported."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def local_of(tensor: Tensor) -> Tensor:
    """The part of a tensor in this process, which shares the tensor's memory."""
    detached = tensor.detach()
    if type(tensor) in (Tensor, nn.Parameter):  # the quicker check
        return detached
    spread: Any = detached
    local: Tensor = spread.to_local() if is_spread(tensor) else detached
    return local


def piece_of(tensor: Tensor, rank: int = 0) -> Piece:
    """The piece of a tensor that lies in this process, which is rank `rank`.

    An ordinary tensor is the same on all ranks, and rank 0 saves it. A DTensor is split over the dimensions of its mesh
    one after the other, each into parts of ceil(n / ranks) as `torch.chunk` makes them, those that FSDP2 makes of
    an already split dimension (`_StridedShard`) last. Of equal blocks the one that is saved lies first in the
    dimensions of the mesh that repeat it, and in the mesh that rank 0 is part of. Raises ValueError for partial sums.
    """
    local = local_of(tensor)
    if not is_spread(tensor):
        return Piece(tuple(tensor.shape), Block.whole(tuple(tensor.shape)), local, rank == 0)
    spread: Any = tensor
    mesh, shape = spread.device_mesh, tuple(spread.shape)
    coordinate, offsets, sizes = mesh.get_coordinate(), [0] * len(shape), list(shape)
    is_owned = bool((mesh.mesh == 0).any())
    for index, placement in sorted(enumerate(spread.placements), key=lambda each: hasattr(each[1], "split_factor")):
        if placement.is_partial():
            raise ValueError("a tensor of partial sums has no pieces")
        if placement.is_replicate():
            is_owned = is_owned and coordinate[index] == 0
            continue
        length = -(-sizes[placement.dim] // mesh.size(index))
        start = min(coordinate[index] * length, sizes[placement.dim])
        sizes[placement.dim] = min(length, sizes[placement.dim] - start)
        offsets[placement.dim] += start
    block = Block(tuple(offsets), tuple(sizes))
    if block.sizes != tuple(local.shape):
        raise ValueError(f"a piece of {list(block.sizes)} was expected of {spread.placements}, not {list(local.shape)}")
    return Piece(shape, block, local, is_owned)


@torch.no_grad()
def fill_piece(tensor: Tensor, whole: Tensor) -> None:
    """Copy this process's part of `whole` into a tensor."""
    piece = piece_of(tensor)
    piece.local.copy_(whole[piece.block.slices] if piece.block.sizes else whole)


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """A tensor that is sharded like another one, whose part in this process is `local`."""
    if not is_spread(tensor):
        return local
    from torch.distributed.tensor import DTensor

    spread: Any = tensor
    sharded: Tensor = DTensor.from_local(
        local, spread.device_mesh, spread.placements, run_check=False, shape=spread.shape, stride=spread.stride()
    )
    return sharded


@dataclass(frozen=True)
class PlannedMesh:
    """A mesh of one dimension, and its process group, that only a plan has: this process stands for the first rank.

    What is cut over it leaves ordinary tensors, and collectives over it exchange nothing.
    """

    ranks: int

    def size(self) -> int:
        """The number of ranks of the mesh."""
        return self.ranks

    def rank(self) -> int:
        """The place of this process among them."""
        return 0

    get_local_rank = rank

    def get_group(self) -> PlannedMesh:
        """The process group of the ranks."""
        return self


def keep_part(module: nn.Module, leaf: str, mesh: Any, dim: int) -> None:
    """Leave this process its part of a parameter or buffer, cut along `dim` over a mesh of one dimension as torch.chunk
    does."""
    is_buffer = leaf in module._buffers
    whole = module.get_buffer(leaf) if is_buffer else module.get_parameter(leaf)
    part = whole.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
    if not isinstance(mesh, PlannedMesh):
        from torch.distributed.tensor import DTensor, Shard

        part = DTensor.from_local(part, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())
    if is_buffer:
        module.register_buffer(leaf, part)
    else:
        module.register_parameter(leaf, nn.Parameter(part, requires_grad=whole.requires_grad))


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor, in the memory of every rank that holds a part; all of them call it together.

    What is spread over GPUs but kept on the host goes through the GPUs, which is where the ranks exchange.
    """
    if not is_spread(tensor):
        return tensor.detach()
    spread: Any = tensor.detach()
    whole: Tensor = spread.to(spread.device_mesh.device_type).full_tensor()
    return whole


def _sides(block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return block.offsets, block.sizes
