"""The Triton kernels of a constraint's walks: a program has one canvas, and goes from place to place.

What a place leaves for the next one stands in memory, between barriers. Sums are added in one order, whatever runs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["L", "B", "S", "K"])
def automaton_look_ahead(successor, ways, ahead, choice, L, B, S, K, STATES: tl.constexpr, WAYS: tl.constexpr):
    """ahead [2, L + 1, B, S + 1] from its last place on, choice [L, B, S], and the sums of ways [2, L, B, S, K]."""
    b = tl.program_id(0).to(tl.int64)
    impossible: tl.constexpr = float("-inf")
    for step in range(L):
        at = L - 1 - step
        here, following = ahead + (at * B + b) * (S + 1), ahead + ((at + 1) * B + b) * (S + 1)
        of_sums = ways + (at * B + b) * S * K
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
            tl.store(choice + (at * B + b) * S + state, chosen, mask=state < S)
        tl.debug_barrier()  # each thread reads what others have written


@triton.jit(do_not_specialize=["L", "B", "S", "K"])
def automaton_reach(order, end, share, reached, L, B, S, K, STATES: tl.constexpr, WAYS: tl.constexpr):
    """share [L, B, S, K] times `reached` [L + 1, B, S + 1], which is filled from its first place on.

    order: the pairs of a state and a successor by their successor; end [S]: where those of each successor end there.
    """
    b = tl.program_id(0).to(tl.int64)
    for at in range(L):
        here, following = reached + (at * B + b) * (S + 1), reached + ((at + 1) * B + b) * (S + 1)
        shares = share + (at * B + b) * S * K
        for first in range(0, S, STATES):
            state = first + tl.arange(0, STATES)
            probability = tl.load(here + state, mask=state < S, other=0.0)
            for start in range(0, K, WAYS):
                k = start + tl.arange(0, WAYS)
                is_there = (state < S)[:, None] & (k < K)[None, :]
                pair = state[:, None] * K + k[None, :]
                product = tl.load(shares + pair, mask=is_there, other=0.0) * probability[:, None]
                tl.store(shares + pair, product, mask=is_there)
        tl.debug_barrier()  # each thread reads what others have written
        for first in range(0, S, STATES):
            state = first + tl.arange(0, STATES)
            lo = tl.load(end + state - 1, mask=(state > 0) & (state < S), other=0)
            hi = tl.load(end + state, mask=state < S, other=0)
            total = tl.zeros([STATES], tl.float64)
            for start in range(0, tl.max(hi - lo, 0), WAYS):
                place = lo[:, None] + start + tl.arange(0, WAYS)[None, :]
                is_there = place < hi[:, None]
                pair = tl.load(order + place, mask=is_there, other=0)
                total += tl.sum(tl.load(shares + pair, mask=is_there, other=0.0), 1)
            tl.store(following + state, total, mask=state < S)
        tl.debug_barrier()
