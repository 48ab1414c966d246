"""One launcher for each Triton kernel of the vocabulary ops, and chunks of the raw products h E^T they read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from blockdiff.kernels.launch import empty, launch
from blockdiff.kernels.tiles import Tile, elementwise, power_of_2
from blockdiff.kernels.vocabulary import kernels
from blockdiff.kernels.vocabulary.kernels_filters import vocabulary_filters

CHUNK_BYTES = 256 << 20  # raw products in the table's dtype: 512 rows of 262,144 tokens in bf16
TILE, ELEMENTS = 4096, 4096  # most tokens of a tile, and elements of a program
WINDOW = 16384  # candidates for a filter's threshold that are copied, so that the row is not read again


def soft_rows(hidden: Tensor, embedding: Tensor | None) -> Tensor:
    """Allocate the soft embeddings of rows, as wide as the embeddings (None: the table, as wide as hidden states)."""
    return empty(hidden, len(hidden), hidden.shape[1] if embedding is None else embedding.shape[1])


class LogitTransform(NamedTuple):
    """The steps from raw products to logits: softcap, temperature, bonus of the observed token, allowed tokens."""

    softcap: float | None
    temperature: Tensor | None = None
    observed: Tensor | None = None
    bonus: Tensor | None = None
    allowed: Tensor | None = None  # int32 bitmask
    words: int = 0  # stride between rows of `allowed`; 0: all rows share one

    def of(self, rows: slice) -> LogitTransform:
        """Return the transform for some of the rows."""
        temperature, observed, bonus, allowed = (None if t is None else t[rows] for t in self[1:5])
        return LogitTransform(self.softcap, temperature, observed, bonus, allowed, self.words)


class TileStats(NamedTuple):
    """Statistics of every tile of each row, [N, tiles], and the target's logit [N]; in base 2 (see kernels.py)."""

    peaks: Tensor
    sums: Tensor
    moments: Tensor | None = None
    bests: Tensor | None = None
    target_z: Tensor | None = None  # NaN until the tile with the target was read
    untempered_sums: Tensor | None = None  # at temperature 1


class RowStats(NamedTuple):
    """Statistics of every row [N], merged from its tiles. None: not needed."""

    peak: Tensor
    total: Tensor
    loss: Tensor | None = None
    argmax: Tensor | None = None
    entropy: Tensor | None = None
    chosen: Tensor | None = None  # the tile of the sample
    rest: Tensor | None = None  # the threshold of the sample minus the sums of earlier tiles
    best_log_probability: Tensor | None = None  # of the argmax, at temperature 1


def tile_for(tokens: int) -> Tile:
    """Return the tile for slices of `tokens` tokens of the vocabulary."""
    return elementwise(min(tokens, TILE), ELEMENTS)


def new_tiles(like: Tensor, count: int, out: RowStats) -> TileStats:
    """Allocate the statistics of `count` tiles of every row that merging into `out` needs."""
    N, stats = len(out.peak), out.entropy is not None
    peaks, sums = empty(like, N, count, dtype=torch.float32), empty(like, N, count, dtype=torch.float32)
    moments = empty(peaks) if stats else None
    bests = None if out.argmax is None else empty(peaks, dtype=torch.int32)
    target_z = None if out.loss is None else torch.full_like(out.loss, torch.nan)
    untempered_sums = None if out.best_log_probability is None else empty(peaks)
    return TileStats(peaks, sums, moments, bests, target_z, untempered_sums)


def fill(
    tiles: TileStats,
    x: Tensor,
    transform: LogitTransform,
    tile: Tile,
    target: Tensor | None = None,
    first: int = 0,
    first_tile: int = 0,
) -> None:
    """Read raw products x of the tokens from `first` on, and write their tiles' statistics from `first_tile` on."""
    arguments = x, transform, target, tiles, *x.shape, first, first_tile, tiles.peaks.shape[1]
    launch(kernels.vocabulary_tiles, tile.grid(*x.shape), *arguments, **tile.options)


def merge(tiles: TileStats, out: RowStats, uniform: Tensor | None = None, temperature: Tensor | None = None) -> None:
    """Fill `out` from all tiles of the rows, which may come from several chunks or shards.

    temperature: of each row; needed for the log-probability of the argmax at temperature 1.
    """
    N, count = tiles.peaks.shape
    tile = elementwise(count)
    launch(kernels.vocabulary_rows, tile.grid(N), tiles, uniform, temperature, out, N, count, **tile.options)


def draw(x: Tensor, transform: LogitTransform, merged: RowStats, out: tuple[Tensor, Tensor], tile: Tile) -> None:
    """Write the samples and their log-probabilities to `out`."""
    arguments = x, transform, merged, *out, *x.shape
    launch(kernels.vocabulary_tokens, tile.grid(len(x)), *arguments, **tile.options)


def filtered(x: Tensor, transform: LogitTransform, top_k: int | None, top_p: float, min_p: float) -> LogitTransform:
    """Return the transform with only those tokens allowed that pass the filters."""
    N, width = x.shape
    words = -(-width // 32)
    packed = empty(x, N, words, dtype=torch.int32)
    tile = Tile(1, max(32, min(TILE, power_of_2(width))), warps=16)
    log_min_p = math.log2(min_p) if min_p > 0 else -math.inf
    has_k, has_p = top_k is not None and top_k < width, top_p < 1
    candidates = empty(x, N, WINDOW, dtype=torch.float32)
    arguments = x, transform, float(top_k or 0), float(top_p), log_min_p, packed, candidates, width, words, has_k, has_p
    launch(vocabulary_filters, (N,), *arguments, WINDOW=WINDOW, **tile.options)
    return transform._replace(allowed=packed, words=words)


def to_probabilities(x: Tensor, transform: LogitTransform, merged: RowStats, tile: Tile, first: int = 0) -> None:
    """Overwrite the raw products of the tokens from `first` on by softmax(z)."""
    launch(kernels.vocabulary_probabilities, tile.grid(*x.shape), x, transform, merged, *x.shape, first, **tile.options)


def to_gradients(
    x: Tensor, transform: LogitTransform, target: Tensor, factor: Tensor, merged: RowStats, tile: Tile, first: int = 0
) -> None:
    """Overwrite the raw products x of the tokens from `first` on by factor * dloss/dx."""
    arguments = x, transform, target, factor, merged, *x.shape, first
    launch(kernels.vocabulary_gradients, tile.grid(*x.shape), *arguments, **tile.options)


def temperatures(temperature: Tensor | float, like: Tensor) -> Tensor:
    """Return the temperature of every row of `like`, fp32 [N], filled on its device: a copy would block the host."""
    if isinstance(temperature, Tensor):
        return temperature.float().expand(len(like)).contiguous()
    return torch.full((len(like),), temperature, dtype=torch.float32, device=like.device)


# -- chunks of raw products ------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """A cut of the raw products into chunks of `rows` x `tokens`, all in one buffer; tiles are never cut."""

    rows: int
    tokens: int
    tile: Tile
    memory: Tensor

    def of_rows(self, hidden: Tensor) -> Iterator[slice]:
        """Return an iterator of slices that cut the rows of `hidden` into chunks of `self.rows`."""
        return (slice(lo, min(lo + self.rows, len(hidden))) for lo in range(0, len(hidden), self.rows))

    def products(self, hidden: Tensor, table: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of the vocabulary, each with the raw products of `hidden`; each overwrites the one before."""
        for lo in range(0, len(table), self.tokens):
            tokens = slice(lo, min(lo + self.tokens, len(table)))
            x = self.memory.view(-1)[: len(hidden) * (tokens.stop - lo)].view(len(hidden), -1)
            yield tokens, torch.mm(hidden, table[tokens].t(), out=x)


def fit(hidden: Tensor, table: Tensor) -> bool:
    """Whether all raw products fit in one chunk."""
    return len(hidden) * len(table) * table.element_size() <= CHUNK_BYTES


def chunks_of(hidden: Tensor, table: Tensor, by_tokens: bool = False, memory: Tensor | None = None) -> Chunks:
    """Cut raw products into chunks of at most CHUNK_BYTES, by rows or by tokens; one chunk if all fit."""
    (N, V), elements = (len(hidden), len(table)), CHUNK_BYTES // table.element_size()
    rows, tokens, tile = max(1, min(N, elements // V)), V, tile_for(V)
    if by_tokens and not fit(hidden, table):
        tokens = max(1, elements // N)
        tile = tile_for(min(V, 1 << (tokens.bit_length() - 1)))
        rows, tokens = N, tokens // tile.columns * tile.columns
    return Chunks(rows, tokens, tile, empty(table, rows * tokens) if memory is None else memory)


def sweep(
    hidden: Tensor, table: Tensor, transform: LogitTransform, chunks: Chunks, out: RowStats,
    target: Tensor | None = None, uniform: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fill `out` by one pass over the raw products of some rows; return their last chunk."""
    tiles = new_tiles(table, chunks.tile.grid(1, len(table))[1], out)
    if target is not None and tiles.target_z is not None:
        tiles.target_z.masked_fill_(target < 0, 0.0)  # rows without a target
    for tokens, x in chunks.products(hidden, table):
        fill(tiles, x, transform, chunks.tile, target, tokens.start, tokens.start // chunks.tile.columns)
    merge(tiles, out, uniform, transform.temperature)
    return x


def sweep_again(x: Tensor, transform: LogitTransform, chunks: Chunks, out: RowStats, uniform: Tensor) -> None:
    """Fill `out` by another pass over raw products x of some rows and all tokens."""
    tiles = new_tiles(x, chunks.tile.grid(1, x.shape[1])[1], out)
    fill(tiles, x, transform, chunks.tile)
    merge(tiles, out, uniform)
