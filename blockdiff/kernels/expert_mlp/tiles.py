"""How the grouped products of expert_mlp are cut into tiles: by number format and by how full the experts are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Tile:
    """A program's part of a product: rows x columns of the result, so many summands at a time."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int

    def fitted(self, columns: int, inner: int) -> Tile:
        """No wider than the product is; powers of two, at least what tensor cores take."""
        return replace(
            self, columns=min(self.columns, _at_least(columns)), inner=min(self.inner, _at_least(inner))
        )


class Tiles(NamedTuple):
    """Tiles of every product; those of one token's row (all but `outer`) have the same rows.

    gate_up holds two results, gate and up, of its columns each.
    """

    gate_up: Tile
    down: Tile
    activation: Tile
    grad_x: Tile
    outer: Tile


# (element size, largest mean number of rows of an expert) -> tiles. Few rows: streaming the weights is all, so small
# tiles and many programs in flight. 64: two thirds of a tile of 128 would stand empty where experts hold about 128.
# Chosen by shared memory, registers and tile counts for D 2816, F 704 (docs/kernels/expert_mlp.md); not yet timed.
TABLE: dict[tuple[int, float], Tiles] = {
    (2, 24): Tiles(
        gate_up=Tile(32, 64, 128, 4, 3),
        down=Tile(32, 128, 64, 4, 4),
        activation=Tile(32, 64, 64, 4, 4),
        grad_x=Tile(32, 128, 64, 4, 4),
        outer=Tile(128, 128, 32, 8, 3),
    ),
    (2, 192): Tiles(
        gate_up=Tile(64, 64, 64, 4, 4),
        down=Tile(64, 256, 64, 4, 3),
        activation=Tile(64, 64, 64, 8, 4),
        grad_x=Tile(64, 256, 64, 4, 3),
        outer=Tile(128, 256, 64, 8, 3),
    ),
    (2, float("inf")): Tiles(
        gate_up=Tile(128, 128, 64, 8, 4),
        down=Tile(128, 256, 64, 8, 3),
        activation=Tile(128, 64, 64, 8, 4),
        grad_x=Tile(128, 256, 64, 8, 3),
        outer=Tile(128, 256, 64, 8, 3),
    ),
    (4, 24): Tiles(
        gate_up=Tile(32, 64, 32, 4, 2),
        down=Tile(32, 64, 32, 4, 2),
        activation=Tile(32, 64, 32, 4, 2),
        grad_x=Tile(32, 64, 32, 4, 2),
        outer=Tile(64, 64, 32, 4, 2),
    ),
    (4, float("inf")): Tiles(
        gate_up=Tile(64, 64, 32, 4, 2),
        down=Tile(64, 64, 32, 4, 2),
        activation=Tile(64, 32, 32, 4, 2),
        grad_x=Tile(64, 64, 32, 4, 2),
        outer=Tile(64, 64, 32, 4, 2),
    ),
}


def tiles_of(slots: int, experts: int, element_size: int) -> Tiles:
    """The tiles for so many (token, expert) pairs: a function of shapes alone."""
    mean = slots / max(1, experts)
    size = 2 if element_size == 2 else 4
    return next(tiles for (of_size, most), tiles in TABLE.items() if of_size == size and mean <= most)


def _at_least(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())
