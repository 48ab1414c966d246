"""The Triton kernels of block selection: the scores of blocks, and the choice of the highest."""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.block_sparse.kernels import _load_run, _slots
from blockdiff.kernels.span_attention.kernels import INF, _head, _load_rows, _rows

NOTHING = tl.constexpr(-(1 << 63))  # the rank key of a block that does not exist
FORCED = tl.constexpr(1 << 31)  # above the order of any score
FAR = tl.constexpr(2**31 - 1)  # above the first key of every document


@triton.jit(do_not_specialize=["T", "S", "N", "pages"])
def block_sparse_scores(
    q, q_strides, k, k_strides, visible, first, table, out, T, S, N, pages, scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    USES_SUM: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the score [B, T, H, N] of every block with a visible key: the maximum or log-sum-exp of its visible keys.

    Rows: the index heads of a query are interleaved and share the keys [B, S, 1, D]. Queries of a tile whose documents
    begin at different keys have different blocks; they are handled one document after the other. Blocks are split over
    programs.
    """
    STEPS: tl.constexpr = (BLOCK + COLUMNS - 1) // COLUMNS
    IS_RUN: tl.constexpr = PAGE == 0 or (first is None and PAGE % COLUMNS == 0 and BLOCK % COLUMNS == 0)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # longest first: with a causal mask, the last tiles
    b, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
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
        for i in range(split * blocks // splits * STEPS, (split + 1) * blocks // splits * STEPS):
            block, step = i // STEPS, i % STEPS
            key = block * BLOCK + step * COLUMNS
            column = key + tl.arange(0, COLUMNS)
            end = tl.minimum((block + 1) * BLOCK, hull)
            is_near = column < end
            page = block
            if PAGE != 0:
                page = tl.load(table + (start + key) // PAGE)
            offset = _slots(table, page, block >= 0, start + key, is_near, PAGE, IS_RUN, COLUMNS)
            k_ND = _load_run(k, k_strides[1], offset, is_near, IS_RUN, COLUMNS, D)
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


@triton.jit(do_not_specialize=["R"])
def block_sparse_choose(
    scores, visible, ids, R, N, LOCAL, INIT, BLOCK: tl.constexpr, H: tl.constexpr, TOPK: tl.constexpr,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Choose the TOPK blocks of highest rank of every row [R, N], int64 [R, TOPK], -1 if there are fewer.

    A block's claim is one integer that orders by forced kind, then score, then index, so no two are equal. The best so
    far are merged with COLUMNS more at a time.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < R
    choice = tl.arange(0, CHOICES)[None, :]
    blocks_M = tl.minimum(tl.cdiv(tl.load(visible + row // H, mask=is_row, other=0), BLOCK), N)
    best_MC = tl.full([ROWS, CHOICES], NOTHING, tl.int64)
    for start in range(0, tl.max(blocks_M, 0), COLUMNS):
        block = start + tl.arange(0, COLUMNS)[None, :]
        is_there = block < blocks_M[:, None]
        score_MN = tl.load(scores + row[:, None] * N + block, mask=is_there, other=0.0)
        bits = score_MN.to(tl.int32, bitcast=True).to(tl.int64)
        ordered = tl.where(bits < 0, -(bits + FORCED), bits)  # ordered like the scores; +0 and -0 are equal
        ordered = tl.where(block >= blocks_M[:, None] - LOCAL, FORCED + 1, ordered)
        ordered = tl.where(block < INIT, FORCED + 2, ordered)
        claim_MN = tl.where(is_there, ordered * N + (N - 1 - block), NOTHING)
        next_MC = tl.full([ROWS, CHOICES], NOTHING, tl.int64)
        for i in range(TOPK):
            top_M = tl.maximum(tl.max(claim_MN, 1), tl.max(best_MC, 1))
            next_MC = tl.where(choice == i, top_M[:, None], next_MC)
            claim_MN = tl.where(claim_MN == top_M[:, None], NOTHING, claim_MN)
            best_MC = tl.where(best_MC == top_M[:, None], NOTHING, best_MC)
        best_MC = next_MC
    rest = best_MC % N
    block = N - 1 - tl.where(rest < 0, rest + N, rest)
    block = tl.where(best_MC == NOTHING, -1, block)
    tl.store(ids + row[:, None] * TOPK + choice, block, mask=is_row[:, None] & (choice < TOPK))
