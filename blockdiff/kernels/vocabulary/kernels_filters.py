"""The Triton kernel of the filters top_k, top_p and min_p, over raw products as in `kernels.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.vocabulary.kernels import _finite, _logits

BINS, PER_POWER = tl.constexpr(1024), tl.constexpr(64)  # bins of similar logits, and bins per power of two
ROUNDING = tl.constexpr(1e-4)  # bound of the relative rounding error of a row's sums


@triton.jit
def _order(z):
    """Map z to int32 keys in the same order."""
    bits = z.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(z, peak, counts: tl.constexpr):
    """Return 1 per token if `counts`, else 2^(z - peak)."""
    if counts:
        weight = tl.where(z == float("-inf"), 0.0, 1.0)
    else:
        weight = tl.exp2(z - peak[:, None])
    return weight


@triton.jit
def _amount(x, transform, row, width, peak, window, above, least, counts: tl.constexpr, COLUMNS: tl.constexpr):
    """Count a row's tokens (or sum 2^(z - peak)) whose key in `_order` is at least `least`.

    window: the z of the tokens to examine (None: the whole row). above: the count or sum of the tokens that are
    likelier than all of the window.
    """
    amount, least = above, least.to(tl.int32)
    if window is None:
        for start in range(0, width, COLUMNS):
            z, _ = _logits(x, transform, row, row >= 0, start + tl.arange(0, COLUMNS)[None, :], width, 0)
            amount += tl.sum(tl.where(_order(z) >= least[:, None], _weight(z, peak, counts), 0.0), 1)
    else:
        amount += tl.sum(tl.where(_order(window) >= least[:, None], _weight(window, peak, counts), 0.0), 1)
    return amount


@triton.jit
def _last_needed(
    x, transform, row, width, peak, window, above, needed, least, counts: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the largest key, at least `least`, above which a row holds `needed`, key bit by bit from the highest."""
    key = tl.full([1], -(2**31), tl.int64)
    step = tl.full([1], 2**31, tl.int64)
    for _ in range(32):
        higher = key + step
        amount = _amount(x, transform, row, width, peak, window, above, tl.maximum(higher, least), counts, COLUMNS)
        key = tl.where(amount >= needed, higher, key)
        step = step // 2
    if window is not None:  # if rounding leaves no token of the window to be needed, its likeliest is
        key = tl.minimum(key, tl.max(_order(window), 1).to(tl.int64))
    return tl.maximum(key, least)


@triton.jit
def _least_left(
    x, transform, row, width, peak, total, window, counted, summed, top_k, top_p, has_k: tl.constexpr,
    has_p: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the key, in `_order`, of the least likely token of a row that passes top_k and, among those, top_p.

    counted, summed: the number of tokens likelier than the window's, and the sum of their 2^(z - peak).
    """
    least, nothing = tl.full([1], -(2**31), tl.int64), tl.zeros([1], tl.float32)
    if has_k:
        least = _last_needed(x, transform, row, width, peak, window, counted, nothing + top_k, least, True, COLUMNS)
    if has_p:
        if has_k:
            total = _amount(x, transform, row, width, peak, window, summed, least, False, COLUMNS)
        least = _last_needed(x, transform, row, width, peak, window, summed, total * top_p, least, False, COLUMNS)
    return least


@triton.jit
def _bins(z, peak):
    """Return each token's bin: 0 for the likeliest, the last for all at least 2^16 times less likely."""
    below = (peak[:, None] - z) * PER_POWER
    return tl.where(below < BINS - 1, below, BINS - 1).to(tl.int32)


@triton.jit
def _window_bins(count, total, top_k, top_p, has_k: tl.constexpr, has_p: tl.constexpr):
    """Return the first and last bin that can contain the least likely token that passes the filters.

    A bin's sum of 2^(z - peak) is bounded by its count times the values at its two ends.
    """
    each = tl.arange(0, BINS)
    upper_of = tl.exp2(each.to(tl.float32) * (-1.0 / PER_POWER))
    lower_of = tl.where(each == BINS - 1, 0.0, upper_of * tl.exp2(-1.0 / PER_POWER))
    lower, upper = tl.cumsum(count * lower_of, 0), tl.cumsum(count * upper_of, 0)
    least, most, last = total, total, BINS - 1
    if has_k:
        last = tl.minimum(tl.sum((tl.cumsum(count, 0) < top_k).to(tl.int32), 0), BINS - 1)
        least = tl.sum(tl.where(each < last, count * lower_of, 0.0), 0)
        most = tl.sum(tl.where(each == last, upper, 0.0), 0)
    first = last
    if has_p:
        first = tl.minimum(tl.sum((upper < least * top_p * (1 - ROUNDING)).to(tl.int32), 0), last)
        if not has_k:
            last = tl.minimum(tl.sum((lower < most * top_p * (1 + ROUNDING)).to(tl.int32), 0), last)
    return first, last


@triton.jit
def vocabulary_filters(
    x, transform, top_k, top_p, log_min_p, packed, candidates, width, words, has_k: tl.constexpr, has_p: tl.constexpr,
    WINDOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the tokens of a row that pass top_k, then top_p, then min_p as bits of `packed` [N, words].

    A program handles one row and reads it four times: for the peak; to count the tokens in bins of similar logits; to
    copy the tokens of the deciding bins to `candidates` [N, WINDOW], where it searches for the threshold; and to write
    the bits. If these bins hold more than WINDOW tokens (nearly equal logits), it searches the whole row.
    """
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, ROWS)
    peak = tl.full([1], float("-inf"), tl.float32)
    for start in range(0, width, COLUMNS):
        z, _ = _logits(x, transform, row, row >= 0, start + tl.arange(0, COLUMNS)[None, :], width, 0)
        peak = tl.maximum(peak, tl.max(z, 1))
    peak, nothing = _finite(peak), tl.zeros([1], tl.float32)
    least = tl.full([1], -(2**31), tl.int64)
    if has_k or has_p:
        count, total = tl.zeros([BINS], tl.int32), nothing
        for start in range(0, width, COLUMNS):
            z, _ = _logits(x, transform, row, row >= 0, start + tl.arange(0, COLUMNS)[None, :], width, 0)
            bins, is_there = _bins(z, peak), z > float("-inf")
            count += tl.histogram(tl.reshape(bins, [COLUMNS]), BINS, mask=tl.reshape(is_there, [COLUMNS]))
            total += tl.sum(_weight(z, peak, False), 1)
        first, last = _window_bins(count.to(tl.float32), tl.sum(total, 0), top_k, top_p, has_k, has_p)
        bin_index = tl.arange(0, BINS)
        of_window = tl.sum(tl.where((bin_index >= first) & (bin_index <= last), count, 0), 0)
        if of_window <= WINDOW:
            counted, summed, next_candidate = nothing, nothing, tl.sum(row, 0) * WINDOW
            for start in range(0, width, COLUMNS):
                z, _ = _logits(x, transform, row, row >= 0, start + tl.arange(0, COLUMNS)[None, :], width, 0)
                bins, is_there = _bins(z, peak), z > float("-inf")
                counted += tl.sum(tl.where(bins < first, _weight(z, peak, True), 0.0), 1)
                summed += tl.sum(tl.where(bins < first, _weight(z, peak, False), 0.0), 1)
                is_candidate = ((bins >= first) & (bins <= last) & is_there).to(tl.int32)
                tl.store(candidates + next_candidate + tl.cumsum(is_candidate, 1) - 1, z, mask=is_candidate != 0)
                next_candidate += tl.sum(is_candidate)
            tl.debug_barrier()  # threads read values that others wrote
            offset = tl.arange(0, WINDOW)[None, :]
            window = tl.load(candidates + row[:, None] * WINDOW + offset, mask=offset < of_window, other=float("-inf"))
            least = _least_left(
                x, transform, row, width, peak, total, window, counted, summed, top_k, top_p, has_k, has_p, COLUMNS
            )
        else:
            least = _least_left(
                x, transform, row, width, peak, total, None, nothing, nothing, top_k, top_p, has_k, has_p, COLUMNS
            )
    least = least.to(tl.int32)
    for start in range(0, width, COLUMNS):
        z, _ = _logits(x, transform, row, row >= 0, start + tl.arange(0, COLUMNS)[None, :], width, 0)
        is_left = (_order(z) >= least[:, None]) & (z >= peak[:, None] + log_min_p) & (z > float("-inf"))
        bits = tl.reshape(is_left.to(tl.int32), [COLUMNS // 32, 32]) << tl.arange(0, 32)[None, :]
        word = start // 32 + tl.arange(0, COLUMNS // 32)
        tl.store(packed + tl.sum(row, 0) * words + word, tl.sum(bits, 1), mask=word < words)
