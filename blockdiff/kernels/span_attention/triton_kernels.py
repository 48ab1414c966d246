"""The Triton kernels of span_attention: forward, the merge of splits, and the backward over queries and over keys.

Rows: the G query heads that share a key head stand together, row r of (batch, key head) is query r // G of head
r % G. So one key tile serves a whole group, and a tile of M rows covers only M / G queries: a tight hull.

A row tile walks the key tiles of its hull: first those of the prefix, then those of its own, in one loop that picks
its pointers. What lies outside the hull is never loaded. Scores are in units of log2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
INF = tl.constexpr(float("inf"))
SCAN = tl.constexpr(1024)  # queries that the search for a key tile's interval looks at together


@triton.jit
def _rows(tile, T, G: tl.constexpr, M: tl.constexpr):
    """Query and head within the group of every row of a tile, and whether the row is there."""
    row = tile * M + tl.arange(0, M)
    return row // G, row % G, row < T * G


@triton.jit
def _load_rows(pointer, tile, T, stride_t, stride_h, G: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """A tile [M, D] of the rows of a [T, h, D] tensor whose first head of the group `pointer` points at."""
    first = tile * M // G  # 64-bit only where it must be: registers
    t, g, is_row = _rows(tile, T, G, M)
    at = (t - first)[:, None] * stride_t + g[:, None] * stride_h + tl.arange(0, D)[None, :]
    return tl.load(pointer + tl.cast(first, tl.int64) * stride_t + at, mask=is_row[:, None], other=0.0)


@triton.jit
def _load_keys(pointer, start, stride, is_near, N: tl.constexpr, D: tl.constexpr):
    """A tile [N, D] of the keys (or values) of one head, from key `start` on."""
    at = tl.arange(0, N)[:, None] * stride + tl.arange(0, D)[None, :]  # 64-bit only where it must be: registers
    return tl.load(pointer + start.to(tl.int64) * stride + at, mask=is_near[:, None], other=0.0)


@triton.jit
def _load_spans(bounds, t, is_row, prefix_keys, own_keys):
    """prefix_lo, prefix_hi, own_lo, own_hi of every row, within the keys there are; rows not there see nothing."""
    at = bounds + t.to(tl.int64) * 4
    prefix_lo = tl.maximum(tl.load(at, mask=is_row, other=0), 0)
    prefix_hi = tl.minimum(tl.load(at + 1, mask=is_row, other=0), prefix_keys)
    own_lo = tl.maximum(tl.load(at + 2, mask=is_row, other=0), 0)
    own_hi = tl.minimum(tl.load(at + 3, mask=is_row, other=0), own_keys)
    return prefix_lo, prefix_hi, own_lo, own_hi


@triton.jit
def _hull(lo, hi, keys, is_row, N: tl.constexpr):
    """First and last key that any row sees, the tiles between, and the keys [full_lo, full_hi) that every row sees."""
    sees = hi > lo
    first = tl.min(tl.where(sees, lo, keys), 0)
    last = tl.max(tl.where(sees, hi, 0), 0)
    tiles = tl.maximum(tl.cdiv(last, N) - first // N, 0)
    full_lo = tl.max(tl.where(is_row, lo, 0), 0)
    full_hi = tl.min(tl.where(is_row, hi, keys), 0)
    return first, last, tiles, full_lo, full_hi


@triton.jit
def forward(
    q, pk, pv, ok, ov, bounds, out, lse,
    q_sb, q_st, q_sh, pk_sb, pk_sn, pk_sh, pv_sb, pv_sn, pv_sh, ok_sb, ok_sn, ok_sh, ov_sb, ov_sn, ov_sh,
    B, T, prefix_keys, own_keys, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Output [SPLITS, B, T, h, D] and log-sum-exp [SPLITS, B, T, h] over each split's part of the hull."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a causal row's last tiles are the longest: they go first
    b, kh, split = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K, tl.program_id(2)
    t, g, is_row = _rows(tile, T, G, M)
    prefix_lo, prefix_hi, own_lo, own_hi = _load_spans(bounds + b * T * 4, t, is_row, prefix_keys, own_keys)
    p_first, p_last, p_tiles, p_full_lo, p_full_hi = _hull(prefix_lo, prefix_hi, prefix_keys, is_row, N)
    o_first, o_last, o_tiles, o_full_lo, o_full_hi = _hull(own_lo, own_hi, own_keys, is_row, N)
    q_MD = _load_rows(q + b * q_sb + kh * G * q_sh, tile, T, q_st, q_sh, G, M, D)
    pk += b * pk_sb + kh * pk_sh
    pv += b * pv_sb + kh * pv_sh
    ok += b * ok_sb + kh * ok_sh
    ov += b * ov_sb + kh * ov_sh

    peak_M = tl.full([M], -INF, tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    acc_MD = tl.zeros([M, D], tl.float32)
    column = tl.arange(0, D)
    scale *= LOG2E
    begin = split * (p_tiles + o_tiles) // SPLITS
    end = (split + 1) * (p_tiles + o_tiles) // SPLITS
    for i in range(begin, end):
        in_prefix = i < p_tiles
        start = tl.where(in_prefix, p_first // N + i, o_first // N + i - p_tiles) * N
        key = start + tl.arange(0, N)
        is_near = (key >= tl.where(in_prefix, p_first, o_first)) & (key < tl.where(in_prefix, p_last, o_last))
        k_ND = _load_keys(tl.where(in_prefix, pk, ok), start, tl.where(in_prefix, pk_sn, ok_sn), is_near, N, D)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale
        full_lo, full_hi = tl.where(in_prefix, p_full_lo, o_full_lo), tl.where(in_prefix, p_full_hi, o_full_hi)
        if (start < full_lo) | (start + N > full_hi):
            lo, hi = tl.where(in_prefix, prefix_lo, own_lo), tl.where(in_prefix, prefix_hi, own_hi)
            s_MN = tl.where((key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None]), s_MN, -INF)
        new_peak_M = tl.maximum(peak_M, tl.max(s_MN, 1))
        shift_M = tl.where(new_peak_M == -INF, 0.0, new_peak_M)  # rows that have seen nothing yet
        p_MN = tl.exp2(s_MN - shift_M[:, None])
        shrink_M = tl.exp2(peak_M - shift_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        v_ND = _load_keys(tl.where(in_prefix, pv, ov), start, tl.where(in_prefix, pv_sn, ov_sn), is_near, N, D)
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD * shrink_M[:, None], input_precision=PRECISION)
        peak_M = new_peak_M

    is_empty = sum_M == 0.0
    sum_M = tl.where(is_empty, 1.0, sum_M)
    lse_M = tl.where(is_empty, -INF, (peak_M + tl.log2(sum_M)) * LN2)
    at = ((split * B + b) * T + t) * (K * G) + kh * G + g
    tl.store(lse + at, lse_M, mask=is_row)
    out_MD = (acc_MD / sum_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * D + column[None, :], out_MD, mask=is_row[:, None])


@triton.jit
def merge(
    parts, part_lse, out, lse, R,
    D: tl.constexpr, SPLITS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Outputs [SPLITS, R, D] of parts of the keys, each weighted with its share exp(lse) of the whole."""
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    is_row = row < R
    peak_M = tl.full([M], -INF, tl.float32)
    for split in range(SPLITS):
        peak_M = tl.maximum(peak_M, tl.load(part_lse + split * R + row, mask=is_row, other=-INF))
    shift_M = tl.where(peak_M == -INF, 0.0, peak_M)
    sum_M = tl.zeros([M], tl.float32)
    acc_MD = tl.zeros([M, D], tl.float32)
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    for split in range(SPLITS):
        share_M = tl.exp(tl.load(part_lse + split * R + row, mask=is_row, other=-INF) - shift_M)
        part_MD = tl.load(parts + at + split * R * D, mask=is_row[:, None], other=0.0)
        sum_M += share_M
        acc_MD += share_M[:, None] * part_MD
    is_empty = sum_M == 0.0
    sum_M = tl.where(is_empty, 1.0, sum_M)
    tl.store(lse + row, tl.where(is_empty, -INF, shift_M + tl.log(sum_M)), mask=is_row)
    tl.store(out + at, (acc_MD / sum_M[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def backward_rows(out, grad_out, lse, grad_lse, delta, R, D: tl.constexpr, M: tl.constexpr):
    """delta = sum(out * grad_out) - grad_lse of every row [R]: what the gradient of a row's scores is measured from.

    With p = exp(s - lse): ds = p * (grad_out v - delta). Rows that see nothing get 0, whatever their grad_lse.
    """
    row = tl.program_id(0).to(tl.int64) * M + tl.arange(0, M)
    is_row = row < R
    at = row[:, None] * D + tl.arange(0, D)[None, :]
    product = tl.load(out + at, mask=is_row[:, None], other=0.0).to(tl.float32)
    product *= tl.load(grad_out + at, mask=is_row[:, None], other=0.0).to(tl.float32)
    delta_M = tl.sum(product, 1) - tl.load(grad_lse + row, mask=is_row, other=0.0)
    is_empty = tl.load(lse + row, mask=is_row, other=0.0) == -INF
    tl.store(delta + row, tl.where(is_empty, 0.0, delta_M), mask=is_row)


@triton.jit
def _load_row_numbers(lse, delta, at, is_row):
    """log-sum-exp (units of log2; +inf, which makes p 0, for rows that see nothing) and delta."""
    lse_M = tl.load(lse + at, mask=is_row, other=-INF)
    return tl.where(lse_M == -INF, INF, lse_M * LOG2E), tl.load(delta + at, mask=is_row, other=0.0)


@triton.jit
def backward_q(
    q, pk, pv, ok, ov, bounds, lse, delta, grad_out, grad_q,
    q_sb, q_st, q_sh, pk_sb, pk_sn, pk_sh, pv_sb, pv_sn, pv_sh, ok_sb, ok_sn, ok_sh, ov_sb, ov_sn, ov_sh,
    B, T, prefix_keys, own_keys, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """grad_q [B, T, h, D]: the forward's walk over the hull of a row tile."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, kh = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    t, g, is_row = _rows(tile, T, G, M)
    prefix_lo, prefix_hi, own_lo, own_hi = _load_spans(bounds + b * T * 4, t, is_row, prefix_keys, own_keys)
    p_first, p_last, p_tiles, p_full_lo, p_full_hi = _hull(prefix_lo, prefix_hi, prefix_keys, is_row, N)
    o_first, o_last, o_tiles, o_full_lo, o_full_hi = _hull(own_lo, own_hi, own_keys, is_row, N)
    q_MD = _load_rows(q + b * q_sb + kh * G * q_sh, tile, T, q_st, q_sh, G, M, D)
    at = (b * T + t) * (K * G) + kh * G + g
    column = tl.arange(0, D)
    grad_MD = _load_rows(grad_out + (b * T * K + kh) * G * D, tile, T, K * G * D, D, G, M, D)
    lse_M, delta_M = _load_row_numbers(lse, delta, at, is_row)
    pk += b * pk_sb + kh * pk_sh
    pv += b * pv_sb + kh * pv_sh
    ok += b * ok_sb + kh * ok_sh
    ov += b * ov_sb + kh * ov_sh

    acc_MD = tl.zeros([M, D], tl.float32)
    for i in range(p_tiles + o_tiles):
        in_prefix = i < p_tiles
        start = tl.where(in_prefix, p_first // N + i, o_first // N + i - p_tiles) * N
        key = start + tl.arange(0, N)
        is_near = (key >= tl.where(in_prefix, p_first, o_first)) & (key < tl.where(in_prefix, p_last, o_last))
        k_ND = _load_keys(tl.where(in_prefix, pk, ok), start, tl.where(in_prefix, pk_sn, ok_sn), is_near, N, D)
        v_ND = _load_keys(tl.where(in_prefix, pv, ov), start, tl.where(in_prefix, pv_sn, ov_sn), is_near, N, D)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * (scale * LOG2E)
        p_MN = tl.exp2(s_MN - lse_M[:, None])
        full_lo, full_hi = tl.where(in_prefix, p_full_lo, o_full_lo), tl.where(in_prefix, p_full_hi, o_full_hi)
        if (start < full_lo) | (start + N > full_hi):
            lo, hi = tl.where(in_prefix, prefix_lo, own_lo), tl.where(in_prefix, prefix_hi, own_hi)
            p_MN = tl.where((key[None, :] >= lo[:, None]) & (key[None, :] < hi[:, None]), p_MN, 0.0)
        grad_p_MN = tl.dot(grad_MD, tl.trans(v_ND), input_precision=PRECISION)
        grad_s_MN = (p_MN * (grad_p_MN - delta_M[:, None])).to(k_ND.dtype)
        acc_MD = tl.dot(grad_s_MN, k_ND, acc_MD, input_precision=PRECISION)
    acc_MD = (acc_MD * scale).to(grad_q.dtype.element_ty)
    tl.store(grad_q + at[:, None] * D + column[None, :], acc_MD, mask=is_row[:, None])


@triton.jit
def seeing_queries(bounds, interval, first, T, tiles, N: tl.constexpr):
    """The queries [begin, end) between the first and the last that see a key of a tile: int32 [B, tiles, 2].

    first: where the span stands in `bounds` (0: prefix, 2: own). Queries between them that see none of the keys are
    masked later, so any order of queries is right; one in which the seeing queries are neighbours is fast.
    """
    tile, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end = T, 0
    for start in range(0, T, SCAN):
        t = start + tl.arange(0, SCAN)
        at = bounds + (b * T + t) * 4 + first
        lo, hi = tl.load(at, mask=t < T, other=0), tl.load(at + 1, mask=t < T, other=0)
        sees = (tl.maximum(lo, tile * N) < tl.minimum(hi, tile * N + N)) & (t < T)
        begin = tl.minimum(begin, tl.min(tl.where(sees, t, T), 0))
        end = tl.maximum(end, tl.max(tl.where(sees, t + 1, 0), 0))
    at = interval + (b * tiles + tile) * 2
    tl.store(at, tl.minimum(begin, end))
    tl.store(at + 1, end)


@triton.jit
def backward_kv(
    q, k, v, bounds, lse, delta, grad_out, interval, grad_k, grad_v,
    q_sb, q_st, q_sh, k_sb, k_sn, k_sh, v_sb, v_sn, v_sh,
    first, T, keys, scale,
    WITH_K: tl.constexpr, WITH_V: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """grad_k and grad_v [B, keys, K, D] of one source, summed over the group in the order of the queries."""
    tile = tl.program_id(0)
    b, kh = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    key = tile * N + tl.arange(0, N)
    is_key = key < keys
    column = tl.arange(0, D)
    k_ND = _load_keys(k + b * k_sb + kh * k_sh, tile * N, k_sn, is_key, N, D)
    if WITH_K:
        v_ND = _load_keys(v + b * v_sb + kh * v_sh, tile * N, v_sn, is_key, N, D)
    q += b * q_sb + kh * G * q_sh
    grad_out += (b * T * K + kh) * G * D
    bounds += b * T * 4 + first
    at_tile = interval + (b * tl.num_programs(0) + tile) * 2
    begin, end = tl.load(at_tile) * G // M, tl.cdiv(tl.load(at_tile + 1) * G, M)

    acc_k_ND = tl.zeros([N, D], tl.float32)
    acc_v_ND = tl.zeros([N, D], tl.float32)
    for i in range(begin, end):
        t, g, is_row = _rows(i, T, G, M)
        lo = tl.load(bounds + t.to(tl.int64) * 4, mask=is_row, other=0)
        hi = tl.load(bounds + t.to(tl.int64) * 4 + 1, mask=is_row, other=0)
        q_MD = _load_rows(q, i, T, q_st, q_sh, G, M, D)
        at = (b * T + t) * (K * G) + kh * G + g
        grad_MD = _load_rows(grad_out, i, T, K * G * D, D, G, M, D)
        lse_M, delta_M = _load_row_numbers(lse, delta, at, is_row)
        s_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION) * (scale * LOG2E)
        is_seen = (key[:, None] >= lo[None, :]) & (key[:, None] < tl.minimum(hi, keys)[None, :])
        p_NM = tl.where(is_seen, tl.exp2(s_NM - lse_M[None, :]), 0.0)
        if WITH_V:
            acc_v_ND = tl.dot(p_NM.to(grad_MD.dtype), grad_MD, acc_v_ND, input_precision=PRECISION)
        if WITH_K:
            grad_p_NM = tl.dot(v_ND, tl.trans(grad_MD), input_precision=PRECISION)
            # a choice, not a product with 0: keys that nobody sees may hold anything
            grad_s_NM = tl.where(p_NM > 0.0, p_NM * (grad_p_NM - delta_M[None, :]), 0.0).to(q_MD.dtype)
            acc_k_ND = tl.dot(grad_s_NM, q_MD, acc_k_ND, input_precision=PRECISION)
    out_at = ((b * keys + key) * K + kh)[:, None] * D + column[None, :]
    if WITH_K:
        tl.store(grad_k + out_at, (acc_k_ND * scale).to(grad_k.dtype.element_ty), mask=is_key[:, None])
    if WITH_V:
        tl.store(grad_v + out_at, acc_v_ND.to(grad_v.dtype.element_ty), mask=is_key[:, None])
