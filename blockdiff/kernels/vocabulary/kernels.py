"""The Triton kernels of the vocabulary ops, which run between the two matrix products of an op; fp32 inside.

They read and overwrite a chunk x [N, width] of raw products h E^T for the tokens first ... first + width - 1, in the
table's dtype. `transform` (`triton_launch.LogitTransform`) has the softcap, temperature, observed token, bonus and
allowed tokens that turn them into logits; any may be None. Logits are in base 2:
z = (cap(x) / temperature + bonus) * log2(e).

For every tile of COLUMNS tokens a pass writes the peak (largest z), the sum of 2^(z - peak), the moment, which is the
sum of (z - peak) 2^(z - peak), the best token, the sum at temperature 1, of 2^((z - peak) temperature), and the
target's z. Statistics of rows, chunks and shards of the table are merged from those of tiles, so shards that end at
tile boundaries give the same bits as one table. A program handles ROWS rows of one tile or of all tiles. Statistics
that are not needed are None.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def _rows(N, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row, row < N


@triton.jit
def _columns(COLUMNS: tl.constexpr):
    return tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _capped(x, softcap):
    """Return `softcap * tanh(x / softcap)` and its derivative 4 s (1 - s), s = (1 - tanh) / 2, without cancellation."""
    if softcap is None:
        return x, tl.full(x.shape, 1.0, tl.float32)
    else:
        s = 1.0 / (1.0 + tl.exp2(x * ((2.0 / softcap) * LOG2E)))
        return softcap * (1.0 - 2.0 * s), 4.0 * s * (1.0 - s)


@triton.jit
def _logits(x, transform, row, is_row, column, width, first):
    """Return z at the columns [ROWS, tokens], -inf outside the chunk and for forbidden tokens, and the cap's slope."""
    is_there = is_row[:, None] & (column >= 0) & (column < width)
    raw = tl.load(x + row[:, None] * width + column, mask=is_there, other=0.0).to(tl.float32)
    z, slope = _capped(raw, transform.softcap)
    if transform.temperature is None:
        z = z * LOG2E
    else:
        z = z * ((1.0 / tl.load(transform.temperature + row, mask=is_row, other=1.0)) * LOG2E)[:, None]
    token = column + first
    if transform.bonus is not None:
        favoured = tl.load(transform.observed + row, mask=is_row, other=-1)
        more = tl.load(transform.bonus + row, mask=is_row, other=0.0) * LOG2E
        z += tl.where(token == favoured[:, None], more[:, None], 0.0)
    if transform.allowed is not None:
        word = tl.load(transform.allowed + row[:, None] * transform.words + token // 32, mask=is_there, other=0)
        is_there = is_there & (((word >> (token % 32)) & 1) != 0)
    return tl.where(is_there, z, float("-inf")), slope


@triton.jit
def _finite(peak):
    """Replace a peak of -inf, of tiles and rows without any token, by 0, so that it can be subtracted."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit(do_not_specialize=["N", "first", "first_tile", "count"])
def vocabulary_tiles(
    x, transform, target, tiles, N, width, first, first_tile, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Write the statistics of each tile of a chunk to `tiles` [N, count], from column `first_tile` on.

    The tile that contains a row's target also writes the target's z.
    """
    row, is_row = _rows(N, ROWS)
    column = _columns(COLUMNS)
    z, _ = _logits(x, transform, row, is_row, column, width, first)
    peak = tl.max(z, 1)
    below = z - _finite(peak)[:, None]
    e = tl.exp2(below)
    offset = row * count + first_tile + tl.program_id(1)
    tl.store(tiles.peaks + offset, peak, mask=is_row)
    tl.store(tiles.sums + offset, tl.sum(e, 1), mask=is_row)
    if tiles.moments is not None:
        tl.store(tiles.moments + offset, tl.sum(e * tl.where(e == 0.0, 0.0, below), 1), mask=is_row)
    if tiles.untempered_sums is not None:
        temperature = tl.load(transform.temperature + row, mask=is_row, other=1.0)
        tl.store(tiles.untempered_sums + offset, tl.sum(tl.exp2(below * temperature[:, None]), 1), mask=is_row)
    if tiles.bests is not None:
        best = tl.min(tl.where(z == peak[:, None], column + first, NO_TOKEN), 1)
        tl.store(tiles.bests + offset, best, mask=is_row)
    if tiles.target_z is not None:
        is_target = (column + first == tl.load(target + row, mask=is_row, other=-1)[:, None]) & (column < width)
        is_ours = tl.sum(is_target.to(tl.int32), 1) > 0
        tl.store(tiles.target_z + row, tl.sum(tl.where(is_target, z, 0.0), 1), mask=is_row & is_ours)


@triton.jit(do_not_specialize=["N", "count"])
def vocabulary_rows(tiles, uniform, temperature, out, N, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Merge the tiles of every row into `out`: peak, sum, argmax and its log-probability, cross-entropy, entropy.

    To draw a sample it writes the tile in which the sample lies (`chosen`) and how much of that tile's sum comes before
    the sample (`rest`); `vocabulary_tokens` then finds the token.
    """
    row, is_row = _rows(N, ROWS)
    tile = tl.arange(0, COLUMNS)[None, :]
    offset = row[:, None] * count + tile
    is_there = is_row[:, None] & (tile < count)
    peak_of = tl.load(tiles.peaks + offset, mask=is_there, other=float("-inf"))
    peak = _finite(tl.max(peak_of, 1))
    weight = tl.exp2(peak_of - peak[:, None])
    part = tl.load(tiles.sums + offset, mask=is_there, other=0.0) * weight
    total = tl.where(is_row, tl.sum(part, 1), 1.0)
    tl.store(out.peak + row, peak, mask=is_row)
    tl.store(out.total + row, total, mask=is_row)
    if tiles.bests is not None:  # the lowest of the tokens at the row's peak; 0 if there is none (NaN)
        best_of = tl.load(tiles.bests + offset, mask=is_there, other=NO_TOKEN)
        best = tl.min(tl.where(peak_of == tl.max(peak_of, 1)[:, None], best_of, NO_TOKEN), 1)
        tl.store(out.argmax + row, tl.where(best == NO_TOKEN, 0, best).to(tl.int64), mask=is_row)
    if tiles.untempered_sums is not None:
        untempered = tl.load(tiles.untempered_sums + offset, mask=is_there, other=0.0)
        below = (peak_of - peak[:, None]) * tl.load(temperature + row, mask=is_row, other=1.0)[:, None]
        untempered_total = tl.where(is_row, tl.sum(untempered * tl.exp2(below), 1), 1.0)
        tl.store(out.best_log_probability + row, -tl.log2(untempered_total) * LN2, mask=is_row)
    if tiles.target_z is not None:
        loss = (tl.log2(total) + (peak - tl.load(tiles.target_z + row, mask=is_row, other=0.0))) * LN2
        tl.store(out.loss + row, loss, mask=is_row)
    if uniform is not None:
        moment_of = tl.load(tiles.moments + offset, mask=is_there, other=0.0)
        moment = weight * moment_of + part * tl.where(part == 0.0, 0.0, peak_of - peak[:, None])
        tl.store(out.entropy + row, (tl.log2(total) - tl.sum(moment, 1) / total) * LN2, mask=is_row)
        cdf = tl.cumsum(part, 1)
        threshold = tl.load(uniform + row, mask=is_row, other=0.0) * total
        within = tl.min(tl.where((cdf > threshold[:, None]) & (part > 0.0), tile, COLUMNS), 1)
        within = tl.where(within == COLUMNS, tl.max(tl.where(part > 0.0, tile, 0), 1), within)
        before = tl.sum(tl.where(tile == within[:, None] - 1, cdf, 0.0), 1)
        tl.store(out.chosen + row, within.to(tl.int64), mask=is_row)
        tl.store(out.rest + row, threshold - before, mask=is_row)


@triton.jit(do_not_specialize=["N"])
def vocabulary_tokens(
    x, transform, merged, sample, log_probability, N, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Draw the sample from the tile that `vocabulary_rows` chose; write it and its log-probability."""
    row, is_row = _rows(N, ROWS)
    peak = tl.load(merged.peak + row, mask=is_row, other=0.0)
    total = tl.load(merged.total + row, mask=is_row, other=1.0)
    start = tl.load(merged.chosen + row, mask=is_row, other=0) * COLUMNS
    column = start[:, None] + tl.arange(0, COLUMNS)[None, :]
    z, _ = _logits(x, transform, row, is_row, column, width, 0)
    e = tl.exp2(z - peak[:, None])
    beyond = tl.load(merged.rest + row, mask=is_row, other=0.0)
    is_beyond = (tl.cumsum(e, 1) > beyond[:, None]) & (e > 0.0)
    token = tl.min(tl.where(is_beyond, column, NO_TOKEN), 1)
    # If rounding leaves no token beyond the threshold, take the tile's last token of nonzero probability.
    token = tl.where(token == NO_TOKEN, tl.max(tl.where(e > 0.0, column, start[:, None]), 1), token)
    tl.store(sample + row, token, mask=is_row)
    drawn_z, _ = _logits(x, transform, row, is_row, token[:, None], width, 0)
    tl.store(log_probability + row, (tl.max(drawn_z, 1) - peak - tl.log2(total)) * LN2, mask=is_row)


@triton.jit
def _penalised(x, transform, penalty, row, is_row, column, width):
    """Return z at the columns [ROWS, tokens] after the repetition penalty (None: without); column -1 is none."""
    z, _ = _logits(x, transform, row, is_row, column, width, 0)
    if penalty is not None:
        of_row = tl.load(penalty.row + row, mask=is_row, other=0)
        factor = tl.load(penalty.factor + of_row, mask=is_row, other=1.0)[:, None]
        pointers = penalty.seen + of_row[:, None] * width + column
        is_seen = tl.load(pointers, mask=is_row[:, None] & (column >= 0), other=0) != 0
        z = tl.where(is_seen, tl.where(z < 0, z * factor, z / factor), z)
    return z


@triton.jit(do_not_specialize=["N", "classes"])
def vocabulary_classes(
    x, transform, penalty, token, end, uniform, out, N, width, classes, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute the columns of `ClassStats` for one class of tokens, those of `token` up to the class's `end`.

    Three passes over its tokens: peak and best token; sum and moment; the sample. Sums of tiles are added in fp64.
    """
    row, is_row = _rows(N, ROWS)
    of_class = tl.program_id(1)
    start = tl.load(end + of_class - 1, mask=of_class > 0, other=0)
    stop = tl.load(end + of_class)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    best = tl.zeros([ROWS], tl.int64) + start
    for lo in range(start, stop, COLUMNS):
        index = lo + tl.arange(0, COLUMNS)[None, :]
        z = _penalised(x, transform, penalty, row, is_row, tl.load(token + index, mask=index < stop, other=-1), width)
        top = tl.max(z, 1)
        first = tl.min(tl.where(z == top[:, None], index, stop), 1)
        best = tl.where(top > peak, first, best)
        peak = tl.maximum(peak, top)
    total = tl.zeros([ROWS], tl.float64)
    moment = tl.zeros([ROWS], tl.float64)
    for lo in range(start, stop, COLUMNS):
        index = lo + tl.arange(0, COLUMNS)[None, :]
        z = _penalised(x, transform, penalty, row, is_row, tl.load(token + index, mask=index < stop, other=-1), width)
        below = z - _finite(peak)[:, None]
        e = tl.exp2(below)
        total += tl.sum(e, 1).to(tl.float64)
        moment += tl.sum(e * tl.where(e == 0.0, 0.0, below), 1).to(tl.float64)
    threshold = tl.load(uniform + row, mask=is_row, other=0.0).to(tl.float64) * total
    passed = tl.zeros([ROWS], tl.float64)
    chosen = tl.zeros([ROWS], tl.int64) + stop
    last = tl.zeros([ROWS], tl.int64) + start  # last token of nonzero probability: drawn if rounding leaves none beyond
    for lo in range(start, stop, COLUMNS):
        index = lo + tl.arange(0, COLUMNS)[None, :]
        z = _penalised(x, transform, penalty, row, is_row, tl.load(token + index, mask=index < stop, other=-1), width)
        e = tl.exp2(z - _finite(peak)[:, None])
        is_beyond = (tl.cumsum(e, 1) > (threshold - passed).to(tl.float32)[:, None]) & (e > 0.0)
        chosen = tl.minimum(chosen, tl.min(tl.where(is_beyond, index, stop), 1))
        last = tl.maximum(last, tl.max(tl.where(e > 0.0, index, start), 1))
        passed += tl.sum(e, 1).to(tl.float64)
    chosen = tl.where(chosen == stop, last, chosen)
    drawn = tl.load(token + chosen)
    drawn_z = _penalised(x, transform, penalty, row, is_row, drawn[:, None], width)
    total = tl.where(total == 0.0, 1.0, total)  # no token is allowed: the peak of -inf decides
    log_total = tl.log2(total.to(tl.float32))
    offset = row * classes + of_class
    tl.store(out.log_sum + offset, ((log_total + peak) * LN2).to(tl.float64), mask=is_row)
    tl.store(out.maximum + offset, (peak * LN2).to(tl.float64), mask=is_row)
    tl.store(out.argmax + offset, tl.load(token + best), mask=is_row)
    tl.store(out.sample + offset, drawn, mask=is_row)
    entropy = tl.maximum((log_total - (moment / total).to(tl.float32)) * LN2, 0.0)
    tl.store(out.entropy + offset, entropy.to(tl.float64), mask=is_row)
    log_probability = (tl.max(drawn_z, 1) - _finite(peak) - log_total) * LN2
    tl.store(out.log_probability + offset, log_probability.to(tl.float64), mask=is_row)


@triton.jit(do_not_specialize=["N", "first"])
def vocabulary_probabilities(x, transform, merged, N, width, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Overwrite the raw products by softmax(z)."""
    row, is_row = _rows(N, ROWS)
    column = _columns(COLUMNS)
    z, _ = _logits(x, transform, row, is_row, column, width, first)
    peak = tl.load(merged.peak + row, mask=is_row, other=0.0)
    share = 1.0 / tl.load(merged.total + row, mask=is_row, other=1.0)
    p = tl.exp2(z - peak[:, None]) * share[:, None]
    tl.store(x + row[:, None] * width + column, p.to(x.dtype.element_ty), mask=is_row[:, None] & (column < width))


@triton.jit(do_not_specialize=["N", "first"])
def vocabulary_gradients(
    x, transform, target, factor, merged, N, width, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Overwrite the raw products by factor * (softmax(z) - [token = target]) * slope of the soft-cap."""
    row, is_row = _rows(N, ROWS)
    column = _columns(COLUMNS)
    z, slope = _logits(x, transform, row, is_row, column, width, first)
    peak = tl.load(merged.peak + row, mask=is_row, other=0.0)
    total = tl.load(merged.total + row, mask=is_row, other=1.0)
    share = tl.load(factor + row, mask=is_row, other=0.0) / total
    e = tl.exp2(z - peak[:, None])
    is_target = column + first == tl.load(target + row, mask=is_row, other=-1)[:, None]
    grad = tl.where(is_target, e - total[:, None], e) * slope * share[:, None]
    tl.store(x + row[:, None] * width + column, grad.to(x.dtype.element_ty), mask=is_row[:, None] & (column < width))
