"""Chunks of raw products, and the launchers of the vocabulary's Triton kernels: one function for each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from blockdiff.kernels.vocabulary import triton_kernels

TILE = 4096  # elements of a program: tokens of one row, or of several rows where the vocabulary is smaller
ALIGNED = 128  # slices of the vocabulary are multiples of this, for the products

Favoured = tuple[Tensor, Tensor] | None  # observed tokens and their bonus


def tile_of(vocabulary: int) -> dict[str, int]:
    """Tokens, rows and warps of a program; the whole vocabulary's size decides, not that of a chunk or shard of it."""
    tokens = min(TILE, max(16, triton.next_power_of_2(vocabulary)))
    return dict(TILE=tokens, ROWS=max(1, TILE // tokens), num_warps=max(1, min(8, TILE // 512)))


def _grid(x: Tensor, tile: dict[str, int]) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], tile["ROWS"]), triton.cdiv(x.shape[1], tile["TILE"])


def by_rows(
    hidden: Tensor, table: Tensor, chunk_bytes: int, kept: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of raw products of some rows and all tokens, one after the other in the same memory (or in `kept`)."""
    N, V = hidden.shape[0], table.shape[0]
    step = max(1, min(N, chunk_bytes // (V * table.element_size())))
    memory = torch.empty(step, V, dtype=table.dtype, device=table.device) if kept is None else kept
    for lo in range(0, N, step):
        rows = slice(lo, min(lo + step, N))
        x = memory[: rows.stop - lo] if kept is None else kept[rows]
        yield rows, torch.mm(hidden[rows], table.t(), out=x)


def by_tokens(hidden: Tensor, table: Tensor, chunk_bytes: int) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of raw products of all rows and some tokens, one after the other in the same memory."""
    N, V = hidden.shape[0], table.shape[0]
    step = max(1, chunk_bytes // (max(1, N) * table.element_size()))
    step = min(V, step // ALIGNED * ALIGNED if step >= ALIGNED else step)
    memory = torch.empty(N * step, dtype=table.dtype, device=table.device)
    for lo in range(0, V, step):
        tokens = slice(lo, min(lo + step, V))
        x = memory[: N * (tokens.stop - lo)].view(N, -1)
        yield tokens, torch.mm(hidden, table[tokens].t(), out=x)


class Tiles:
    """What one pass over raw products leaves of every row: [N, tiles] peaks, sums, moments and best tokens."""

    def __init__(self, N: int, count: int, device: torch.device):
        self.peaks, self.sums, self.moments = torch.empty(3, N, count, dtype=torch.float32, device=device)
        self.bests = torch.empty(N, count, dtype=torch.int32, device=device)
        self.N, self.count = N, count

    def merging(self) -> tuple[tuple[int], dict[str, int]]:
        """The grid of a kernel that merges them, and its constants."""
        power = triton.next_power_of_2(self.count)
        rows = max(1, TILE // 4 // power)
        return (triton.cdiv(self.N, rows),), dict(TILES=power, ROWS=rows, num_warps=4)


def tiles_of(
    x: Tensor,
    softcap: float | None,
    tile: dict[str, int],
    temperature: Tensor | None = None,
    favoured: Favoured = None,
    allowed: Tensor | None = None,
    first: int = 0,
    with_moment: bool = False,
    with_best: bool = False,
) -> Tiles:
    """One pass over raw products x [N, width] of the tokens from `first` on."""
    grid = _grid(x, tile)
    out = Tiles(x.shape[0], grid[1], x.device)
    triton_kernels.tiles[grid](
        x, _or(temperature, x), *(favoured or (x, x)), _or(allowed, x), out.peaks, out.sums, out.moments, out.bests,
        *x.shape, first, _words(allowed), softcap or 0.0, HAS_CAP=softcap is not None,
        HAS_TEMPERATURE=temperature is not None, HAS_BONUS=favoured is not None, HAS_ALLOWED=allowed is not None,
        WITH_MOMENT=with_moment, WITH_BEST=with_best, **tile,
    )  # fmt: skip
    return out


def merge(tiles: Tiles, uniform: Tensor | None = None) -> dict[str, Tensor]:
    """Every row's peak and sum; with uniform numbers also entropy, argmax, the sample's tile and the sum within it."""
    grid, constants = tiles.merging()
    device = tiles.peaks.device
    peak, total, entropy, rest = torch.empty(4, tiles.N, dtype=torch.float32, device=device)
    argmax, chosen = torch.empty(2, tiles.N, dtype=torch.int64, device=device)
    triton_kernels.rows[grid](
        _or(uniform, peak), tiles.peaks, tiles.sums, tiles.moments, tiles.bests, peak, total, entropy, argmax, chosen,
        rest, tiles.N, tiles.count, WITH_STATS=uniform is not None, **constants,
    )  # fmt: skip
    return dict(peak=peak, total=total, entropy=entropy, argmax=argmax, chosen=chosen, rest=rest)


def pick(
    x: Tensor,
    merged: dict[str, Tensor],
    sample: Tensor,
    log_probability: Tensor,
    softcap: float | None,
    tile: dict[str, int],
    temperature: Tensor,
    given: Tensor | None,
    allowed: Tensor | None,
    first: int = 0,
) -> None:
    """Write the samples, and the log-probabilities, that lie among the tokens of x."""
    triton_kernels.tokens[_grid(x, tile)[:1]](
        x, temperature, _or(given, x), _or(allowed, x), merged["peak"], merged["total"], merged["chosen"],
        merged["rest"], sample, log_probability, *x.shape, first, _words(allowed), softcap or 0.0,
        HAS_CAP=softcap is not None, HAS_TEMPERATURE=True, HAS_GIVEN=given is not None,
        HAS_ALLOWED=allowed is not None, **tile,
    )  # fmt: skip


def to_probabilities(
    x: Tensor,
    softcap: float | None,
    tile: dict[str, int],
    temperature: Tensor,
    allowed: Tensor | None,
    peak: Tensor,
    total: Tensor,
    first: int = 0,
) -> None:
    """softmax(z) in place of the raw products of the tokens from `first` on."""
    triton_kernels.probabilities[_grid(x, tile)](
        x, temperature, _or(allowed, x), peak, total, *x.shape, first, _words(allowed), softcap or 0.0,
        HAS_CAP=softcap is not None, HAS_TEMPERATURE=True, HAS_ALLOWED=allowed is not None, **tile,
    )  # fmt: skip


def to_gradients(
    x: Tensor,
    target: Tensor,
    softcap: float | None,
    favoured: Favoured,
    factor: Tensor,
    peak: Tensor,
    total: Tensor,
    first: int = 0,
) -> None:
    """factor * dloss/dx in place of the raw products x of the tokens from `first` on."""
    tile = tile_of(x.shape[1])
    triton_kernels.gradients[_grid(x, tile)](
        x, target, *(favoured or (x, x)), factor, peak, total, *x.shape, first, softcap or 0.0,
        HAS_CAP=softcap is not None, HAS_BONUS=favoured is not None, **tile,
    )  # fmt: skip


def losses_of(
    x: Tensor,
    target: Tensor,
    softcap: float | None,
    favoured: Favoured,
    is_ignored: Tensor | None,
    out: tuple[Tensor, Tensor, Tensor],
    argmax: Tensor | None = None,
) -> None:
    """Write loss, peak and sum of every row, and the argmax where it is wanted."""
    tiles = tiles_of(x, softcap, tile_of(x.shape[1]), favoured=favoured, with_best=argmax is not None)
    grid, constants = tiles.merging()
    loss, peak, total = out
    triton_kernels.losses[grid](
        x, target, *(favoured or (x, x)), _or(is_ignored, x), tiles.peaks, tiles.sums, tiles.bests, peak, total, loss,
        _or(argmax, x), *x.shape, tiles.count, softcap or 0.0, HAS_CAP=softcap is not None,
        HAS_BONUS=favoured is not None, HAS_IGNORED=is_ignored is not None, WITH_BEST=argmax is not None, **constants,
    )  # fmt: skip


def _or(tensor: Tensor | None, filler: Tensor) -> Tensor:
    """An argument of a kernel: what is absent is never read."""
    return filler if tensor is None else tensor


def _words(allowed: Tensor | None) -> int:
    return 0 if allowed is None else allowed.stride(0)
