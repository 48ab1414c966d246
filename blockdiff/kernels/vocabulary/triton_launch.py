"""Chunks of raw products, and the launchers of the vocabulary's Triton kernels: one function for each."""

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
TILE, ELEMENTS = 4096, 4096  # tokens of a tile at most, and elements of a program
WINDOW = 16384  # tokens among which filters look for the last one to leave, without reading the row again


def soft_rows(hidden: Tensor, embedding: Tensor | None) -> Tensor:
    """Room for the soft embeddings of rows, as wide as the embeddings (None: the table, as hidden states)."""
    return empty(hidden, len(hidden), hidden.shape[1] if embedding is None else embedding.shape[1])


class Logits(NamedTuple):
    """The way from raw products to logits: softcap, then the changes of every row."""

    softcap: float | None
    temperature: Tensor | None = None
    observed: Tensor | None = None
    bonus: Tensor | None = None
    allowed: Tensor | None = None  # int32 bitmask
    words: int = 0  # from one row of `allowed` to the next; 0: all rows share one

    def of(self, rows: slice) -> Logits:
        """The same for some of the rows."""
        temperature, observed, bonus, allowed = (None if t is None else t[rows] for t in self[1:5])
        return Logits(self.softcap, temperature, observed, bonus, allowed, self.words)


class Tiles(NamedTuple):
    """Statistics of one pass over raw products for every row: [N, tiles], and the target's logit [N]; base 2."""

    peaks: Tensor
    sums: Tensor
    moments: Tensor | None = None
    bests: Tensor | None = None
    of_target: Tensor | None = None  # NaN until the tile is met that holds the target
    own_sums: Tensor | None = None  # at temperature 1


class Rows(NamedTuple):
    """The statistics of every row [N], merged from its tiles."""

    peak: Tensor
    total: Tensor
    loss: Tensor | None = None
    argmax: Tensor | None = None
    entropy: Tensor | None = None
    chosen: Tensor | None = None  # the tile of the sample
    rest: Tensor | None = None  # the part of its sum that lies before the sample
    best_log_probability: Tensor | None = None  # of the argmax, at temperature 1


def tile_for(tokens: int) -> Tile:
    """The tile for slices of so many tokens."""
    return elementwise(min(tokens, TILE), ELEMENTS)


def new_tiles(like: Tensor, count: int, out: Rows) -> Tiles:
    """Memory for so many tiles of every row, with what filling `out` needs beside peaks and sums."""
    N, stats = len(out.peak), out.entropy is not None
    peaks, sums = empty(like, N, count, dtype=torch.float32), empty(like, N, count, dtype=torch.float32)
    moments = empty(peaks) if stats else None
    bests = None if out.argmax is None else empty(peaks, dtype=torch.int32)
    of_target = None if out.loss is None else torch.full_like(out.loss, torch.nan)
    own_sums = None if out.best_log_probability is None else empty(peaks)
    return Tiles(peaks, sums, moments, bests, of_target, own_sums)


def fill(
    tiles: Tiles, x: Tensor, how: Logits, tile: Tile, target: Tensor | None = None, first: int = 0, place: int = 0
) -> None:
    """One pass over the raw products x of the tokens from `first` on, whose tiles stand from `place` on."""
    arguments = x, how, target, tiles, *x.shape, first, place, tiles.peaks.shape[1]
    launch(kernels.vocabulary_tiles, tile.grid(*x.shape), *arguments, **tile.options)


def merge(tiles: Tiles, out: Rows, uniform: Tensor | None = None, temperature: Tensor | None = None) -> None:
    """Fill `out` from all tiles of the rows, whichever chunk or shard they come from.

    temperature: of each row, where the own log-probability of the argmax is asked for.
    """
    N, count = tiles.peaks.shape
    tile = elementwise(count)
    launch(kernels.vocabulary_rows, tile.grid(N), tiles, uniform, temperature, out, N, count, **tile.options)


def pick(x: Tensor, how: Logits, merged: Rows, out: tuple[Tensor, Tensor], tile: Tile) -> None:
    """Write to `out` the samples and their log-probabilities."""
    arguments = x, how, merged, *out, *x.shape
    launch(kernels.vocabulary_tokens, tile.grid(len(x)), *arguments, **tile.options)


def filtered(x: Tensor, how: Logits, top_k: int | None, top_p: float, min_p: float) -> Logits:
    """The same logits with only those tokens allowed that the filters leave."""
    N, width = x.shape
    words = -(-width // 32)
    packed = empty(x, N, words, dtype=torch.int32)
    tile = Tile(1, max(32, min(TILE, power_of_2(width))), warps=16)
    log_min_p = math.log2(min_p) if min_p > 0 else -math.inf
    has_k, has_p = top_k is not None and top_k < width, top_p < 1
    candidates = empty(x, N, WINDOW, dtype=torch.float32)
    arguments = x, how, float(top_k or 0), float(top_p), log_min_p, packed, candidates, width, words, has_k, has_p
    launch(vocabulary_filters, (N,), *arguments, WINDOW=WINDOW, **tile.options)
    return how._replace(allowed=packed, words=words)


def to_probabilities(x: Tensor, how: Logits, merged: Rows, tile: Tile, first: int = 0) -> None:
    """softmax(z) in place of the raw products of the tokens from `first` on."""
    launch(kernels.vocabulary_probabilities, tile.grid(*x.shape), x, how, merged, *x.shape, first, **tile.options)


def to_gradients(
    x: Tensor, how: Logits, target: Tensor, factor: Tensor, merged: Rows, tile: Tile, first: int = 0
) -> None:
    """factor * dloss/dx in place of the raw products x of the tokens from `first` on."""
    arguments = x, how, target, factor, merged, *x.shape, first
    launch(kernels.vocabulary_gradients, tile.grid(*x.shape), *arguments, **tile.options)


def temperatures(temperature: Tensor | float, like: Tensor) -> Tensor:
    """The temperature of every row of `like`, fp32 [N], written by its device: a copy would wait."""
    if isinstance(temperature, Tensor):
        return temperature.float().expand(len(like)).contiguous()
    return torch.full((len(like),), temperature, dtype=torch.float32, device=like.device)


# -- chunks of raw products ------------------------------------------------------------------------------------


class Chunks(NamedTuple):
    """The cut of raw products: so many rows and tokens at a time, in tiles that no cut goes through, in one memory."""

    rows: int
    tokens: int
    tile: Tile
    memory: Tensor

    def of_rows(self, hidden: Tensor) -> Iterator[slice]:
        """One slice of the rows after the other."""
        return (slice(lo, min(lo + self.rows, len(hidden))) for lo in range(0, len(hidden), self.rows))

    def products(self, hidden: Tensor, table: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The raw products of some rows with one slice of the tokens after the other."""
        for lo in range(0, len(table), self.tokens):
            tokens = slice(lo, min(lo + self.tokens, len(table)))
            x = self.memory.view(-1)[: len(hidden) * (tokens.stop - lo)].view(len(hidden), -1)
            yield tokens, torch.mm(hidden, table[tokens].t(), out=x)


def fit(hidden: Tensor, table: Tensor) -> bool:
    """True where all raw products fit into one chunk."""
    return len(hidden) * len(table) * table.element_size() <= CHUNK_BYTES


def chunks_of(hidden: Tensor, table: Tensor, by_tokens: bool = False, memory: Tensor | None = None) -> Chunks:
    """Chunks of at most CHUNK_BYTES: of whole rows, or by tokens of all rows; all in one where they fit."""
    (N, V), elements = (len(hidden), len(table)), CHUNK_BYTES // table.element_size()
    rows, tokens, tile = max(1, min(N, elements // V)), V, tile_for(V)
    if by_tokens and not fit(hidden, table):
        tokens = max(1, elements // N)
        tile = tile_for(min(V, 1 << (tokens.bit_length() - 1)))
        rows, tokens = N, tokens // tile.columns * tile.columns
    return Chunks(rows, tokens, tile, empty(table, rows * tokens) if memory is None else memory)


def sweep(
    hidden: Tensor, table: Tensor, how: Logits, chunks: Chunks, out: Rows,
    target: Tensor | None = None, uniform: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Fill `out` by one pass over the raw products of some rows; gives the last chunk of them."""
    tiles = new_tiles(table, chunks.tile.grid(1, len(table))[1], out)
    if target is not None and tiles.of_target is not None:
        tiles.of_target.masked_fill_(target < 0, 0.0)  # no target at all
    for tokens, x in chunks.products(hidden, table):
        fill(tiles, x, how, chunks.tile, target, tokens.start, tokens.start // chunks.tile.columns)
    merge(tiles, out, uniform, how.temperature)
    return x


def again(x: Tensor, how: Logits, chunks: Chunks, out: Rows, uniform: Tensor) -> None:
    """Fill `out` by another pass over the raw products of some rows and all tokens, which are there already."""
    tiles = new_tiles(x, chunks.tile.grid(1, x.shape[1])[1], out)
    fill(tiles, x, how, chunks.tile)
    merge(tiles, out, uniform)
