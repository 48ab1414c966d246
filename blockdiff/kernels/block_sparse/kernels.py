"""The Triton kernels of block-sparse attention: the forward, and functions shared with its gradient and the selection.

Rows: the GROUP query heads that share a key head and an index head choose the same blocks, so the program of a query
loads a block once for all of them; a query has PARTS such groups. A program walks over the tiles of COLUMNS keys of its
blocks, STEPS in each, and then over those of its own keys, in one loop. Invisible keys are never loaded. Scores are in
units of log2. `kernels_selection.py` has the selection, `kernels_backward.py` the gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.span_attention.kernels import INF, LN2, LOG2E, _head, _load_keys

SCAN = tl.constexpr(1024)  # choices that are read at a time to find the end of a block's choices


@triton.jit
def _slots(table, page, is_paged, start, sees, PAGE: tl.constexpr, IS_RUN: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the index in memory of a tile's first key, `start`, if its keys are contiguous (IS_RUN), else of all keys.

    page: the page of all keys if IS_RUN. PAGE: tokens of a page; key i is in page table[i // PAGE] (0: no pages).
    """
    if PAGE == 0:
        slot = start
    elif IS_RUN:
        slot = tl.where(is_paged, page.to(tl.int64) * PAGE + start % PAGE, start)
    else:
        key = start + tl.arange(0, COLUMNS)
        page = tl.load(table + tl.where(is_paged, key // PAGE, 0), mask=sees, other=0).to(tl.int64)
        slot = tl.where(is_paged, page * PAGE + key % PAGE, key)
    return slot


@triton.jit
def _load_run(pointer, stride, slot, sees, IS_RUN: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr):
    """Load the keys (or values) of a tile [COLUMNS, D] from the indices of `_slots`."""
    if IS_RUN:
        keys = _load_keys(pointer, slot, stride, sees, COLUMNS, D)
    else:
        keys = tl.load(pointer + slot[:, None] * stride + tl.arange(0, D)[None, :], mask=sees[:, None], other=0.0)
    return keys


@triton.jit
def _query(visible, first, own_range, offset):
    """Load a query's number of visible keys, the first of them, and the range [lo, hi) of visible own keys."""
    seen = tl.load(visible + offset)
    start, lo, hi = seen * 0, seen * 0, seen * 0
    if first is not None:
        start = tl.load(first + offset)
    if own_range is not None:
        lo, hi = tl.maximum(tl.load(own_range + 2 * offset), 0), tl.load(own_range + 2 * offset + 1)
    return seen, start, lo, hi


@triton.jit
def _choices(ids, table, TOPK: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """Load a query's chosen blocks [CHOICES], the number up to the last used one, and the pages they begin in.

    They are kept in registers, so that later loads, whose addresses depend on them alone, can be prefetched.
    """
    choice = tl.arange(0, CHOICES)
    chosen = tl.load(ids + choice, mask=choice < TOPK, other=-1).to(tl.int32)
    pages = chosen
    if PAGE != 0:
        pages = tl.load(table + chosen * BLOCK // PAGE, mask=chosen >= 0, other=0)
    return chosen, tl.max(tl.where(chosen >= 0, choice + 1, 0), 0), pages


@triton.jit
def _step(i, choices, query, keys, CHOICES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
          COLUMNS: tl.constexpr):  # fmt: skip
    """Locate tile `i` of the tiles that a query walks over: those of its chosen blocks, then those of its own keys.

    choices, query: from `_choices` and `_query`. keys: the number of keys of the blocks and of own keys. Returns
    whether it is in a block, its first key (there or among the own keys), which of its keys are visible, and the page
    that its block begins in.
    """
    visible, first, own_lo, own_hi = query
    chosen, used, pages = choices
    is_this = tl.arange(0, CHOICES) == i // STEPS
    block = tl.max(tl.where(is_this, chosen, -1), 0)
    page = tl.max(tl.where(is_this, pages, 0), 0)
    in_block = i < used * STEPS
    within = (i % STEPS) * COLUMNS
    key = block * BLOCK + within
    own_key = own_lo + (i - used * STEPS) * COLUMNS
    of_block = tl.minimum(BLOCK - within, tl.minimum(visible, keys[0] - first) - key)
    count = tl.where(in_block, tl.where(block < 0, 0, of_block), tl.minimum(own_hi, keys[1]) - own_key)
    return in_block, tl.where(in_block, first + key, own_key), tl.arange(0, COLUMNS) < count, page


@triton.jit
def _load_step(pointers, strides, in_block, slot, sees, IS_RUN: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr):
    """Load the keys (or values) of a tile that `_step` located; pointers, strides: of the blocks, then of own keys."""
    return _load_run(
        tl.where(in_block, pointers[0], pointers[1]), tl.where(in_block, strides[0][1], strides[1][1]), slot, sees,
        IS_RUN, COLUMNS, D,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "T", "block_keys", "own_keys", "pages"])
def block_sparse_forward(
    q, q_strides, k, k_strides, v, v_strides, ids, visible, first, own_range, table, out, lse, B, T, block_keys,
    own_keys, pages, scale,
    K: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, CHOICES: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output [splits, B, T, h, D] and log-sum-exp [splits, B, T, h], each over its split of the visible keys.

    k, v and their strides: pairs, of the blocks and of own keys. block_keys, own_keys: numbers of keys. ids: [B, T, H,
    TOPK]; visible, first: [B, T]; own_range: [B, T, 2]; table: [B, pages].
    """
    STEPS: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    IS_RUN: tl.constexpr = PAGE == 0 or (first is None and PAGE % BLOCK == 0 and BLOCK % COLUMNS == 0)
    t, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    part, b = tl.program_id(1) // TILES % PARTS, (tl.program_id(1) // (TILES * PARTS)).to(tl.int64)
    g = tl.program_id(1) % TILES * ROWS + tl.arange(0, ROWS)
    is_row, head = g < GROUP, part * GROUP + g
    query = _query(visible, first, own_range, b * T + t)
    ids += ((b * T + t) * H + part * H // PARTS) * TOPK
    if PAGE != 0:
        table += b * pages
    choices = _choices(ids, table, TOPK, CHOICES, BLOCK, PAGE)
    tiles = choices[1] * STEPS + tl.cdiv(tl.maximum(query[3] - query[2], 0), COLUMNS)
    column = tl.arange(0, D)[None, :]
    q_MD = tl.load(
        q + b * q_strides[0] + t * q_strides[1] + head[:, None] * q_strides[2] + column, mask=is_row[:, None], other=0.0
    )
    kh = part * K // PARTS
    k = _head(k[0], k_strides[0], b, kh), _head(k[1], k_strides[1], b, kh)
    v = _head(v[0], v_strides[0], b, kh), _head(v[1], v_strides[1], b, kh)

    peak_M = tl.full([ROWS], -INF, tl.float32)
    sum_M = tl.zeros([ROWS], tl.float32)
    acc_MD = tl.zeros([ROWS, D], tl.float32)
    scale *= LOG2E
    for i in range(split * tiles // splits, (split + 1) * tiles // splits):
        in_block, start, sees, page = _step(i, choices, query, (block_keys, own_keys), CHOICES, BLOCK, STEPS, COLUMNS)
        slot = _slots(table, page, in_block, start, sees, PAGE, IS_RUN, COLUMNS)
        k_ND = _load_step(k, k_strides, in_block, slot, sees, IS_RUN, COLUMNS, D)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale
        s_MN = tl.where(sees[None, :], s_MN, -INF)
        new_peak_M = tl.maximum(peak_M, tl.max(s_MN, 1))
        shift_M = tl.where(new_peak_M == -INF, 0.0, new_peak_M)  # rows without a visible key so far
        p_MN = tl.exp2(s_MN - shift_M[:, None])
        shrink_M = tl.exp2(peak_M - shift_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        v_ND = _load_step(v, v_strides, in_block, slot, sees, IS_RUN, COLUMNS, D)
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD * shrink_M[:, None], input_precision=PRECISION)
        peak_M = new_peak_M

    is_empty = sum_M == 0.0
    sum_M = tl.where(is_empty, 1.0, sum_M)
    offset = ((split * B + b) * T + t) * (PARTS * GROUP) + head
    tl.store(lse + offset, tl.where(is_empty, -INF, (peak_M + tl.log2(sum_M)) * LN2), mask=is_row)
    out_MD = (acc_MD / sum_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + offset[:, None] * D + column, out_MD, mask=is_row[:, None])


@triton.jit(do_not_specialize=["begin", "queries", "keys"])
def block_sparse_forward_keys(
    q, q_strides, k, k_strides, v, v_strides, starts, entries, intervals, visible, first, out, lse,
    begin, queries, keys, scale,
    K: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the output of every choice separately, for `queries` queries of one row from `begin` on.

    Writes output [TOPK, queries, h, D] and log-sum-exp [TOPK, queries, h] in fp32, for `span_attention_combine`; unused
    choices are not written. q, k, v, visible, first: of that row. starts, entries [H, queries * TOPK]: as in
    block_sparse_backward_keys. intervals [H, tiles, 2]: the choices whose block begins in a tile of BLOCK keys. A
    program handles one tile's choices, or some of them, and loads the keys of a block once; in packed rows several
    blocks may begin in a tile.
    """
    part, split, splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    of_index = part * H // PARTS
    at_tile = intervals + (of_index * tl.num_programs(0) + tl.program_id(0)) * 2
    lo, hi = tl.load(at_tile), tl.load(at_tile + 1)
    starts += tl.cast(of_index, tl.int64) * queries * TOPK
    entries += tl.cast(of_index, tl.int64) * queries * TOPK
    column, within = tl.arange(0, D)[None, :], tl.arange(0, COLUMNS)
    kh = part * K // PARTS
    while lo < hi:
        start = tl.load(starts + lo)
        run = lo
        for scanned in range(lo, hi, SCAN):
            index = scanned + tl.arange(0, SCAN)
            run += tl.sum((tl.load(starts + index, mask=index < hi, other=-1) == start).to(tl.int32), 0)
        is_near = (within < BLOCK) & (start + within < keys)
        k_ND = _load_keys(k + kh * k_strides[2], start, k_strides[1], is_near, COLUMNS, D)
        v_ND = _load_keys(v + kh * v_strides[2], start, v_strides[1], is_near, COLUMNS, D)
        rows = (run - lo) * GROUP
        tiles = tl.cdiv(rows, ROWS)
        for i in range(split * tiles // splits, (split + 1) * tiles // splits):
            row = i * ROWS + tl.arange(0, ROWS)
            is_row = row < rows
            entry = tl.load(entries + lo + row // GROUP, mask=is_row, other=0)
            t, slot, head = entry // TOPK, (entry % TOPK).to(tl.int64), part * GROUP + row % GROUP
            at_q = (begin + t).to(tl.int64) * q_strides[1] + head * q_strides[2]
            q_MD = tl.load(q + at_q[:, None] + column, mask=is_row[:, None], other=0.0)
            seen = tl.load(visible + begin + t, mask=is_row, other=0) - start
            if first is not None:
                seen += tl.load(first + begin + t, mask=is_row, other=0)
            s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * (scale * LOG2E)
            s_MN = tl.where(within[None, :] < tl.minimum(seen, BLOCK)[:, None], s_MN, -INF)
            peak_M = tl.max(s_MN, 1)
            p_MN = tl.exp2(s_MN - tl.where(peak_M == -INF, 0.0, peak_M)[:, None])
            sum_M = tl.sum(p_MN, 1)
            is_empty = sum_M == 0.0
            out_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, input_precision=PRECISION)
            out_MD /= tl.where(is_empty, 1.0, sum_M)[:, None]
            offset = (slot * queries + t) * (PARTS * GROUP) + head
            tl.store(lse + offset, tl.where(is_empty, -INF, (peak_M + tl.log2(sum_M)) * LN2), mask=is_row)
            tl.store(out + offset[:, None] * D + column, out_MD, mask=is_row[:, None])
        lo = run
