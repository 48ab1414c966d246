"""The Triton kernels of expert_mlp over slots: a stable counting sort by expert, and the sum over a token's slots.

`kernels.py` explains slots, rows and the plan.
"""

from __future__ import annotations

import triton
import triton.language as tl

SCAN = tl.constexpr(1024)  # slots that are counted at a time


@triton.jit
def _chosen(index, slot, S, E):
    """Return the expert of each slot, -1 if it has none."""
    expert = tl.load(index + slot, mask=slot < S, other=-1).to(tl.int32)
    return tl.where(expert < E, expert, -1)


@triton.jit(do_not_specialize=["S", "E", "chunk"])
def expert_mlp_count_slots(index, counts, S, E, chunk, PART: tl.constexpr, EXPERTS: tl.constexpr):
    """Count each expert's slots among the program's `chunk` slots: counts[program, expert].

    EXPERTS: E rounded up to a power of two.
    """
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    count = tl.zeros([EXPERTS], tl.int32)
    for first in range(0, chunk, PART):
        chosen = _chosen(index, program * chunk + first + tl.arange(0, PART), S, E)
        count += tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + program * EXPERTS + expert, count)


@triton.jit(do_not_specialize=["S", "E", "tiles", "programs", "rows", "chunk"])
def expert_mlp_sort_slots(
    index, counts, plan, S, E, tiles, programs, rows, chunk, PART: tl.constexpr, EXPERTS: tl.constexpr
):
    """Fill the plan with tiles of `rows` rows. counts: of every program; None: each program counts all slots itself."""
    program = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    count = tl.zeros([EXPERTS], tl.int32)
    before = tl.zeros([EXPERTS], tl.int32)
    if counts is None:
        for first in range(0, S, SCAN):
            slot = first + tl.arange(0, SCAN)
            chosen = _chosen(index, slot, S, E)
            some = tl.maximum(chosen, 0)
            count += tl.histogram(some, EXPERTS, mask=chosen >= 0)
            before += tl.histogram(some, EXPERTS, mask=(chosen >= 0) & (slot < program * chunk))
    else:
        for first in range(0, programs, 32):
            other = first + tl.arange(0, 32)
            is_there = (other < programs)[:, None]
            some = tl.load(counts + other[:, None] * EXPERTS + expert[None, :], mask=is_there, other=0)
            count += tl.sum(some, 0)
            before += tl.sum(tl.where((other < program)[:, None], some, 0), 0)
    start = tl.cumsum(count, 0) - count
    if program == 0:
        tl.store(plan.starts + expert, start, mask=expert < E)
        tl.store(plan.starts + E, tl.sum(count, 0))

    free = start + before  # the next row of each expert
    for first in range(0, chunk, PART):
        slot = program * chunk + first + tl.arange(0, PART)
        chosen = _chosen(index, slot, S, E)
        is_chosen = (chosen[:, None] == expert[None, :]).to(tl.int32)
        row = tl.sum(is_chosen * (free[None, :] + tl.cumsum(is_chosen, 0) - 1), 1)
        tl.store(plan.order + row, slot, mask=chosen >= 0)
        free += tl.sum(is_chosen, 0)

    needed = tl.cdiv(count, rows)
    last = tl.cumsum(needed, 0)
    for first in range(program * PART, tiles, programs * PART):
        tile = first + tl.arange(0, PART)
        owner = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32), 1)
        is_owner = expert[None, :] == owner[:, None]
        row = tl.sum(tl.where(is_owner, start[None, :] + (tile[:, None] - (last - needed)[None, :]) * rows, 0), 1)
        tl.store(plan.tile_expert + tile, tl.minimum(owner, E), mask=tile < tiles)
        tl.store(plan.tile_row + tile, row, mask=tile < tiles)


@triton.jit(do_not_specialize=["tokens", "E"])
def expert_mlp_sum_slots(
    y, index, out, tokens, E, D: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute out[token], the sum of y over the token's slots that have an expert, in their order."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = (token < tokens)[:, None] & (column < D)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(TOP_K):
        slot = token.to(tl.int64) * TOP_K + i
        has_expert = _chosen(index, slot, tokens * TOP_K, E) >= 0
        offset = slot[:, None] * D + column[None, :]
        total += tl.load(y + offset, mask=is_there & has_expert[:, None], other=0.0).to(tl.float32)
    offset = token.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(out + offset, total.to(out.dtype.element_ty), mask=is_there)
