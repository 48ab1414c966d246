"""The Triton kernels of block-sparse attention's gradient: over queries, and over keys.

The gradient of a query is computed over its chosen blocks, as in the forward. The gradients of keys and values are
computed tile by tile of the keys, over the queries that chose them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.block_sparse.kernels import _choices, _load_step, _query, _step
from blockdiff.kernels.span_attention.kernels import LOG2E, _head, _load_keys
from blockdiff.kernels.span_attention.kernels_backward import _awaited, _load_row_numbers


@triton.jit(do_not_specialize=["T", "block_keys", "own_keys"])
def block_sparse_backward_queries(
    q, q_strides, k, k_strides, v, v_strides, ids, visible, first, own_range, lse, delta, grad_out, grad_q, T,
    block_keys, own_keys, scale,
    K: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, CHOICES: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_q [B, T, h, D] over the same tiles of keys as `block_sparse_forward`. grad_out: contiguous."""
    STEPS: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    t = tl.program_id(0).to(tl.int64)
    part, b = tl.program_id(1) // TILES % PARTS, (tl.program_id(1) // (TILES * PARTS)).to(tl.int64)
    g = tl.program_id(1) % TILES * ROWS + tl.arange(0, ROWS)
    is_row, head = g < GROUP, part * GROUP + g
    query = _query(visible, first, own_range, b * T + t)
    ids += ((b * T + t) * H + part * H // PARTS) * TOPK
    choices = _choices(ids, None, TOPK, CHOICES, BLOCK, 0)
    tiles = choices[1] * STEPS + tl.cdiv(tl.maximum(query[3] - query[2], 0), COLUMNS)
    column = tl.arange(0, D)[None, :]
    q_MD = tl.load(
        q + b * q_strides[0] + t * q_strides[1] + head[:, None] * q_strides[2] + column, mask=is_row[:, None], other=0.0
    )
    offset = (b * T + t) * (PARTS * GROUP) + head
    grad_MD = tl.load(grad_out + offset[:, None] * D + column, mask=is_row[:, None], other=0.0)
    lse_M, delta_M = _load_row_numbers(lse, delta, offset, is_row)
    kh = part * K // PARTS
    k = _head(k[0], k_strides[0], b, kh), _head(k[1], k_strides[1], b, kh)
    v = _head(v[0], v_strides[0], b, kh), _head(v[1], v_strides[1], b, kh)

    acc_MD = tl.zeros([ROWS, D], tl.float32)
    for i in range(tiles):
        in_block, start, sees, _ = _step(i, choices, query, (block_keys, own_keys), CHOICES, BLOCK, STEPS, COLUMNS)
        k_ND = _load_step(k, k_strides, in_block, start, sees, True, COLUMNS, D)
        v_ND = _load_step(v, v_strides, in_block, start, sees, True, COLUMNS, D)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * (scale * LOG2E)
        grad_p_MN = tl.dot(grad_MD, tl.trans(v_ND), input_precision=PRECISION)
        p_MN = tl.where(sees[None, :], tl.exp2(s_MN - lse_M[:, None]), 0.0)
        grad_s_MN = (p_MN * (grad_p_MN - delta_M[:, None])).to(k_ND.dtype)
        acc_MD = tl.dot(grad_s_MN, k_ND, acc_MD, input_precision=PRECISION)
    acc_MD = (acc_MD * scale).to(grad_q.dtype.element_ty)
    tl.store(grad_q + offset[:, None] * D + column, acc_MD, mask=is_row[:, None])


@triton.jit(do_not_specialize=["T", "keys"])
def block_sparse_backward_keys(
    q, q_strides, k, k_strides, v, v_strides, starts, entries, intervals, visible, first, lse, delta, grad_out,
    grad_k, grad_v, T, keys, scale,
    K: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, PRECISION: tl.constexpr, AWAITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_k and grad_v [B, keys, K, D], summed in the order of `entries`; a program handles a tile of keys.

    starts, entries: [B, H, T * TOPK], all choices sorted by the first key of their block: that key, and the choice's
    index, query * TOPK + choice. intervals: [B, H, tiles, 2], the range of choices whose blocks overlap a tile of keys.
    """
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    b, kh = (tl.program_id(1) // K).to(tl.int64), tl.program_id(1) % K
    key = tile * COLUMNS + tl.arange(0, COLUMNS)
    is_key = key < keys
    k_ND = _load_keys(_head(k, k_strides, b, kh), tile * COLUMNS, k_strides[1], is_key, COLUMNS, D)
    v_ND = _load_keys(_head(v, v_strides, b, kh), tile * COLUMNS, v_strides[1], is_key, COLUMNS, D)
    column = tl.arange(0, D)[None, :]

    acc_k_ND = tl.zeros([COLUMNS, D], tl.float32)
    acc_v_ND = tl.zeros([COLUMNS, D], tl.float32)
    for other in tl.static_range(PARTS // K):  # the groups that share this key head
        part = kh * (PARTS // K) + other
        list_of = b * H + part * H // PARTS
        at_tile = intervals + (list_of * tiles + tile) * 2
        begin = tl.load(at_tile)
        rows = (tl.load(at_tile + 1) - begin) * GROUP
        for i in range(tl.cdiv(rows, ROWS)):
            row = i * ROWS + tl.arange(0, ROWS)
            is_row = row < rows
            entry = list_of * (T * TOPK) + begin + row // GROUP
            t = tl.load(entries + entry, mask=is_row, other=0).to(tl.int64) // TOPK
            start = tl.load(starts + entry, mask=is_row, other=0)
            seen = tl.load(visible + b * T + t, mask=is_row, other=0)
            if first is not None:
                seen += tl.load(first + b * T + t, mask=is_row, other=0)
            end = tl.where(is_row, tl.minimum(start + BLOCK, seen), 0)
            head = part * GROUP + row % GROUP
            at_q = b * q_strides[0] + t * q_strides[1] + head * q_strides[2]
            q_MD = tl.load(q + at_q[:, None] + column, mask=is_row[:, None], other=0.0)
            offset = (b * T + t) * (PARTS * GROUP) + head
            grad_MD = tl.load(grad_out + offset[:, None] * D + column, mask=is_row[:, None], other=0.0)
            lse_M, delta_M = _load_row_numbers(lse, delta, offset, is_row)
            s_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION) * (scale * LOG2E)
            grad_p_NM = tl.dot(v_ND, tl.trans(grad_MD), input_precision=PRECISION)
            sees = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
            p_NM = tl.where(sees, tl.exp2(s_NM - lse_M[None, :]), 0.0)
            # tl.where, not a product with 0: keys that no query sees may be NaN
            grad_s_NM = tl.where(sees, p_NM * (grad_p_NM - delta_M[None, :]), 0.0)
            acc_v_ND = tl.dot(p_NM.to(grad_MD.dtype), grad_MD, acc_v_ND, input_precision=PRECISION)
            acc_v_ND = _awaited(acc_v_ND, AWAITS)
            acc_k_ND = tl.dot(grad_s_NM.to(q_MD.dtype), q_MD, acc_k_ND, input_precision=PRECISION)
            acc_k_ND = _awaited(acc_k_ND, AWAITS)
    out_at = ((b * keys + key) * K + kh)[:, None] * D + column
    tl.store(grad_k + out_at, (acc_k_ND * scale).to(grad_k.dtype.element_ty), mask=is_key[:, None])
    tl.store(grad_v + out_at, acc_v_ND.to(grad_v.dtype.element_ty), mask=is_key[:, None])
