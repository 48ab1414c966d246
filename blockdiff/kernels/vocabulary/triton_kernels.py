"""The Triton kernels of the vocabulary ops: what stands between the two matrix products, fp32 inside.

They read and overwrite a chunk x [N, width] of raw products h E^T, tokens first ... first + width - 1, in the table's
dtype. Logits are kept in base 2: z = cap(x) / T * log2(e). One pass leaves, for every tile of TILE tokens, its peak
(largest z), sum (of 2^(z - peak)), moment (of (z - peak) 2^(z - peak)) and best token; merging those is all that rows,
chunks and shards of the table need, and since tiles are the unit, shards that end at tiles give the same bits as one.
"""
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _capped(x, softcap, HAS_CAP: tl.constexpr):
    """`softcap * tanh(x / softcap)` and its slope, from s = (1 - tanh) / 2: the slope 4 s (1 - s) has no 1 - 1."""
    if HAS_CAP:
        s = 1.0 / (1.0 + tl.exp2(x * ((2.0 / softcap) * LOG2E)))
        return softcap * (1.0 - 2.0 * s), 4.0 * s * (1.0 - s)
    else:
        return x, tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def _scale(temperature, row, HAS_TEMPERATURE: tl.constexpr):
    """What turns a logit into the base-2 logit of z / T."""
    if HAS_TEMPERATURE:
        return (1.0 / tl.load(temperature + row)) * LOG2E
    else:
        return LOG2E


@triton.jit
def _logits(
    x, temperature, observed, bonus, allowed, row, column, width, first, words, softcap,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_BONUS: tl.constexpr, HAS_ALLOWED: tl.constexpr,
):  # fmt: skip
    """z of a tile (-inf outside the chunk and where not allowed) and the slope of the soft-cap there."""
    is_there = (column >= 0) & (column < width)
    raw = tl.load(x + row * width + column, mask=is_there, other=0.0).to(tl.float32)
    z, slope = _capped(raw, softcap, HAS_CAP)
    z = z * _scale(temperature, row, HAS_TEMPERATURE)
    if HAS_BONUS:
        z += tl.where(column + first == tl.load(observed + row), tl.load(bonus + row) * LOG2E, 0.0)
    if HAS_ALLOWED:
        token = column + first
        word = tl.load(allowed + row * words + token // 32, mask=is_there, other=0)
        is_there = is_there & (((word >> (token % 32)) & 1) != 0)
    return tl.where(is_there, z, float("-inf")), slope


@triton.jit
def _finite(peak):
    """A peak to subtract: tiles and rows without a token have -inf."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def tiles(
    x, temperature, observed, bonus, allowed, peaks, sums, moments, bests, width, first, words, softcap,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_BONUS: tl.constexpr, HAS_ALLOWED: tl.constexpr,
    WITH_MOMENT: tl.constexpr, WITH_BEST: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Peak, sum, moment and best token of one tile of one row."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    z, _ = _logits(
        x, temperature, observed, bonus, allowed, row, column, width, first, words, softcap,
        HAS_CAP, HAS_TEMPERATURE, HAS_BONUS, HAS_ALLOWED,
    )  # fmt: skip
    peak = tl.max(z, 0)
    below = z - _finite(peak)
    e = tl.exp2(below)
    place = row * tl.num_programs(1) + tile
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(e, 0))
    if WITH_MOMENT:
        tl.store(moments + place, tl.sum(e * tl.where(e == 0.0, 0.0, below), 0))
    if WITH_BEST:
        tl.store(bests + place, tl.min(tl.where(z == peak, column + first, NO_TOKEN), 0))


@triton.jit
def _merged(peaks, sums, row, count, TILES: tl.constexpr):
    """A row's tiles: their peaks and weights 2^(peak - row's), and the row's peak and sum."""
    tile = tl.arange(0, TILES)
    is_there = tile < count
    peak_of = tl.load(peaks + row * count + tile, mask=is_there, other=float("-inf"))
    sum_of = tl.load(sums + row * count + tile, mask=is_there, other=0.0)
    peak = _finite(tl.max(peak_of, 0))
    weight = tl.exp2(peak_of - peak)
    part = sum_of * weight
    return tile, peak_of, weight, part, peak, tl.sum(part, 0)


@triton.jit
def _best(bests, tile, peak_of, row, count, TILES: tl.constexpr):
    """The lowest token among those of the tiles that reach the row's peak; 0 where there is none (NaN)."""
    best_of = tl.load(bests + row * count + tile, mask=tile < count, other=NO_TOKEN)
    best = tl.min(tl.where(peak_of == tl.max(peak_of, 0), best_of, NO_TOKEN), 0)
    return tl.where(best == NO_TOKEN, 0, best).to(tl.int64)


@triton.jit
def rows(
    uniform, peaks, sums, moments, bests, peak_of_row, sum_of_row, entropy, argmax, chosen, rest, count,
    WITH_STATS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A row's peak and sum; with stats its entropy, argmax, the tile its sample lies in and the sum up to it there."""
    row = tl.program_id(0).to(tl.int64)
    tile, peak_of, weight, part, peak, total = _merged(peaks, sums, row, count, TILES)
    tl.store(peak_of_row + row, peak)
    tl.store(sum_of_row + row, total)
    if WITH_STATS:
        moment_of = tl.load(moments + row * count + tile, mask=tile < count, other=0.0)
        shifted = weight * moment_of + part * tl.where(part == 0.0, 0.0, peak_of - peak)
        tl.store(entropy + row, (tl.log2(total) - tl.sum(shifted, 0) / total) * LN2)
        tl.store(argmax + row, _best(bests, tile, peak_of, row, count, TILES))
        cdf = tl.cumsum(part, 0)
        threshold = tl.load(uniform + row) * total
        within = tl.min(tl.where((cdf > threshold) & (part > 0.0), tile, TILES), 0)
        last = tl.max(tl.where(part > 0.0, tile, 0), 0)
        within = tl.where(within == TILES, last, within)
        tl.store(chosen + row, within)
        tl.store(rest + row, threshold - tl.sum(tl.where(tile == within - 1, cdf, 0.0), 0))


@triton.jit
def tokens(
    x, temperature, given, allowed, peak_of_row, sum_of_row, chosen, rest, sample, log_probability,
    width, first, words, softcap,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_GIVEN: tl.constexpr, HAS_ALLOWED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The sample within the chosen tile, and the log-probability of the given token or else of the sample.

    What lies in another shard of the table is left for that shard to write.
    """
    row = tl.program_id(0).to(tl.int64)
    peak, total = tl.load(peak_of_row + row), tl.load(sum_of_row + row)
    start = tl.load(chosen + row) * TILE - first
    if (start >= 0) & (start < width):
        column = start + tl.arange(0, TILE)
        z, _ = _logits(
            x, temperature, x, x, allowed, row, column, width, first, words, softcap,
            HAS_CAP, HAS_TEMPERATURE, False, HAS_ALLOWED,
        )  # fmt: skip
        e = tl.exp2(z - peak)
        is_beyond = (tl.cumsum(e, 0) > tl.load(rest + row)) & (e > 0.0)
        token = tl.min(tl.where(is_beyond, column, NO_TOKEN), 0)
        last = tl.max(tl.where(e > 0.0, column, start), 0)
        token = tl.where(token == NO_TOKEN, last, token)
        tl.store(sample + row, (token + first).to(tl.int64))
        if not HAS_GIVEN:
            its = tl.max(tl.where(column == token, z, float("-inf")), 0)
            tl.store(log_probability + row, (its - peak - tl.log2(total)) * LN2)
    if HAS_GIVEN:
        wanted = tl.load(given + row) - first
        if (wanted >= 0) & (wanted < width):
            its, _ = _logits(
                x, temperature, x, x, allowed, row, wanted + tl.arange(0, 1), width, first, words, softcap,
                HAS_CAP, HAS_TEMPERATURE, False, HAS_ALLOWED,
            )  # fmt: skip
            tl.store(log_probability + row, (tl.max(its, 0) - peak - tl.log2(total)) * LN2)


@triton.jit
def losses(
    x, target, observed, bonus, is_ignored, peaks, sums, bests, peak_of_row, sum_of_row, loss, argmax,
    width, count, softcap,
    HAS_CAP: tl.constexpr, HAS_BONUS: tl.constexpr, HAS_IGNORED: tl.constexpr, WITH_BEST: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """A row's peak, sum and cross-entropy (0 where ignored, NaN for a target that is no token), and its argmax."""
    row = tl.program_id(0).to(tl.int64)
    tile, peak_of, _, _, peak, total = _merged(peaks, sums, row, count, TILES)
    token = tl.load(target + row)
    z, _ = _logits(
        x, x, observed, bonus, x, row, token + tl.arange(0, 1), width, 0, 0, softcap,
        HAS_CAP, False, HAS_BONUS, False,
    )  # fmt: skip
    value = (tl.log2(total) + (peak - tl.max(z, 0))) * LN2
    value = tl.where((token >= 0) & (token < width), value, float("nan"))
    if HAS_IGNORED:
        value = tl.where(tl.load(is_ignored + row) != 0, 0.0, value)
    tl.store(peak_of_row + row, peak)
    tl.store(sum_of_row + row, total)
    tl.store(loss + row, value)
    if WITH_BEST:
        tl.store(argmax + row, _best(bests, tile, peak_of, row, count, TILES))


@triton.jit
def probabilities(
    x, temperature, allowed, peak_of_row, sum_of_row, width, first, words, softcap,
    HAS_CAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr, HAS_ALLOWED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """softmax(z), in place of the raw products."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    z, _ = _logits(
        x, temperature, x, x, allowed, row, column, width, first, words, softcap,
        HAS_CAP, HAS_TEMPERATURE, False, HAS_ALLOWED,
    )  # fmt: skip
    p = tl.exp2(z - tl.load(peak_of_row + row)) / tl.load(sum_of_row + row)
    tl.store(x + row * width + column, p.to(x.dtype.element_ty), mask=column < width)


@triton.jit
def gradients(
    x, target, observed, bonus, factor, peak_of_row, sum_of_row, width, first, softcap,
    HAS_CAP: tl.constexpr, HAS_BONUS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """factor * (softmax(z) - [token = target]) * slope of the soft-cap, in place of the raw products."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    z, slope = _logits(
        x, x, observed, bonus, x, row, column, width, first, 0, softcap, HAS_CAP, False, HAS_BONUS, False
    )  # fmt: skip
    total = tl.load(sum_of_row + row)
    e = tl.exp2(z - tl.load(peak_of_row + row))
    e = tl.where(column + first == tl.load(target + row), e - total, e)
    grad = e * slope * (tl.load(factor + row) / total)
    tl.store(x + row * width + column, grad.to(x.dtype.element_ty), mask=column < width)
