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
        """Return the block with offsets relative to `offsets`."""
        return Block(tuple(a - b for a, b in zip(self.offsets, offsets, strict=True)), self.sizes)


@dataclass(frozen=True)
class Piece:
    """The part of a tensor in this process.

    shape: of the whole tensor. local: the part, which shares the tensor's memory. block: its place in the whole tensor.
    is_owned: this process saves it, of all processes with the same part.
    """

    shape: tuple[int, ...]
    block: Block
    local: Tensor
    is_owned: bool


def is_spread(tensor: Any) -> bool:
    """Return True for a DTensor, of which this process may have only a part. DTensor is not imported."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor in this process, which shares the tensor's memory."""
    detached = tensor.detach()
    if type(tensor) in (Tensor, nn.Parameter):  # a faster check for the usual case
        return detached
    spread: Any = detached
    local: Tensor = spread.to_local() if is_spread(tensor) else detached
    return local


def piece_of(tensor: Tensor, rank: int = 0) -> Piece:
    """Return the piece of a tensor in this process, which is rank `rank`.

    An ordinary tensor is the same on all ranks, and rank 0 saves it. A DTensor is split over the dimensions of its mesh
    one after the other, each into parts of ceil(n / ranks) like `torch.chunk`. Parts that FSDP2 makes of an already
    split dimension (`_StridedShard`) come last. Of equal blocks, the one is saved that is first in the mesh dimensions
    that replicate it, if the mesh includes rank 0. Raises ValueError for partial sums.
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
    """Return a tensor that is sharded like `tensor` and whose part in this process is `local`."""
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
    """A mesh of one dimension that only a plan has, with its process group. This process is its first rank.

    A module split over it has ordinary tensors, and collectives over it exchange nothing.
    """

    ranks: int

    def size(self) -> int:
        """The number of ranks of the mesh."""
        return self.ranks

    def rank(self) -> int:
        """Return 0, the rank of this process."""
        return 0

    get_local_rank = rank

    def get_group(self) -> PlannedMesh:
        """Return the process group of the ranks."""
        return self


def keep_part(module: nn.Module, leaf: str, mesh: Any, dim: int) -> None:
    """Replace a parameter or buffer by this process's part along `dim`, cut over a mesh like `torch.chunk`."""
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
    """Return a whole tensor, in the memory of every rank with a part. All of these ranks call it together.

    A tensor that is sharded over GPUs but kept on the host goes through the GPUs, which exchange the parts.
    """
    if not is_spread(tensor):
        return tensor.detach()
    spread: Any = tensor.detach()
    whole: Tensor = spread.to(spread.device_mesh.device_type).full_tensor()
    return whole


def _sides(block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return block.offsets, block.sizes
