"""The Triton kernels of span_attention's gradient: over queries, and over keys.

The gradient of queries walks over the hull of a row tile as the forward does. The gradient of keys walks over the rows
from the first to the last query that sees one of a tile's keys; a kernel before it finds these two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.span_attention.kernels import (
    INF,
    LOG2E,
    _bounds,
    _head,
    _load_keys,
    _load_rows,
    _load_step,
    _rows,
    _spans,
    _step,
    _where_seen,
)

SCAN = tl.constexpr(1024)  # queries that the search for a key tile's interval reads at a time


@triton.jit(do_not_specialize=["R"])
def span_attention_backward_delta(out, grad_out, lse, grad_lse, delta, R, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute delta = sum(out * grad_out) - grad_lse of every row [R], 0 for rows that see no key.

    The gradient of a score s is ds = p * (grad_out v - delta), p = exp(s - lse).
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < R
    offset = row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    product = tl.load(out + offset, mask=is_row[:, None], other=0.0).to(tl.float32)
    product *= tl.load(grad_out + offset, mask=is_row[:, None], other=0.0).to(tl.float32)
    delta_M = tl.sum(product, 1) - tl.load(grad_lse + row, mask=is_row, other=0.0)
    is_empty = tl.load(lse + row, mask=is_row, other=0.0) == -INF
    tl.store(delta + row, tl.where(is_empty, 0.0, delta_M), mask=is_row)


@triton.jit
def _awaited(total, AWAITS: tl.constexpr):
    """Wait for an asynchronous product, or a sum of products, in a pipelined loop on sm_90.

    For a sum: Triton would leave the product running until the next one is added. If there is a branch in between,
    ptxas sees registers used in flight and waits after every single instruction of every product of the loop.
    For a product used only inside branches: Triton 3.6 fails to compile the loop, since it puts the wait in the branch.
    """
    if AWAITS:
        total = tl.inline_asm_elementwise("", "=f,0", [total], tl.float32, is_pure=True, pack=1)
    return total


@triton.jit
def _load_row_numbers(lse, delta, offset, is_row):
    """Load log-sum-exp, in units of log2 (+inf, so that p is 0, for rows that see no key), and delta."""
    lse_M = tl.load(lse + offset, mask=is_row, other=-INF)
    return tl.where(lse_M == -INF, INF, lse_M * LOG2E), tl.load(delta + offset, mask=is_row, other=0.0)


@triton.jit
def span_attention_backward_queries(
    q, q_strides, k, k_strides, v, v_strides, bounds, lse, delta, grad_out, grad_q, T, prefix_keys, own_keys,
    scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, AWAITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_q [B, T, h, D] by the forward's walk over the hull of a row tile."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b, kh = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    t, g, is_row = _rows(tile, T, G, ROWS)
    bounds += b * T * 4
    keys = prefix_keys, own_keys
    prefix, own_span, tiles = _spans(bounds, t, is_row, keys, COLUMNS)
    q_MD = _load_rows(_head(q, q_strides, b, kh * G), tile, T, q_strides[1], q_strides[2], G, ROWS, D)
    grad_MD = _load_rows(grad_out + (b * T * K + kh) * G * D, tile, T, K * G * D, D, G, ROWS, D)
    offset = (b * T + t) * (K * G) + kh * G + g
    lse_M, delta_M = _load_row_numbers(lse, delta, offset, is_row)
    k = _head(k[0], k_strides[0], b, kh), _head(k[1], k_strides[1], b, kh)
    v = _head(v[0], v_strides[0], b, kh), _head(v[1], v_strides[1], b, kh)

    acc_MD = tl.zeros([ROWS, D], tl.float32)
    for i in range(tiles):
        in_prefix, start, is_near, is_full = _step(i, prefix, own_span, COLUMNS)
        k_ND = _load_step(k, k_strides, in_prefix, start, is_near, COLUMNS, D, 0)
        v_ND = _load_step(v, v_strides, in_prefix, start, is_near, COLUMNS, D, 0)
        s_MN = _awaited(tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION), AWAITS) * (scale * LOG2E)
        grad_p_MN = _awaited(tl.dot(grad_MD, tl.trans(v_ND), input_precision=PRECISION), AWAITS)
        # Use it only inside the branches: a product that feeds another directly is divided among warps by rows only,
        # so two warp groups would both compute the same 64 rows.
        if is_full:
            grad_s_MN = tl.exp2(s_MN - lse_M[:, None]) * (grad_p_MN - delta_M[:, None])
        else:
            p_MN = tl.exp2(s_MN - lse_M[:, None])
            p_MN = _where_seen(p_MN, 0.0, in_prefix, start, bounds, t, is_row, keys, COLUMNS)
            grad_s_MN = p_MN * (grad_p_MN - delta_M[:, None])
        grad_s_MN = grad_s_MN.to(k_ND.dtype)
        acc_MD = tl.dot(grad_s_MN, k_ND, acc_MD, input_precision=PRECISION)
    acc_MD = (acc_MD * scale).to(grad_q.dtype.element_ty)
    tl.store(grad_q + offset[:, None] * D + tl.arange(0, D)[None, :], acc_MD, mask=is_row[:, None])


@triton.jit(do_not_specialize=["first", "T", "keys", "tiles"])
def span_attention_backward_intervals(bounds, first, interval, T, keys, tiles, COLUMNS: tl.constexpr):
    """Find the queries that each key tile is visible to, int32 [B, tiles, 4]: begin, end, full_begin, full_end.

    [begin, end) is from the first to the last query that sees one of the tile's keys; [full_begin, full_end) are the
    queries that see all of them, if these are consecutive (else empty). first: index of the source's span in `bounds`
    (0: prefix, 2: own). Queries in between that see no key are masked later, so every order of queries is correct; it
    is fast if the queries that see a tile are consecutive.
    """
    tile, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    begin, end, full_begin, full_end, full = T, 0, T, 0, 0
    for start in range(0, T, SCAN):
        t = start + tl.arange(0, SCAN)
        lo, hi = _bounds(bounds + b * T * 4 + first, t, t < T, keys)
        lo, hi = tl.maximum(lo, tile * COLUMNS), tl.minimum(hi, tile * COLUMNS + COLUMNS)
        begin = tl.minimum(begin, tl.min(tl.where(lo < hi, t, T), 0))
        end = tl.maximum(end, tl.max(tl.where(lo < hi, t + 1, 0), 0))
        sees_all = hi - lo == COLUMNS
        full_begin = tl.minimum(full_begin, tl.min(tl.where(sees_all, t, T), 0))
        full_end = tl.maximum(full_end, tl.max(tl.where(sees_all, t + 1, 0), 0))
        full += tl.sum(sees_all.to(tl.int32), 0)
    pointers = interval + (b * tiles + tile) * 4
    tl.store(pointers, tl.minimum(begin, end))
    tl.store(pointers + 1, end)
    tl.store(pointers + 2, full_begin)
    tl.store(pointers + 3, tl.where(full == full_end - full_begin, full_end, full_begin))


@triton.jit(do_not_specialize=["first"])  # one compilation serves both sources
def span_attention_backward_keys(
    q, q_strides, k, k_strides, v, v_strides, bounds, first, lse, delta, grad_out, interval, grad_k, grad_v,
    T, keys, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr, AWAITS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_k and grad_v (None: skip) [B, keys, K, D] of the prefix's keys or of the own keys.

    They are summed over the heads of a group in query order. first: index of the source's span in `bounds` (0: prefix,
    2: own). interval: from `span_attention_backward_intervals`.
    """
    tile = tl.program_id(0)
    b, kh = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    start = tile * COLUMNS
    key = start + tl.arange(0, COLUMNS)
    is_key = key < keys
    k_ND = _load_keys(_head(k, k_strides, b, kh), start, k_strides[1], is_key, COLUMNS, D)
    if grad_k is not None:
        v_ND = _load_keys(_head(v, v_strides, b, kh), start, v_strides[1], is_key, COLUMNS, D)
    q = _head(q, q_strides, b, kh * G)
    grad_out += (b * T * K + kh) * G * D
    bounds += b * T * 4 + first
    at_tile = interval + (b * tl.num_programs(0) + tile) * 4
    begin, end = tl.load(at_tile) * G // ROWS, tl.cdiv(tl.load(at_tile + 1) * G, ROWS)
    full_begin, full_end = tl.load(at_tile + 2) * G, tl.load(at_tile + 3) * G

    acc_k_ND = tl.zeros([COLUMNS, D], tl.float32)
    acc_v_ND = tl.zeros([COLUMNS, D], tl.float32)
    for i in range(begin, end):
        t, g, is_row = _rows(i, T, G, ROWS)
        q_MD = _load_rows(q, i, T, q_strides[1], q_strides[2], G, ROWS, D)
        offset = (b * T + t) * (K * G) + kh * G + g
        grad_MD = _load_rows(grad_out, i, T, K * G * D, D, G, ROWS, D)
        lse_M, delta_M = _load_row_numbers(lse, delta, offset, is_row)
        s_NM = _awaited(tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION), AWAITS) * (scale * LOG2E)
        grad_p_NM = tl.zeros_like(s_NM)
        if grad_k is not None:
            grad_p_NM = _awaited(tl.dot(v_ND, tl.trans(grad_MD), input_precision=PRECISION), AWAITS)
        # used only inside the branches, as in span_attention_backward_queries
        if (i * ROWS >= full_begin) & (i * ROWS + ROWS <= full_end):
            p_NM = tl.exp2(s_NM - lse_M[None, :])
            grad_s_NM = p_NM * (grad_p_NM - delta_M[None, :])
        else:
            lo, hi = _bounds(bounds, t, is_row, keys)
            is_seen = (key[:, None] >= lo[None, :]) & (key[:, None] < hi[None, :])
            p_NM = tl.where(is_seen, tl.exp2(s_NM - lse_M[None, :]), 0.0)
            # tl.where, not a product with 0: keys that no query sees may be NaN
            grad_s_NM = tl.where(p_NM > 0.0, p_NM * (grad_p_NM - delta_M[None, :]), 0.0)
        if grad_v is not None:
            acc_v_ND = tl.dot(p_NM.to(grad_MD.dtype), grad_MD, acc_v_ND, input_precision=PRECISION)
            acc_v_ND = _awaited(acc_v_ND, AWAITS)
        if grad_k is not None:
            acc_k_ND = tl.dot(grad_s_NM.to(q_MD.dtype), q_MD, acc_k_ND, input_precision=PRECISION)
            acc_k_ND = _awaited(acc_k_ND, AWAITS)
    out_at = ((b * keys + key) * K + kh)[:, None] * D + tl.arange(0, D)[None, :]
    if grad_k is not None:
        tl.store(grad_k + out_at, (acc_k_ND * scale).to(grad_k.dtype.element_ty), mask=is_key[:, None])
    if grad_v is not None:
        tl.store(grad_v + out_at, acc_v_ND.to(grad_v.dtype.element_ty), mask=is_key[:, None])
