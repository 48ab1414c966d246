"""The tuning table of span_attention: tile sizes by head size and element size, and into how many parts keys split.

Chosen from the shape and the device alone, never by timing: the same call always computes in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST = 16  # rows and keys of the smallest tile that the tensor cores take
MOST_SPLITS = 32
TILES_PER_SPLIT = 8  # fewer key tiles than that cost less than merging their result


@dataclass(frozen=True)
class Tile:
    """M rows by N keys, run by so many warps with so many tiles in flight."""

    M: int
    N: int
    warps: int
    stages: int

    def fitted(self, rows: int) -> Tile:
        """The same for few rows: no more of them than there are, in powers of two."""
        return Tile(max(LEAST, min(self.M, 1 << (rows - 1).bit_length())), self.N, self.warps, self.stages)


@dataclass(frozen=True)
class Tiles:
    """The tiles of the kernels for one kind of head, and how fp32 products are made (of no meaning to others).

    backward_kv: one launch for both gradients, or one for each (grad_k, grad_v; N is the same): at 512 both
    accumulators would take every register there is, so that computing the scores twice is cheaper.
    """

    forward: Tile
    backward_q: Tile
    backward_kv: tuple[Tile] | tuple[Tile, Tile]
    precision: str = "tf32"


# Head size up to -> tiles. What they compile to for sm_90 (shared memory, registers): docs/kernels/span_attention.md.
HALF = {
    64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 2), (Tile(64, 128, 8, 2),)),
    128: Tiles(Tile(128, 128, 8, 2), Tile(128, 64, 8, 2), (Tile(64, 128, 8, 2),)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(128, 32, 8, 2), (Tile(64, 64, 8, 2),)),
    512: Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 1), (Tile(32, 64, 8, 1), Tile(32, 64, 8, 2))),
}
# fp32 as three tf32 products on the tensor cores, about as exact as fp32 itself; wide heads have no registers for it.
FULL = {
    64: Tiles(Tile(64, 32, 4, 2), Tile(64, 32, 4, 2), (Tile(32, 32, 4, 1),), "tf32x3"),
    128: Tiles(Tile(64, 32, 8, 1), Tile(32, 32, 8, 1), (Tile(32, 32, 8, 1),), "tf32x3"),
    256: Tiles(Tile(32, 32, 8, 1), Tile(32, 32, 8, 1), (Tile(16, 16, 4, 1),), "ieee"),
    512: Tiles(Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)), "ieee"),
}


def tiles_of(head_dim: int, element_size: int) -> Tiles:
    """The table's line for heads of `head_dim` numbers of `element_size` bytes."""
    table = HALF if element_size == 2 else FULL
    return next(tiles for limit, tiles in table.items() if head_dim <= limit)


def splits_of(programs: int, key_tiles: int, multiprocessors: int) -> int:
    """Into how many parts to split the keys so that `programs` row tiles fill the device; 1: not at all.

    The time goes with rounds / splits, rounds = ceil(programs * splits / multiprocessors); ties to fewer splits.
    """
    if programs >= multiprocessors:
        return 1
    most = max(1, min(MOST_SPLITS, key_tiles // TILES_PER_SPLIT))
    return min(range(1, most + 1), key=lambda splits: -(-programs * splits // multiprocessors) / splits)
