"""The Triton kernels of span_attention: the forward, and the combination of its splits.

Rows: the G query heads that share a key head are interleaved; row r of (batch, key head) is query r // G of head r % G.
One key tile serves the whole group, and the M = ROWS rows of a tile cover only M / G queries, so their hull is tight:
the hull of a row tile is the range of keys, of the prefix and of the call's own, that any of its rows sees.

A program walks over the tiles of N = COLUMNS keys of its hull, first the prefix's, then its own, in one loop. Keys
outside the hull are never loaded. Scores are in units of log2. Tensors with heads are passed with their strides over
batch, tokens and heads; heads are contiguous. The gradient's kernels are in `kernels_backward.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))


@triton.jit
def _head(pointer, strides, b, head):
    """Return the pointer to a head in a [B, tokens, heads, D] tensor."""
    return pointer + b * strides[0] + head * strides[2]


@triton.jit
def _rows(tile, T, G: tl.constexpr, ROWS: tl.constexpr):
    """Return the query, the head within the group, and whether it exists, for every row of a tile."""
    row = tile * ROWS + tl.arange(0, ROWS)
    return row // G, row % G, row < T * G


@triton.jit
def _load_rows(pointer, tile, T, stride_t, stride_h, G: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Load a tile [M, D] of rows of a [T, h, D] tensor; pointer: to the group's first head."""
    first = tile * ROWS // G  # 64 bits only where needed, to save registers
    t, g, is_row = _rows(tile, T, G, ROWS)
    offset = (t - first)[:, None] * stride_t + g[:, None] * stride_h + tl.arange(0, D)[None, :]
    return tl.load(pointer + tl.cast(first, tl.int64) * stride_t + offset, mask=is_row[:, None], other=0.0)


@triton.jit
def _load_keys(pointer, start, stride, is_near, COLUMNS: tl.constexpr, D: tl.constexpr):
    """Load a tile [N, D] of the keys (or values) of one head, from key `start` on."""
    offset = (
        tl.arange(0, COLUMNS)[:, None] * stride + tl.arange(0, D)[None, :]
    )  # 64 bits only where needed, to save registers
    return tl.load(pointer + start.to(tl.int64) * stride + offset, mask=is_near[:, None], other=0.0)


# -- the walk over the hull --------------------------------------------------------------------------------------


@triton.jit
def _bounds(bounds, t, is_row, keys):
    """Load the span [lo, hi) of keys that each row sees in one source (the prefix or the own keys).

    Spans are cut to the source's `keys` keys. bounds: pointer to the spans of that source.
    """
    pointers = bounds + t.to(tl.int64) * 4
    lo = tl.maximum(tl.load(pointers, mask=is_row, other=0), 0)
    return lo, tl.minimum(tl.load(pointers + 1, mask=is_row, other=0), keys)


@triton.jit
def _span(bounds, t, is_row, keys, COLUMNS: tl.constexpr):
    """Return begin, end, tiles, full_begin, full_end of one source (the prefix or the own keys) for a row tile.

    Some row sees a key of the hull [begin, end), which touches `tiles` tiles; every row sees the keys [full_begin,
    full_end). Rows past the end see nothing.
    """
    lo, hi = _bounds(bounds, t, is_row, keys)
    sees = hi > lo
    begin = tl.min(tl.where(sees, lo, keys), 0)
    end = tl.max(tl.where(sees, hi, 0), 0)
    tiles = tl.maximum(tl.cdiv(end, COLUMNS) - begin // COLUMNS, 0)
    full_begin = tl.max(tl.where(is_row, lo, 0), 0)
    full_end = tl.min(tl.where(is_row, hi, keys), 0)
    return begin, end, tiles, full_begin, full_end


@triton.jit
def _spans(bounds, t, is_row, keys, COLUMNS: tl.constexpr):
    """Return what `_span` gives for the prefix and for the own keys of a row tile, and their key tiles in all."""
    prefix = _span(bounds, t, is_row, keys[0], COLUMNS)
    own_span = _span(bounds + 2, t, is_row, keys[1], COLUMNS)
    return prefix, own_span, prefix[2] + own_span[2]


@triton.jit
def _step(i, prefix, own_span, COLUMNS: tl.constexpr):
    """Locate tile i of the walk.

    Returns whether it is in the prefix, its first key, which of its keys are in the hull, and whether all its keys are
    visible to all rows.
    """
    p_begin, p_end, p_tiles, p_full_begin, p_full_end = prefix
    o_begin, o_end, _, o_full_begin, o_full_end = own_span
    in_prefix = i < p_tiles
    start = tl.where(in_prefix, p_begin // COLUMNS + i, o_begin // COLUMNS + i - p_tiles) * COLUMNS
    key = start + tl.arange(0, COLUMNS)
    is_near = (key >= tl.where(in_prefix, p_begin, o_begin)) & (key < tl.where(in_prefix, p_end, o_end))
    full_begin = tl.where(in_prefix, p_full_begin, o_full_begin)
    full_end = tl.where(in_prefix, p_full_end, o_full_end)
    return in_prefix, start, is_near, (start >= full_begin) & (start + COLUMNS <= full_end)


@triton.jit
def _load_step(pointers, strides, in_prefix, slot, is_near, COLUMNS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr):
    """Load the keys (or values) of a tile of the walk. pointers, strides: prefix's and own. slot: from `_slots`."""
    pointer = tl.where(in_prefix, pointers[0], pointers[1])
    stride = tl.where(in_prefix, strides[0][1], strides[1][1])
    if PAGE % COLUMNS == 0:
        keys = _load_keys(pointer, slot, stride, is_near, COLUMNS, D)
    else:
        offset = slot[:, None] * stride + tl.arange(0, D)[None, :]
        keys = tl.load(pointer + offset, mask=is_near[:, None], other=0.0)
    return keys


@triton.jit
def _slots(table, in_prefix, start, is_near, COLUMNS: tl.constexpr, PAGE: tl.constexpr):
    """Return the index in memory of a tile's first key, or of every key if a page is not a multiple of tiles.

    PAGE: tokens of a page of the prefix, whose key i is in page table[i // PAGE] (0: the prefix is not in pages).
    """
    if PAGE == 0:
        slot = start
    elif PAGE % COLUMNS == 0:
        page = tl.load(table + tl.where(in_prefix, start // PAGE, 0)).to(tl.int64)
        slot = tl.where(in_prefix, page * PAGE + start % PAGE, start)
    else:
        key = start + tl.arange(0, COLUMNS)
        page_N = tl.load(table + tl.where(in_prefix, key // PAGE, 0), mask=is_near, other=0).to(tl.int64)
        slot = tl.where(in_prefix, page_N * PAGE + key % PAGE, key)
    return slot


@triton.jit
def _where_seen(values, otherwise, in_prefix, start, bounds, t, is_row, keys, COLUMNS: tl.constexpr):
    """Replace values of invisible keys by `otherwise`.

    It reads the spans again: few tiles need them, and keeping them would occupy registers in all tiles.
    """
    key = start + tl.arange(0, COLUMNS)
    source, count = tl.where(in_prefix, bounds, bounds + 2), tl.where(in_prefix, keys[0], keys[1])
    lo, hi = _bounds(source, t, is_row, count)
    return tl.where((key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None]), values, otherwise)


@triton.jit(do_not_specialize=["B", "T", "prefix_keys", "own_keys", "pages"])
def span_attention_forward(
    q, q_strides, k, k_strides, v, v_strides, bounds, table, out, lse, B, T, prefix_keys, own_keys, pages, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    PAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output [splits, B, T, h, D] and log-sum-exp [splits, B, T, h] over each split's part of the hull.

    k, v and their strides: pairs of the prefix's and the own. prefix_keys, own_keys: numbers of keys. table [B, pages]:
    the pages of the prefix, of PAGE tokens each, in pools shared by all rows (PAGE 0: the prefix is not in pages).
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # longest first: with a causal mask, the last tiles
    b, kh, split = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K, tl.program_id(2)
    splits, keys = tl.num_programs(2), (prefix_keys, own_keys)
    t, g, is_row = _rows(tile, T, G, ROWS)
    bounds += b * T * 4
    prefix, own_span, tiles = _spans(bounds, t, is_row, keys, COLUMNS)
    q_MD = _load_rows(_head(q, q_strides, b, kh * G), tile, T, q_strides[1], q_strides[2], G, ROWS, D)
    k = _head(k[0], k_strides[0], b, kh), _head(k[1], k_strides[1], b, kh)
    v = _head(v[0], v_strides[0], b, kh), _head(v[1], v_strides[1], b, kh)

    if PAGE != 0:
        table += b * pages

    peak_M = tl.full([ROWS], -INF, tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    acc_MD = tl.zeros([ROWS, D], tl.float32)
    scale *= LOG2E
    for i in range(split * tiles // splits, (split + 1) * tiles // splits):
        in_prefix, start, is_near, is_full = _step(i, prefix, own_span, COLUMNS)
        slot = _slots(table, in_prefix, start, is_near, COLUMNS, PAGE)
        k_ND = _load_step(k, k_strides, in_prefix, slot, is_near, COLUMNS, D, PAGE)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale
        if not is_full:
            s_MN = _where_seen(s_MN, -INF, in_prefix, start, bounds, t, is_row, keys, COLUMNS)
        new_peak_M = tl.maximum(peak_M, tl.max(s_MN, 1))
        shift_M = tl.where(new_peak_M == -INF, 0.0, new_peak_M)  # rows without a visible key so far
        p_MN = tl.exp2(s_MN - shift_M[:, None])
        shrink_M = tl.exp2(peak_M - shift_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        v_ND = _load_step(v, v_strides, in_prefix, slot, is_near, COLUMNS, D, PAGE)
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD * shrink_M[:, None], input_precision=PRECISION)
        peak_M = new_peak_M

    is_empty = sum_M == 0.0
    sum_M = tl.where(is_empty, 1.0, sum_M)
    lse_M = tl.where(is_empty, -INF, (peak_M + tl.log2(sum_M)) * LN2)
    offset = ((split * B + b) * T + t) * (K * G) + kh * G + g
    tl.store(lse + offset, lse_M, mask=is_row)
    out_MD = (acc_MD / sum_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + offset[:, None] * D + tl.arange(0, D)[None, :], out_MD, mask=is_row[:, None])


@triton.jit(do_not_specialize=["R", "splits"])
def span_attention_combine(parts, part_lse, out, lse, R, splits, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the outputs of splits [splits, R, D = COLUMNS], weighted by their shares exp(lse) of the total."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < R
    peak_M = tl.full([ROWS], -INF, tl.float32)
    for split in range(splits):
        peak_M = tl.maximum(peak_M, tl.load(part_lse + split * R + row, mask=is_row, other=-INF))
    shift_M = tl.where(peak_M == -INF, 0.0, peak_M)
    sum_M = tl.zeros([ROWS], tl.float32)
    acc_MD = tl.zeros([ROWS, COLUMNS], tl.float32)
    offset = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    for split in range(splits):
        share_M = tl.exp(tl.load(part_lse + split * R + row, mask=is_row, other=-INF) - shift_M)
        is_there = is_row & (share_M > 0.0)  # parts without a share are undefined
        part_MD = tl.load(parts + offset + split * R * COLUMNS, mask=is_there[:, None], other=0.0)
        sum_M += share_M
        acc_MD += share_M[:, None] * part_MD
    is_empty = sum_M == 0.0
    sum_M = tl.where(is_empty, 1.0, sum_M)
    tl.store(lse + row, tl.where(is_empty, -INF, shift_M + tl.log(sum_M)), mask=is_row)
    tl.store(out + offset, (acc_MD / sum_M[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
