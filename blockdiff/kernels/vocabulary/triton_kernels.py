"""The Triton kernels of the vocabulary ops: what stands between the two matrix products, fp32 inside.

They read and overwrite a chunk x [N, width] of raw products h E^T, tokens first ... first + width - 1, in the table's
dtype. Logits are kept in base 2: z = cap(x) / T * log2(e). One pass leaves, for every tile of TILE tokens, its peak
(largest z), sum (of 2^(z - peak)), moment (of (z - peak) 2^(z - peak)) and best token; merging those is all that rows,
chunks and shards of the table need, and since tiles are the unit, shards that end at tiles give the same bits as one.
A program takes ROWS rows, of one tile or of all tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _rows_of(N, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row < N


@triton.jit
def _capped(x, softcap, HAS_CAP: tl.constexpr):
    """`softcap * tanh(x / softcap)` and its slope, from s = (1 - tanh) / 2: the slope 4 s (1 - s) has no 1 - 1."""
    if HAS_CAP:
        s = 1.0 / (1.0 + tl.exp2(x * ((2.0 / softcap) * LOG2E)))
        return softcap * (1.0 - 2.0 * s), 4.0 * s * (1.0 - s)
    else:
        return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _logits(
    x, temperature, observed, bonus, allowed, row, is_row, column, width, first, words, softcap,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_BONUS: tl.constexpr, HAS_ALLOWED: tl.constexpr,
):  # fmt: skip
    """z at the columns [ROWS, tokens] (-inf outside the chunk and where not allowed), and the slope of the soft-cap.

    words: from one row of `allowed` to the next; 0 where all rows share one mask.
    """
    is_there = is_row[:, None] & (column >= 0) & (column < width)
    raw = tl.load(x + row[:, None] * width + column, mask=is_there, other=0.0).to(tl.float32)
    z, slope = _capped(raw, softcap, HAS_CAP)
    if HAS_TEMPERATURE:
        z = z * ((1.0 / tl.load(temperature + row, mask=is_row, other=1.0)) * LOG2E)[:, None]
    else:
        z = z * LOG2E
    token = column + first
    if HAS_BONUS:
        favoured = tl.load(observed + row, mask=is_row, other=-1)
        more = tl.load(bonus + row, mask=is_row, other=0.0) * LOG2E
        z += tl.where(token == favoured[:, None], more[:, None], 0.0)
    if HAS_ALLOWED:
        word = tl.load(allowed + row[:, None] * words + token // 32, mask=is_there, other=0)
        is_there = is_there & (((word >> (token % 32)) & 1) != 0)
    return tl.where(is_there, z, float("-inf")), slope


@triton.jit
def _finite(peak):
    """A peak to subtract: tiles and rows without a token have -inf."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def tiles(
    x, temperature, observed, bonus, allowed, peaks, sums, moments, bests, N, width, first, words, softcap,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_BONUS: tl.constexpr, HAS_ALLOWED: tl.constexpr,
    WITH_MOMENT: tl.constexpr, WITH_BEST: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Peak, sum, moment and best token of one tile of some rows."""
    row, is_row = _rows_of(N, ROWS)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    z, _ = _logits(
        x, temperature, observed, bonus, allowed, row, is_row, column, width, first, words, softcap,
        HAS_CAP, HAS_TEMPERATURE, HAS_BONUS, HAS_ALLOWED,
    )  # fmt: skip
    peak = tl.max(z, 1)
    below = z - _finite(peak)[:, None]
    e = tl.exp2(below)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + place, peak, mask=is_row)
    tl.store(sums + place, tl.sum(e, 1), mask=is_row)
    if WITH_MOMENT:
        tl.store(moments + place, tl.sum(e * tl.where(e == 0.0, 0.0, below), 1), mask=is_row)
    if WITH_BEST:
        best = tl.min(tl.where(z == peak[:, None], column + first, NO_TOKEN), 1)
        tl.store(bests + place, best, mask=is_row)


@triton.jit
def _merged(peaks, sums, row, is_row, count, ROWS: tl.constexpr, TILES: tl.constexpr):
    """All tiles of some rows: places, which are there, peaks, weights, weighted sums; the rows' peaks and sums."""
    tile = tl.arange(0, TILES)[None, :]
    place = row[:, None] * count + tile
    is_there = is_row[:, None] & (tile < count)
    peak_of = tl.load(peaks + place, mask=is_there, other=float("-inf"))
    sum_of = tl.load(sums + place, mask=is_there, other=0.0)
    peak = _finite(tl.max(peak_of, 1))
    weight = tl.exp2(peak_of - peak[:, None])
    part = sum_of * weight
    return place, is_there, peak_of, weight, part, peak, tl.where(is_row, tl.sum(part, 1), 1.0)


@triton.jit
def _best(bests, place, is_there, peak_of):
    """The lowest token among those of the tiles that reach a row's peak; 0 where there is none (NaN)."""
    best_of = tl.load(bests + place, mask=is_there, other=NO_TOKEN)
    best = tl.min(tl.where(peak_of == tl.max(peak_of, 1)[:, None], best_of, NO_TOKEN), 1)
    return tl.where(best == NO_TOKEN, 0, best).to(tl.int64)


@triton.jit
def rows(
    uniform, peaks, sums, moments, bests, peak_of_row, sum_of_row, entropy, argmax, chosen, rest, N, count,
    WITH_STATS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A row's peak and sum; with stats its entropy, argmax, the tile its sample lies in and the sum up to it there."""
    row, is_row = _rows_of(N, ROWS)
    place, is_there, peak_of, weight, part, peak, total = _merged(peaks, sums, row, is_row, count, ROWS, TILES)
    tl.store(peak_of_row + row, peak, mask=is_row)
    tl.store(sum_of_row + row, total, mask=is_row)
    if WITH_STATS:
        moment_of = tl.load(moments + place, mask=is_there, other=0.0)
        moment = weight * moment_of + part * tl.where(part == 0.0, 0.0, peak_of - peak[:, None])
        tl.store(entropy + row, (tl.log2(total) - tl.sum(moment, 1) / total) * LN2, mask=is_row)
        tl.store(argmax + row, _best(bests, place, is_there, peak_of), mask=is_row)
        tile = tl.arange(0, TILES)[None, :]
        cdf = tl.cumsum(part, 1)
        threshold = tl.load(uniform + row, mask=is_row, other=0.0) * total
        within = tl.min(tl.where((cdf > threshold[:, None]) & (part > 0.0), tile, TILES), 1)
        within = tl.where(within == TILES, tl.max(tl.where(part > 0.0, tile, 0), 1), within)
        before = tl.sum(tl.where(tile == within[:, None] - 1, cdf, 0.0), 1)
        tl.store(chosen + row, within.to(tl.int64), mask=is_row)
        tl.store(rest + row, threshold - before, mask=is_row)


@triton.jit
def tokens(
    x, temperature, given, allowed, peak_of_row, sum_of_row, chosen, rest, sample, log_probability,
    N, width, first, words, softcap,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_GIVEN: tl.constexpr, HAS_ALLOWED: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The sample within the chosen tile, and the log-probability of the given token or else of the sample.

    What lies in another shard of the table is left for that shard to write.
    """
    row, is_row = _rows_of(N, ROWS)
    peak = tl.load(peak_of_row + row, mask=is_row, other=0.0)
    total = tl.load(sum_of_row + row, mask=is_row, other=1.0)
    start = tl.load(chosen + row, mask=is_row, other=0) * TILE - first
    is_ours = is_row & (start >= 0) & (start < width)
    column = start[:, None] + tl.arange(0, TILE)[None, :]
    z, _ = _logits(
        x, temperature, x, x, allowed, row, is_ours, column, width, first, words, softcap,
        HAS_CAP, HAS_TEMPERATURE, False, HAS_ALLOWED,
    )  # fmt: skip
    e = tl.exp2(z - peak[:, None])
    beyond = tl.load(rest + row, mask=is_row, other=0.0)
    is_beyond = (tl.cumsum(e, 1) > beyond[:, None]) & (e > 0.0)
    token = tl.min(tl.where(is_beyond, column, NO_TOKEN), 1)
    # rounding may leave nothing beyond: then it is the tile's last token with a probability
    token = tl.where(token == NO_TOKEN, tl.max(tl.where(e > 0.0, column, start[:, None]), 1), token)
    tl.store(sample + row, token + first, mask=is_ours)
    if HAS_GIVEN:
        token = tl.load(given + row, mask=is_row, other=0) - first
        is_ours = is_row & (token >= 0) & (token < width)
    its, _ = _logits(
        x, temperature, x, x, allowed, row, is_ours, token[:, None], width, first, words, softcap,
        HAS_CAP, HAS_TEMPERATURE, False, HAS_ALLOWED,
    )  # fmt: skip
    tl.store(log_probability + row, (tl.max(its, 1) - peak - tl.log2(total)) * LN2, mask=is_ours)


@triton.jit
def losses(
    x, target, observed, bonus, is_ignored, peaks, sums, bests, peak_of_row, sum_of_row, loss, argmax,
    N, width, count, softcap,
    HAS_CAP: tl.constexpr, HAS_BONUS: tl.constexpr, HAS_IGNORED: tl.constexpr, WITH_BEST: tl.constexpr,
    TILES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A row's peak, sum and cross-entropy (0 where ignored, NaN for a target that is no token), and its argmax."""
    row, is_row = _rows_of(N, ROWS)
    place, is_there, peak_of, _, _, peak, total = _merged(peaks, sums, row, is_row, count, ROWS, TILES)
    token = tl.load(target + row, mask=is_row, other=0)
    z, _ = _logits(
        x, x, observed, bonus, x, row, is_row, token[:, None], width, 0, 0, softcap, HAS_CAP, False, HAS_BONUS, False
    )
    its = tl.where((token >= 0) & (token < width) & is_row, tl.max(z, 1), float("nan"))
    value = (tl.log2(total) + (peak - its)) * LN2
    if HAS_IGNORED:
        value = tl.where(tl.load(is_ignored + row, mask=is_row, other=1) != 0, 0.0, value)
    tl.store(peak_of_row + row, peak, mask=is_row)
    tl.store(sum_of_row + row, total, mask=is_row)
    tl.store(loss + row, value, mask=is_row)
    if WITH_BEST:
        tl.store(argmax + row, _best(bests, place, is_there, peak_of), mask=is_row)


@triton.jit
def probabilities(
    x, temperature, allowed, peak_of_row, sum_of_row, N, width, first, words, softcap,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_ALLOWED: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """softmax(z), in place of the raw products."""
    row, is_row = _rows_of(N, ROWS)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    z, _ = _logits(
        x, temperature, x, x, allowed, row, is_row, column, width, first, words, softcap,
        HAS_CAP, HAS_TEMPERATURE, False, HAS_ALLOWED,
    )  # fmt: skip
    peak = tl.load(peak_of_row + row, mask=is_row, other=0.0)
    share = 1.0 / tl.load(sum_of_row + row, mask=is_row, other=1.0)
    p = tl.exp2(z - peak[:, None]) * share[:, None]
    is_there = is_row[:, None] & (column < width)
    tl.store(x + row[:, None] * width + column, p.to(x.dtype.element_ty), mask=is_there)


@triton.jit
def gradients(
    x, target, observed, bonus, factor, peak_of_row, sum_of_row, N, width, first, softcap,
    HAS_CAP: tl.constexpr, HAS_BONUS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """factor * (softmax(z) - [token = target]) * slope of the soft-cap, in place of the raw products."""
    row, is_row = _rows_of(N, ROWS)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    z, slope = _logits(
        x, x, observed, bonus, x, row, is_row, column, width, first, 0, softcap, HAS_CAP, False, HAS_BONUS, False
    )
    peak = tl.load(peak_of_row + row, mask=is_row, other=0.0)
    total = tl.load(sum_of_row + row, mask=is_row, other=1.0)
    share = tl.load(factor + row, mask=is_row, other=0.0) / total
    e = tl.exp2(z - peak[:, None])
    is_target = column + first == tl.load(target + row, mask=is_row, other=-1)[:, None]
    grad = tl.where(is_target, e - total[:, None], e) * slope * share[:, None]
    is_there = is_row[:, None] & (column < width)
    tl.store(x + row[:, None] * width + column, grad.to(x.dtype.element_ty), mask=is_there)
