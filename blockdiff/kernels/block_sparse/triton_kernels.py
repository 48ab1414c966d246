"""The Triton kernels of block-sparse attention: scores of blocks, the choice, forward, backward over queries and keys.

Rows: the GROUP query heads that share a key head and an index head stand together and choose the same blocks, so a
program of one query loads a block once for all of them (PARTS such groups in a query). It walks the tiles of COLUMNS
keys of its blocks, STEPS in each, and then those of its own keys, in one loop. What it does not see is never loaded.
The gradients of keys are made tile by tile of the keys, by the queries that chose them. Attention's scores are in units
of log2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.span_attention.triton_kernels import (
    INF,
    LN2,
    LOG2E,
    SCAN,
    _awaited,
    _head,
    _load_keys,
    _load_row_numbers,
    _load_rows,
    _rows,
)

NOTHING = tl.constexpr(-(1 << 63))  # the claim of a block that is not there
FORCED = tl.constexpr(1 << 31)  # more than the order of any score
FAR = tl.constexpr(2**31 - 1)  # after the first key of every document


@triton.jit
def _place(table, page, is_paged, start, sees, PAGE: tl.constexpr, IS_RUN: tl.constexpr, COLUMNS: tl.constexpr):
    """Where the keys of a tile stand, of which `start` is the first: that one's place if they are neighbours (IS_RUN),
    which are all in `page`, else every key's. PAGE: tokens of a page, where key i stands in page table[i // PAGE] (0:
    all are in one piece)."""
    if PAGE == 0:
        place = start
    elif IS_RUN:
        place = tl.where(is_paged, page.to(tl.int64) * PAGE + start % PAGE, start)
    else:
        key = start + tl.arange(0, COLUMNS)
        page = tl.load(table + tl.where(is_paged, key // PAGE, 0), mask=sees, other=0).to(tl.int64)
        place = tl.where(is_paged, page * PAGE + key % PAGE, key)
    return place


@triton.jit
def _load_run(pointer, stride, place, sees, IS_RUN: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr):
    """The keys (or values) of a tile [COLUMNS, D] that stand where `_place` says."""
    if IS_RUN:
        keys = _load_keys(pointer, place, stride, sees, COLUMNS, D)
    else:
        keys = tl.load(pointer + place[:, None] * stride + tl.arange(0, D)[None, :], mask=sees[:, None], other=0.0)
    return keys


# -- selection ---------------------------------------------------------------------------------------------------


@triton.jit
def block_sparse_scores(
    q, q_strides, k, k_strides, visible, first, table, out, T, S, N, pages, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    USES_SUM: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The score [B, T, H, N] of every block of which a query sees a key: the maximum or log-sum-exp of the seen ones.

    Rows: the index heads of a query stand together, and share the keys [B, S, 1, D]. Queries whose documents begin
    elsewhere have other blocks, and take turns. The blocks are split over programs.
    """
    STEPS: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    IS_RUN: tl.constexpr = PAGE == 0 or (first is None and PAGE % COLUMNS == 0 and BLOCK % COLUMNS == 0)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a causal row's last tiles are the longest: they go first
    b, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    t, _, is_row = _rows(tile, T, H, ROWS)
    visible_M = tl.load(visible + b * T + t, mask=is_row, other=0)
    first_M = tl.zeros([ROWS], tl.int32)
    if first is not None:
        first_M = tl.load(first + b * T + t, mask=is_row, other=0)
    q_MD = _load_rows(q + b * q_strides[0], tile, T, q_strides[1], q_strides[2], H, ROWS, D)
    k = _head(k, k_strides, b, 0)
    out += (b * T * H + tile * ROWS + tl.arange(0, ROWS)) * N
    if PAGE != 0:
        table += b * pages

    start = tl.min(tl.where(visible_M > 0, first_M, FAR), 0)
    while start < FAR:
        is_mine = (visible_M > 0) & (first_M == start)
        hull = tl.max(tl.where(is_mine, tl.minimum(visible_M, S - start), 0), 0)
        blocks = tl.cdiv(hull, BLOCK)
        peak_M = tl.full([ROWS], -INF, tl.float32)
        sum_M = tl.zeros([ROWS], tl.float32)
        for i in range(split * blocks // SPLITS * STEPS, (split + 1) * blocks // SPLITS * STEPS):
            block, step = i // STEPS, i % STEPS
            place = block * BLOCK + step * COLUMNS
            column = place + tl.arange(0, COLUMNS)
            end = tl.minimum((block + 1) * BLOCK, hull)
            is_near = column < end
            page = block
            if PAGE != 0:
                page = tl.load(table + (start + place) // PAGE)
            at = _place(table, page, block >= 0, start + place, is_near, PAGE, IS_RUN, COLUMNS)
            k_ND = _load_run(k, k_strides[1], at, is_near, IS_RUN, COLUMNS, D)
            s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale
            s_MN = tl.where(column[None, :] < tl.minimum(visible_M, end)[:, None], s_MN, -INF)
            peak_M = tl.where(step == 0, -INF, peak_M)
            new_peak_M = tl.maximum(peak_M, tl.max(s_MN, 1))
            if USES_SUM:
                shift_M = tl.where(new_peak_M == -INF, 0.0, new_peak_M)
                sum_M = sum_M * tl.exp(peak_M - shift_M) + tl.sum(tl.exp(s_MN - shift_M[:, None]), 1)
            peak_M = new_peak_M
            score_M = peak_M
            if USES_SUM:
                score_M += tl.log(sum_M)
            tl.store(out + block, score_M, mask=is_mine & (step == STEPS - 1))
        start = tl.min(tl.where((visible_M > 0) & (first_M > start), first_M, FAR), 0)


@triton.jit
def block_sparse_choose(
    scores, visible, ids, R, N, LOCAL, INIT, BLOCK: tl.constexpr, H: tl.constexpr, TOPK: tl.constexpr,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The TOPK highest claims of every row [R, N], as blocks, -1 where there are no more: int64 [R, TOPK].

    A claim is one integer, made of kind or score and, for equal ones, of place: no two are equal. The highest so far
    compete with COLUMNS more at a time.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < R
    choice = tl.arange(0, CHOICES)[None, :]
    blocks_M = tl.minimum(tl.cdiv(tl.load(visible + row // H, mask=is_row, other=0), BLOCK), N)
    best_MC = tl.full([ROWS, CHOICES], NOTHING, tl.int64)
    for start in range(0, tl.max(blocks_M, 0), COLUMNS):
        place = start + tl.arange(0, COLUMNS)[None, :]
        is_there = place < blocks_M[:, None]
        score_MN = tl.load(scores + row[:, None] * N + place, mask=is_there, other=0.0)
        bits = score_MN.to(tl.int32, bitcast=True).to(tl.int64)
        ordered = tl.where(bits < 0, -(bits + FORCED), bits)  # rises with the score; +0 and -0 are equal
        ordered = tl.where(place >= blocks_M[:, None] - LOCAL, FORCED + 1, ordered)
        ordered = tl.where(place < INIT, FORCED + 2, ordered)
        claim_MN = tl.where(is_there, ordered * N + (N - 1 - place), NOTHING)
        next_MC = tl.full([ROWS, CHOICES], NOTHING, tl.int64)
        for i in range(TOPK):
            top_M = tl.maximum(tl.max(claim_MN, 1), tl.max(best_MC, 1))
            next_MC = tl.where(choice == i, top_M[:, None], next_MC)
            claim_MN = tl.where(claim_MN == top_M[:, None], NOTHING, claim_MN)
            best_MC = tl.where(best_MC == top_M[:, None], NOTHING, best_MC)
        best_MC = next_MC
    rest = best_MC % N
    place = N - 1 - tl.where(rest < 0, rest + N, rest)
    place = tl.where(best_MC == NOTHING, -1, place)
    tl.store(ids + row[:, None] * TOPK + choice, place, mask=is_row[:, None] & (choice < TOPK))


# -- attention ---------------------------------------------------------------------------------------------------


@triton.jit
def _query(visible, first, own, at):
    """Of a query: how many keys it sees, the first of them, and which of the own ones [lo, hi) (none without `own`)."""
    seen = tl.load(visible + at)
    start, lo, hi = seen * 0, seen * 0, seen * 0
    if first is not None:
        start = tl.load(first + at)
    if own is not None:
        lo, hi = tl.maximum(tl.load(own + 2 * at), 0), tl.load(own + 2 * at + 1)
    return seen, start, lo, hi


@triton.jit
def _choices(ids, table, TOPK: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """A query's choices [CHOICES], how many there are up to the last that is used, and the pages they begin in.

    They are kept in registers: addresses that hang on one load alone are fetched ahead.
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
    """Tile i of the walk: whether it is of a block, its first key there or among the own ones, which are seen, and the
    page that its block begins in."""
    visible, first, own_lo, own_hi = query
    chosen, used, pages = choices
    is_this = tl.arange(0, CHOICES) == i // STEPS
    block = tl.max(tl.where(is_this, chosen, -1), 0)
    page = tl.max(tl.where(is_this, pages, 0), 0)
    in_block = i < used * STEPS
    within = (i % STEPS) * COLUMNS
    place = block * BLOCK + within
    own = own_lo + (i - used * STEPS) * COLUMNS
    of_block = tl.minimum(BLOCK - within, tl.minimum(visible, keys[0] - first) - place)
    count = tl.where(in_block, tl.where(block < 0, 0, of_block), tl.minimum(own_hi, keys[1]) - own)
    return in_block, tl.where(in_block, first + place, own), tl.arange(0, COLUMNS) < count, page


@triton.jit
def _load_step(
    pointers, strides, in_block, place, sees, IS_RUN: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr
):
    """The keys (or values) of a tile of the walk; pointers and strides: those of the blocks and of the own keys."""
    return _load_run(
        tl.where(in_block, pointers[0], pointers[1]), tl.where(in_block, strides[0][1], strides[1][1]), place, sees,
        IS_RUN, COLUMNS, D,
    )  # fmt: skip


@triton.jit
def block_sparse_forward(
    q, q_strides, k, k_strides, v, v_strides, ids, visible, first, own, table, out, lse, B, T, keys, pages, scale,
    K: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, CHOICES: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Output [SPLITS, B, T, h, D] and log-sum-exp [SPLITS, B, T, h] of each split's part of a query's walk.

    k, v, their strides and `keys`, how many there are: pairs of the blocks' and the own. ids: [B, T, H, TOPK];
    visible, first: [B, T]; own: [B, T, 2]; table: [B, pages].
    """
    STEPS: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    IS_RUN: tl.constexpr = PAGE == 0 or (first is None and PAGE % BLOCK == 0 and BLOCK % COLUMNS == 0)
    t, split = tl.program_id(0).to(tl.int64), tl.program_id(2)
    part, b = tl.program_id(1) // TILES % PARTS, (tl.program_id(1) // (TILES * PARTS)).to(tl.int64)
    g = tl.program_id(1) % TILES * ROWS + tl.arange(0, ROWS)
    is_row, head = g < GROUP, part * GROUP + g
    query = _query(visible, first, own, b * T + t)
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
    for i in range(split * tiles // SPLITS, (split + 1) * tiles // SPLITS):
        in_block, start, sees, page = _step(i, choices, query, keys, CHOICES, BLOCK, STEPS, COLUMNS)
        place = _place(table, page, in_block, start, sees, PAGE, IS_RUN, COLUMNS)
        k_ND = _load_step(k, k_strides, in_block, place, sees, IS_RUN, COLUMNS, D)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * scale
        s_MN = tl.where(sees[None, :], s_MN, -INF)
        new_peak_M = tl.maximum(peak_M, tl.max(s_MN, 1))
        shift_M = tl.where(new_peak_M == -INF, 0.0, new_peak_M)  # nothing was seen yet
        p_MN = tl.exp2(s_MN - shift_M[:, None])
        shrink_M = tl.exp2(peak_M - shift_M)
        sum_M = sum_M * shrink_M + tl.sum(p_MN, 1)
        v_ND = _load_step(v, v_strides, in_block, place, sees, IS_RUN, COLUMNS, D)
        acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD * shrink_M[:, None], input_precision=PRECISION)
        peak_M = new_peak_M

    is_empty = sum_M == 0.0
    sum_M = tl.where(is_empty, 1.0, sum_M)
    at = ((split * B + b) * T + t) * (PARTS * GROUP) + head
    tl.store(lse + at, tl.where(is_empty, -INF, (peak_M + tl.log2(sum_M)) * LN2), mask=is_row)
    out_MD = (acc_MD / sum_M[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * D + column, out_MD, mask=is_row[:, None])


@triton.jit
def block_sparse_forward_keys(
    q, q_strides, k, k_strides, v, v_strides, starts, entries, intervals, visible, first, out, lse,
    begin, queries, keys, scale,
    K: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Output [TOPK, queries, h, D] and log-sum-exp [TOPK, queries, h], in fp32, of every choice of the queries from
    `begin` on of one row, for `span_attention_combine`. Choices that are none keep the log-sum-exp that is there.

    q, k, v, visible, first: of that row. starts, entries [H, queries * TOPK]: as in block_sparse_backward_keys;
    intervals [H, tiles, 2]: the choices whose block begins in a tile of BLOCK keys. A program has those of one tile,
    or a part of them, and loads the keys of a block once; in packed rows several blocks may begin in a tile.
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
            place = scanned + tl.arange(0, SCAN)
            run += tl.sum((tl.load(starts + place, mask=place < hi, other=-1) == start).to(tl.int32), 0)
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
            at = (slot * queries + t) * (PARTS * GROUP) + head
            tl.store(lse + at, tl.where(is_empty, -INF, (peak_M + tl.log2(sum_M)) * LN2), mask=is_row)
            tl.store(out + at[:, None] * D + column, out_MD, mask=is_row[:, None])
        lo = run


# -- backward ----------------------------------------------------------------------------------------------------


@triton.jit
def block_sparse_backward_queries(
    q, q_strides, k, k_strides, v, v_strides, ids, visible, first, own, lse, delta, grad_out, grad_q, T, keys, scale,
    K: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, CHOICES: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """grad_q [B, T, h, D]: the forward's walk. grad_out is dense."""
    STEPS: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    TILES: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    t = tl.program_id(0).to(tl.int64)
    part, b = tl.program_id(1) // TILES % PARTS, (tl.program_id(1) // (TILES * PARTS)).to(tl.int64)
    g = tl.program_id(1) % TILES * ROWS + tl.arange(0, ROWS)
    is_row, head = g < GROUP, part * GROUP + g
    query = _query(visible, first, own, b * T + t)
    ids += ((b * T + t) * H + part * H // PARTS) * TOPK
    choices = _choices(ids, None, TOPK, CHOICES, BLOCK, 0)
    tiles = choices[1] * STEPS + tl.cdiv(tl.maximum(query[3] - query[2], 0), COLUMNS)
    column = tl.arange(0, D)[None, :]
    q_MD = tl.load(
        q + b * q_strides[0] + t * q_strides[1] + head[:, None] * q_strides[2] + column, mask=is_row[:, None], other=0.0
    )
    at = (b * T + t) * (PARTS * GROUP) + head
    grad_MD = tl.load(grad_out + at[:, None] * D + column, mask=is_row[:, None], other=0.0)
    lse_M, delta_M = _load_row_numbers(lse, delta, at, is_row)
    kh = part * K // PARTS
    k = _head(k[0], k_strides[0], b, kh), _head(k[1], k_strides[1], b, kh)
    v = _head(v[0], v_strides[0], b, kh), _head(v[1], v_strides[1], b, kh)

    acc_MD = tl.zeros([ROWS, D], tl.float32)
    for i in range(tiles):
        in_block, start, sees, _ = _step(i, choices, query, keys, CHOICES, BLOCK, STEPS, COLUMNS)
        k_ND = _load_step(k, k_strides, in_block, start, sees, True, COLUMNS, D)
        v_ND = _load_step(v, v_strides, in_block, start, sees, True, COLUMNS, D)
        s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION) * (scale * LOG2E)
        grad_p_MN = tl.dot(grad_MD, tl.trans(v_ND), input_precision=PRECISION)
        p_MN = tl.where(sees[None, :], tl.exp2(s_MN - lse_M[:, None]), 0.0)
        grad_s_MN = (p_MN * (grad_p_MN - delta_M[:, None])).to(k_ND.dtype)
        acc_MD = tl.dot(grad_s_MN, k_ND, acc_MD, input_precision=PRECISION)
    acc_MD = (acc_MD * scale).to(grad_q.dtype.element_ty)
    tl.store(grad_q + at[:, None] * D + column, acc_MD, mask=is_row[:, None])


@triton.jit
def block_sparse_backward_keys(
    q, q_strides, k, k_strides, v, v_strides, starts, entries, intervals, visible, first, lse, delta, grad_out,
    grad_k, grad_v, T, keys, scale,
    K: tl.constexpr, H: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, PRECISION: tl.constexpr, AWAITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """grad_k and grad_v [B, keys, K, D], in the order of the entries; a program has a tile of the keys.

    starts, entries: [B, H, T * TOPK], the choices in the order of the first key of their block: that key, and where the
    choice stood among the queries' (query and place). intervals: [B, H, tiles, 2], which of them a tile of keys meets.
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
            at = (b * T + t) * (PARTS * GROUP) + head
            grad_MD = tl.load(grad_out + at[:, None] * D + column, mask=is_row[:, None], other=0.0)
            lse_M, delta_M = _load_row_numbers(lse, delta, at, is_row)
            s_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION) * (scale * LOG2E)
            grad_p_NM = tl.dot(v_ND, tl.trans(grad_MD), input_precision=PRECISION)
            sees = (key[:, None] >= start[None, :]) & (key[:, None] < end[None, :])
            p_NM = tl.where(sees, tl.exp2(s_NM - lse_M[None, :]), 0.0)
            # a choice, not a product with 0: keys that nobody sees may hold anything
            grad_s_NM = tl.where(sees, p_NM * (grad_p_NM - delta_M[None, :]), 0.0)
            acc_v_ND = tl.dot(p_NM.to(grad_MD.dtype), grad_MD, acc_v_ND, input_precision=PRECISION)
            acc_v_ND = _awaited(acc_v_ND, AWAITS)
            acc_k_ND = tl.dot(grad_s_NM.to(q_MD.dtype), q_MD, acc_k_ND, input_precision=PRECISION)
            acc_k_ND = _awaited(acc_k_ND, AWAITS)
    out_at = ((b * keys + key) * K + kh)[:, None] * D + column
    tl.store(grad_k + out_at, (acc_k_ND * scale).to(grad_k.dtype.element_ty), mask=is_key[:, None])
    tl.store(grad_v + out_at, acc_v_ND.to(grad_v.dtype.element_ty), mask=is_key[:, None])
