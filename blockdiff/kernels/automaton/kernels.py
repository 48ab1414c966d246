"""The Triton kernels of a constraint's passes over canvases: a program handles one canvas, position by position.

Results of a position are written to memory, and a barrier separates them from the next position's reads. The order of
sums is fixed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["L", "B", "S", "K"])
def automaton_look_ahead(successor, ways, ahead, choice, L, B, S, K, STATES: tl.constexpr, WAYS: tl.constexpr):
    """Fill ahead [2, L + 1, B, S + 1], backward from its last position, and choice [L, B, S].

    The sums in ways [2, L, B, S, K] are changed in place (see torch.py).
    """
    b = tl.program_id(0).to(tl.int64)
    impossible: tl.constexpr = float("-inf")
    for step in range(L):
        position = L - 1 - step
        here, following = ahead + (position * B + b) * (S + 1), ahead + ((position + 1) * B + b) * (S + 1)
        of_sums = ways + (position * B + b) * S * K
        of_best, best_following = of_sums + tl.cast(L, tl.int64) * B * S * K, following + (L + 1) * B * (S + 1)
        for first in range(0, S, STATES):
            state = first + tl.arange(0, STATES)
            peak = tl.full([STATES], impossible, tl.float64)
            total = tl.zeros([STATES], tl.float64)
            top = tl.full([STATES], impossible, tl.float64)
            chosen = tl.zeros([STATES], tl.int64)
            for start in range(0, K, WAYS):
                k = start + tl.arange(0, WAYS)
                is_there = (state < S)[:, None] & (k < K)[None, :]
                pair = state[:, None] * K + k[None, :]
                to = tl.load(successor + pair, mask=is_there, other=0)
                sums = tl.load(of_sums + pair, mask=is_there, other=impossible)
                sums += tl.load(following + to, mask=is_there, other=0.0)
                tl.store(of_sums + pair, sums, mask=is_there)
                new_peak = tl.maximum(peak, tl.max(sums, 1))
                shift = tl.where(new_peak == impossible, 0.0, new_peak)
                total = total * tl.exp(peak - shift) + tl.sum(tl.exp(sums - shift[:, None]), 1)
                peak = new_peak
                bests = tl.load(of_best + pair, mask=is_there, other=impossible)
                bests += tl.load(best_following + to, mask=is_there, other=0.0)
                best = tl.max(bests, 1)
                index = tl.min(tl.where(bests == best[:, None], k[None, :], K), 1).to(tl.int64)
                chosen = tl.where(best > top, index, chosen)
                top = tl.maximum(top, best)
            shift = tl.where(peak == impossible, 0.0, peak)
            tl.store(here + state, tl.log(total) + shift, mask=state < S)
            tl.store(here + (L + 1) * B * (S + 1) + state, top, mask=state < S)
            tl.store(choice + (position * B + b) * S + state, chosen, mask=state < S)
        tl.debug_barrier()  # threads read values that others wrote


@triton.jit(do_not_specialize=["L", "B", "S", "K"])
def automaton_reach(order, end, share, reached, L, B, S, K, STATES: tl.constexpr, WAYS: tl.constexpr):
    """Fill `reached` [L + 1, B, S + 1] forward from its first position, and multiply share [L, B, S, K] by it.

    order: pairs (state, successor) sorted by successor; end [S]: the end of each successor's pairs in `order`.
    """
    b = tl.program_id(0).to(tl.int64)
    for position in range(L):
        here, following = reached + (position * B + b) * (S + 1), reached + ((position + 1) * B + b) * (S + 1)
        shares = share + (position * B + b) * S * K
        for first in range(0, S, STATES):
            state = first + tl.arange(0, STATES)
            probability = tl.load(here + state, mask=state < S, other=0.0)
            for start in range(0, K, WAYS):
                k = start + tl.arange(0, WAYS)
                is_there = (state < S)[:, None] & (k < K)[None, :]
                pair = state[:, None] * K + k[None, :]
                product = tl.load(shares + pair, mask=is_there, other=0.0) * probability[:, None]
                tl.store(shares + pair, product, mask=is_there)
        tl.debug_barrier()  # threads read values that others wrote
        for first in range(0, S, STATES):
            state = first + tl.arange(0, STATES)
            lo = tl.load(end + state - 1, mask=(state > 0) & (state < S), other=0)
            hi = tl.load(end + state, mask=state < S, other=0)
            total = tl.zeros([STATES], tl.float64)
            for start in range(0, tl.max(hi - lo, 0), WAYS):
                index = lo[:, None] + start + tl.arange(0, WAYS)[None, :]
                is_there = index < hi[:, None]
                pair = tl.load(order + index, mask=is_there, other=0)
                total += tl.sum(tl.load(shares + pair, mask=is_there, other=0.0), 1)
            tl.store(following + state, total, mask=state < S)
        tl.debug_barrier()
