"""Tiles: the part of its result that one program of a Triton kernel computes at a time.

For kernels with matrix products tiles.json lists tiles by architecture, element size and problem size. Nothing is timed
at run time, so the same call always sums in the same order. `python -m benchmarks.tune` writes the file.
The other kernels read and write every element once; `elementwise` sizes their tiles.
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
# Compute capability of each architecture in the table -> shared memory of a thread block, in bytes.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
INTERPRETED: bool = triton.knobs.runtime.interpret  # read once, as Triton does when kernels are imported
LEAST = 16  # smallest size of rows, columns and sums that tensor cores multiply


@dataclass(frozen=True)
class Tile:
    """A tile of `rows` x `columns` of the result, summed `inner` terms at a time (0: all at once).

    warps, stages: Triton's num_warps and num_stages.
    """

    rows: int
    columns: int
    inner: int = 0
    warps: int = 4
    stages: int = 1

    def fitted(self, **sizes: int) -> Tile:
        """Shrink rows, columns or inner to the power of two that covers a size, at least LEAST."""
        return _fitted(self, **sizes)

    def grid(self, rows: int, columns: int = 1) -> tuple[int, int]:
        """Return the grid of programs that covers a result [rows, columns]."""
        return -(-rows // self.rows), -(-columns // self.columns)

    @functools.cached_property
    def options(self) -> dict[str, int]:
        """The tile as keyword arguments of a kernel: ROWS, COLUMNS, INNER and Triton's options."""
        inner = dict(INNER=self.inner) if self.inner else {}
        return dict(ROWS=self.rows, COLUMNS=self.columns, num_warps=self.warps, num_stages=self.stages) | inner


@cached_by_sizes
def _fitted(tile: Tile, **sizes: int) -> Tile:
    return replace(
        tile, **{name: min(getattr(tile, name), max(LEAST, power_of_2(size))) for name, size in sizes.items()}
    )


def power_of_2(size: int) -> int:
    """Round up to a power of two."""
    return 1 << max(0, size - 1).bit_length()


@cached_by_sizes
def elementwise(columns: int, elements: int = 2048) -> Tile:
    """Return a tile of whole rows with about `elements` elements, at least one row."""
    columns = power_of_2(columns)
    rows = max(1, elements // columns)
    return Tile(rows, columns, warps=max(1, min(8, rows * columns // 512)))


@functools.cache
def architecture(device: torch.device) -> int:
    """Return the newest architecture in SHARED_MEMORY that is not above the device's (90: capability 9.0).

    0 if there is none. A CPU has 90, for the interpreter.
    """
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return max((known for known in SHARED_MEMORY if known <= 10 * major + minor), default=0)


def runs_products_aside(x: Tensor) -> bool:
    """Whether products are asynchronous on x's device (wgmma of sm_90), so that kernels must wait for them."""
    return architecture(x.device) == 90 and not INTERPRETED


def decodes_fp8(x: Tensor) -> bool:
    """Whether x's device has an instruction that converts e4m3 to fp16; the interpreter has none."""
    return architecture(x.device) >= 89 and not INTERPRETED


def precision_of(dtype: torch.dtype, head: int = 0) -> str:
    """Return Triton's `input_precision` for products of a dtype: tf32x3 for fp32, about as exact as fp32.

    Half precision ignores it. head: head dimension of an attention kernel; above 128 tf32x3 would run out of registers.
    """
    return "tf32" if dtype != torch.float32 else "tf32x3" if head <= 128 else "ieee"


def tile_of(kernel: str, x: Tensor, size: float) -> Tile:
    """Return the table's tile for a kernel on x's device and dtype; raise Unserved if it has none.

    size: the problem size that the kernel's lines in the table are limited by (`up_to`).
    """
    return tile_for(kernel, x.dtype, x.device, size)


@cached_by_sizes
def tile_for(kernel: str, dtype: torch.dtype, device: torch.device, size: float) -> Tile:
    """Return the table's tile for a kernel, a dtype and a device; arguments and errors as in `tile_of`."""
    return chosen(kernel, architecture(device), dtype.itemsize, size)


@cached_by_sizes
def chosen(kernel: str, capability: int, element_size: int, size: float) -> Tile:
    """Return the table's tile for a kernel, an architecture (90: capability 9.0) and an element size in bytes.

    size: as in `tile_of`. Raises Unserved if the table has no tile.
    """
    for limit, tile in table().get((kernel, capability, element_size), ()):
        if size <= limit:
            return tile
    raise Unserved(
        f"{kernel} in Triton has no tile for size {size:g} in {8 * element_size}-bit numbers on compute capability "
        f"{capability // 10}.{capability % 10} (tiles.json)"
    )


@functools.cache
def table() -> dict[tuple[str, int, int], list[tuple[float, Tile]]]:
    """Read tiles.json: (kernel, architecture, element size) -> [(largest size, tile), ...] in rising order."""
    lines_by_key: dict[tuple[str, int, int], list[tuple[float, Tile]]] = {}
    for line in json.loads(FILE.read_text(encoding="utf-8"))["tiles"]:
        for architecture in line["architectures"]:
            key = (line["kernel"], architecture, line["bytes"])
            lines_by_key.setdefault(key, []).append((float(line["up_to"] or "inf"), Tile(*line["tile"])))
    return {key: sorted(lines, key=lambda line: line[0]) for key, lines in lines_by_key.items()}
