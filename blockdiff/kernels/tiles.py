"""Tiles: how much of its result one program of a Triton kernel makes at a time.

Kernels with matrix products take theirs from tiles.json by architecture, element size and size of the problem, never
by timing at run time: the same call always computes in the same order. `python -m benchmarks.tune` writes the file.
The other kernels read and write every element once; `elementwise` gives them about as many elements each.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton
from torch import Tensor

from blockdiff.kernels.launch import Unserved, cached_by_sizes

FILE = Path(__file__).with_name("tiles.json")
# Compute capabilities that the table has lines for, and the shared memory that a block of them can have, in bytes.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
INTERPRETED: bool = triton.knobs.runtime.interpret  # what holds for kernels was decided when they were imported
LEAST = 16  # rows, columns and summands of the smallest product that tensor cores take


@dataclass(frozen=True)
class Tile:
    """rows x columns of the result, `inner` summands at a time (0: all), run by so many warps, loading in stages."""

    rows: int
    columns: int
    inner: int = 0
    warps: int = 4
    stages: int = 1

    def fitted(self, **sizes: int) -> Tile:
        """The tile with each of the given sizes (rows, columns or inner) no larger than needed for so many."""
        return _fitted(self, **sizes)

    def grid(self, rows: int, columns: int = 1) -> tuple[int, int]:
        """The number of programs that cover a result of that size."""
        return -(-rows // self.rows), -(-columns // self.columns)

    @functools.cached_property
    def options(self) -> dict[str, int]:
        """The constants and options of a kernel with this tile."""
        inner = dict(INNER=self.inner) if self.inner else {}
        return dict(ROWS=self.rows, COLUMNS=self.columns, num_warps=self.warps, num_stages=self.stages) | inner


@cached_by_sizes
def _fitted(tile: Tile, **sizes: int) -> Tile:
    return replace(
        tile, **{name: min(getattr(tile, name), max(LEAST, power_of_2(size))) for name, size in sizes.items()}
    )


def power_of_2(size: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, size - 1).bit_length()


@cached_by_sizes
def elementwise(columns: int, elements: int = 2048) -> Tile:
    """A tile of whole rows of so many columns, of about `elements` elements but one row at least."""
    columns = power_of_2(columns)
    rows = max(1, elements // columns)
    return Tile(rows, columns, warps=max(1, min(8, rows * columns // 512)))


@functools.cache
def architecture(device: torch.device) -> int:
    """The newest architecture of the table that runs on a device: 90 for 9.0; 90 also for the interpreter's CPU."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return max((known for known in SHARED_MEMORY if known <= 10 * major + minor), default=0)


def runs_products_aside(x: Tensor) -> bool:
    """True where x's device goes on with other instructions during a product until it waits for it (wgmma of sm_90)."""
    return architecture(x.device) == 90 and not INTERPRETED


def decodes_fp8(x: Tensor) -> bool:
    """True where x's device has an instruction that makes fp16 of e4m3; the interpreter has none."""
    return architecture(x.device) >= 89 and not INTERPRETED


def precision_of(dtype: torch.dtype, head: int = 0) -> str:
    """The precision of products, which half precision ignores: fp32 ones are made of three tf32 ones, as good as fp32.

    head: the size of attention's heads; for large ones there are no registers for that.
    """
    return "tf32" if dtype != torch.float32 else "tf32x3" if head <= 128 else "ieee"


def tile_of(kernel: str, x: Tensor, size: float) -> Tile:
    """The tile of a kernel on x's device for elements of x's size; `size` is what the table's lines are limited by.

    Raises Unserved where the table has no line for it.
    """
    return tile_for(kernel, x.dtype, x.device, size)


@cached_by_sizes
def tile_for(kernel: str, dtype: torch.dtype, device: torch.device, size: float) -> Tile:
    """The same for numbers of a dtype on a device."""
    return chosen(kernel, architecture(device), dtype.itemsize, size)


@cached_by_sizes
def chosen(kernel: str, on: int, element_size: int, size: float) -> Tile:
    """The tile of a kernel on an architecture, for elements of so many bytes."""
    for limit, tile in table().get((kernel, on, element_size), ()):
        if size <= limit:
            return tile
    raise Unserved(
        f"{kernel} in Triton has no tile for size {size:g} in {8 * element_size}-bit numbers on compute capability "
        f"{on // 10}.{on % 10} (tiles.json)"
    )


@functools.cache
def table() -> dict[tuple[str, int, int], list[tuple[float, Tile]]]:
    """(kernel, architecture, element size) -> (the largest size served, tile) in rising order, from tiles.json."""
    found: dict[tuple[str, int, int], list[tuple[float, Tile]]] = {}
    for line in json.loads(FILE.read_text(encoding="utf-8"))["tiles"]:
        for architecture in line["architectures"]:
            key = (line["kernel"], architecture, line["bytes"])
            found.setdefault(key, []).append((float(line["up_to"] or "inf"), Tile(*line["tile"])))
    return {key: sorted(lines, key=lambda line: line[0]) for key, lines in found.items()}
