"""The Triton kernels of the vocabulary ops: what stands between the two matrix products, fp32 inside.

They read and overwrite a chunk x [N, width] of raw products h E^T, tokens first ... first + width - 1, in the table's
dtype; `how` says what makes logits of them: softcap, temperature, observed token and bonus, allowed tokens (any may be
None). Logits are kept in base 2: z = (cap(x) / temperature + bonus) * log2(e).

One pass leaves, for every tile of COLUMNS tokens, its peak (largest z), sum (of 2^(z - peak)), moment (of
(z - peak) 2^(z - peak)), best token and sum at temperature 1 (of 2^((z - peak) temperature)), and the target's z.
Merging those is all that rows, chunks and shards of the table need, and since tiles are the unit, shards that end at
tiles give the same bits as one. A program takes ROWS rows, of one tile or of all tiles. What is not wanted is None.
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
    """`softcap * tanh(x / softcap)` and its slope, from s = (1 - tanh) / 2: the slope 4 s (1 - s) has no 1 - 1."""
    if softcap is None:
        return x, tl.full(x.shape, 1.0, tl.float32)
    else:
        s = 1.0 / (1.0 + tl.exp2(x * ((2.0 / softcap) * LOG2E)))
        return softcap * (1.0 - 2.0 * s), 4.0 * s * (1.0 - s)


@triton.jit
def _logits(x, how, row, is_row, column, width, first):
    """z at the columns [ROWS, tokens] (-inf outside the chunk and where not allowed), and the slope of the soft-cap."""
    is_there = is_row[:, None] & (column >= 0) & (column < width)
    raw = tl.load(x + row[:, None] * width + column, mask=is_there, other=0.0).to(tl.float32)
    z, slope = _capped(raw, how.softcap)
    if how.temperature is None:
        z = z * LOG2E
    else:
        z = z * ((1.0 / tl.load(how.temperature + row, mask=is_row, other=1.0)) * LOG2E)[:, None]
    token = column + first
    if how.bonus is not None:
        favoured = tl.load(how.observed + row, mask=is_row, other=-1)
        more = tl.load(how.bonus + row, mask=is_row, other=0.0) * LOG2E
        z += tl.where(token == favoured[:, None], more[:, None], 0.0)
    if how.allowed is not None:
        word = tl.load(how.allowed + row[:, None] * how.words + token // 32, mask=is_there, other=0)
        is_there = is_there & (((word >> (token % 32)) & 1) != 0)
    return tl.where(is_there, z, float("-inf")), slope


@triton.jit
def _finite(peak):
    """A peak to subtract: tiles and rows without a token have -inf."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit(do_not_specialize=["N", "first", "place", "count"])
def vocabulary_tiles(x, how, target, tiles, N, width, first, place, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write what each tile of some rows leaves in `tiles` [N, count], from `place` on; the tile that holds the target
    writes its z."""
    row, is_row = _rows(N, ROWS)
    column = _columns(COLUMNS)
    z, _ = _logits(x, how, row, is_row, column, width, first)
    peak = tl.max(z, 1)
    below = z - _finite(peak)[:, None]
    e = tl.exp2(below)
    at = row * count + place + tl.program_id(1)
    tl.store(tiles.peaks + at, peak, mask=is_row)
    tl.store(tiles.sums + at, tl.sum(e, 1), mask=is_row)
    if tiles.moments is not None:
        tl.store(tiles.moments + at, tl.sum(e * tl.where(e == 0.0, 0.0, below), 1), mask=is_row)
    if tiles.own_sums is not None:
        temperature = tl.load(how.temperature + row, mask=is_row, other=1.0)
        tl.store(tiles.own_sums + at, tl.sum(tl.exp2(below * temperature[:, None]), 1), mask=is_row)
    if tiles.bests is not None:
        best = tl.min(tl.where(z == peak[:, None], column + first, NO_TOKEN), 1)
        tl.store(tiles.bests + at, best, mask=is_row)
    if tiles.of_target is not None:
        is_target = (column + first == tl.load(target + row, mask=is_row, other=-1)[:, None]) & (column < width)
        is_ours = tl.sum(is_target.to(tl.int32), 1) > 0
        tl.store(tiles.of_target + row, tl.sum(tl.where(is_target, z, 0.0), 1), mask=is_row & is_ours)


@triton.jit(do_not_specialize=["N", "count"])
def vocabulary_rows(tiles, uniform, temperature, out, N, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Merge the tiles of every row: into `out` go peak and sum, argmax and its own log-probability, cross-entropy,
    entropy, and the tile that the sample lies in with the part of the sum up to the sample there."""
    row, is_row = _rows(N, ROWS)
    tile = tl.arange(0, COLUMNS)[None, :]
    place = row[:, None] * count + tile
    is_there = is_row[:, None] & (tile < count)
    peak_of = tl.load(tiles.peaks + place, mask=is_there, other=float("-inf"))
    peak = _finite(tl.max(peak_of, 1))
    weight = tl.exp2(peak_of - peak[:, None])
    part = tl.load(tiles.sums + place, mask=is_there, other=0.0) * weight
    total = tl.where(is_row, tl.sum(part, 1), 1.0)
    tl.store(out.peak + row, peak, mask=is_row)
    tl.store(out.total + row, total, mask=is_row)
    if tiles.bests is not None:  # the lowest token among those that reach the row's peak; 0 where there is none (NaN)
        best_of = tl.load(tiles.bests + place, mask=is_there, other=NO_TOKEN)
        best = tl.min(tl.where(peak_of == tl.max(peak_of, 1)[:, None], best_of, NO_TOKEN), 1)
        tl.store(out.argmax + row, tl.where(best == NO_TOKEN, 0, best).to(tl.int64), mask=is_row)
    if tiles.own_sums is not None:
        own = tl.load(tiles.own_sums + place, mask=is_there, other=0.0)
        below = (peak_of - peak[:, None]) * tl.load(temperature + row, mask=is_row, other=1.0)[:, None]
        own_total = tl.where(is_row, tl.sum(own * tl.exp2(below), 1), 1.0)
        tl.store(out.best_log_probability + row, -tl.log2(own_total) * LN2, mask=is_row)
    if tiles.of_target is not None:
        loss = (tl.log2(total) + (peak - tl.load(tiles.of_target + row, mask=is_row, other=0.0))) * LN2
        tl.store(out.loss + row, loss, mask=is_row)
    if uniform is not None:
        moment_of = tl.load(tiles.moments + place, mask=is_there, other=0.0)
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
def vocabulary_tokens(x, how, merged, sample, log_probability, N, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sample within the chosen tile, and its log-probability."""
    row, is_row = _rows(N, ROWS)
    peak = tl.load(merged.peak + row, mask=is_row, other=0.0)
    total = tl.load(merged.total + row, mask=is_row, other=1.0)
    start = tl.load(merged.chosen + row, mask=is_row, other=0) * COLUMNS
    column = start[:, None] + tl.arange(0, COLUMNS)[None, :]
    z, _ = _logits(x, how, row, is_row, column, width, 0)
    e = tl.exp2(z - peak[:, None])
    beyond = tl.load(merged.rest + row, mask=is_row, other=0.0)
    is_beyond = (tl.cumsum(e, 1) > beyond[:, None]) & (e > 0.0)
    token = tl.min(tl.where(is_beyond, column, NO_TOKEN), 1)
    # rounding may leave nothing beyond: then it is the tile's last token with a probability
    token = tl.where(token == NO_TOKEN, tl.max(tl.where(e > 0.0, column, start[:, None]), 1), token)
    tl.store(sample + row, token, mask=is_row)
    its, _ = _logits(x, how, row, is_row, token[:, None], width, 0)
    tl.store(log_probability + row, (tl.max(its, 1) - peak - tl.log2(total)) * LN2, mask=is_row)


@triton.jit
def _penalised(x, how, penalty, row, is_row, column, width):
    """z at the columns [ROWS, tokens], less likely where they were seen; -1 is no column."""
    z, _ = _logits(x, how, row, is_row, column, width, 0)
    if penalty is not None:
        of_row = tl.load(penalty.row + row, mask=is_row, other=0)
        factor = tl.load(penalty.factor + of_row, mask=is_row, other=1.0)[:, None]
        at = penalty.seen + of_row[:, None] * width + column
        is_seen = tl.load(at, mask=is_row[:, None] & (column >= 0), other=0) != 0
        z = tl.where(is_seen, tl.where(z < 0, z * factor, z / factor), z)
    return z


@triton.jit(do_not_specialize=["N", "classes"])
def vocabulary_classes(
    x, how, penalty, token, end, uniform, out, N, width, classes, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The columns of `ClassStats` of one class of tokens, at the places before `end` of `token`, for some rows.

    Three walks over its tokens: peak and best token; sum and moment; the sample. Sums of tiles are added in fp64.
    """
    row, is_row = _rows(N, ROWS)
    of_class = tl.program_id(1)
    start = tl.load(end + of_class - 1, mask=of_class > 0, other=0)
    stop = tl.load(end + of_class)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    best = tl.zeros([ROWS], tl.int64) + start
    for lo in range(start, stop, COLUMNS):
        place = lo + tl.arange(0, COLUMNS)[None, :]
        z = _penalised(x, how, penalty, row, is_row, tl.load(token + place, mask=place < stop, other=-1), width)
        top = tl.max(z, 1)
        first = tl.min(tl.where(z == top[:, None], place, stop), 1)
        best = tl.where(top > peak, first, best)
        peak = tl.maximum(peak, top)
    total = tl.zeros([ROWS], tl.float64)
    moment = tl.zeros([ROWS], tl.float64)
    for lo in range(start, stop, COLUMNS):
        place = lo + tl.arange(0, COLUMNS)[None, :]
        z = _penalised(x, how, penalty, row, is_row, tl.load(token + place, mask=place < stop, other=-1), width)
        below = z - _finite(peak)[:, None]
        e = tl.exp2(below)
        total += tl.sum(e, 1).to(tl.float64)
        moment += tl.sum(e * tl.where(e == 0.0, 0.0, below), 1).to(tl.float64)
    threshold = tl.load(uniform + row, mask=is_row, other=0.0).to(tl.float64) * total
    passed = tl.zeros([ROWS], tl.float64)
    chosen = tl.zeros([ROWS], tl.int64) + stop
    last = tl.zeros([ROWS], tl.int64) + start  # the last token with a probability, should rounding leave none beyond
    for lo in range(start, stop, COLUMNS):
        place = lo + tl.arange(0, COLUMNS)[None, :]
        z = _penalised(x, how, penalty, row, is_row, tl.load(token + place, mask=place < stop, other=-1), width)
        e = tl.exp2(z - _finite(peak)[:, None])
        is_beyond = (tl.cumsum(e, 1) > (threshold - passed).to(tl.float32)[:, None]) & (e > 0.0)
        chosen = tl.minimum(chosen, tl.min(tl.where(is_beyond, place, stop), 1))
        last = tl.maximum(last, tl.max(tl.where(e > 0.0, place, start), 1))
        passed += tl.sum(e, 1).to(tl.float64)
    chosen = tl.where(chosen == stop, last, chosen)
    drawn = tl.load(token + chosen)
    its = _penalised(x, how, penalty, row, is_row, drawn[:, None], width)
    total = tl.where(total == 0.0, 1.0, total)  # where every token is impossible the peak says so
    log_total = tl.log2(total.to(tl.float32))
    at = row * classes + of_class
    tl.store(out.log_sum + at, ((log_total + peak) * LN2).to(tl.float64), mask=is_row)
    tl.store(out.maximum + at, (peak * LN2).to(tl.float64), mask=is_row)
    tl.store(out.argmax + at, tl.load(token + best), mask=is_row)
    tl.store(out.sample + at, drawn, mask=is_row)
    entropy = tl.maximum((log_total - (moment / total).to(tl.float32)) * LN2, 0.0)
    tl.store(out.entropy + at, entropy.to(tl.float64), mask=is_row)
    log_probability = (tl.max(its, 1) - _finite(peak) - log_total) * LN2
    tl.store(out.log_probability + at, log_probability.to(tl.float64), mask=is_row)


@triton.jit(do_not_specialize=["N", "first"])
def vocabulary_probabilities(x, how, merged, N, width, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """softmax(z), in place of the raw products."""
    row, is_row = _rows(N, ROWS)
    column = _columns(COLUMNS)
    z, _ = _logits(x, how, row, is_row, column, width, first)
    peak = tl.load(merged.peak + row, mask=is_row, other=0.0)
    share = 1.0 / tl.load(merged.total + row, mask=is_row, other=1.0)
    p = tl.exp2(z - peak[:, None]) * share[:, None]
    tl.store(x + row[:, None] * width + column, p.to(x.dtype.element_ty), mask=is_row[:, None] & (column < width))


@triton.jit(do_not_specialize=["N", "first"])
def vocabulary_gradients(x, how, target, factor, merged, N, width, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """factor * (softmax(z) - [token = target]) * slope of the soft-cap, in place of the raw products."""
    row, is_row = _rows(N, ROWS)
    column = _columns(COLUMNS)
    z, slope = _logits(x, how, row, is_row, column, width, first)
    peak = tl.load(merged.peak + row, mask=is_row, other=0.0)
    total = tl.load(merged.total + row, mask=is_row, other=1.0)
    share = tl.load(factor + row, mask=is_row, other=0.0) / total
    e = tl.exp2(z - peak[:, None])
    is_target = column + first == tl.load(target + row, mask=is_row, other=-1)[:, None]
    grad = tl.where(is_target, e - total[:, None], e) * slope * share[:, None]
    tl.store(x + row[:, None] * width + column, grad.to(x.dtype.element_ty), mask=is_row[:, None] & (column < width))
