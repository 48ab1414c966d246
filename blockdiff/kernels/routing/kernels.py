"""The Triton kernel of routed_tokens, without gradient."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def routed_tokens(
    x, scale, root, weight, expert_scale, index, of_expert, N,
    E: tl.constexpr, D: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """index [N, TOP_K]: the experts of the largest scores, the largest first; of_expert: their softmax times
    expert_scale.

    Scores: x times scale times root, rounded to x's dtype after each factor, times weight [E, D]. COLUMNS and CHOICES:
    E and TOP_K rounded up to powers of two. Of equal scores the expert with the lower number comes first.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert, inner, choice = tl.arange(0, COLUMNS), tl.arange(0, INNER), tl.arange(0, CHOICES)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, D, INNER):
        d = start + inner
        is_there = (row < N)[:, None] & (d < D)[None, :]
        a = tl.load(x + row[:, None] * D + d[None, :], mask=is_there, other=0.0)
        factor = tl.load(scale + d, mask=d < D, other=0.0)
        a = (a.to(tl.float32) * factor.to(tl.float32)[None, :]).to(a.dtype)
        a = (a.to(tl.float32) * root).to(a.dtype)
        at = expert[None, :] * D + d[:, None]
        b = tl.load(weight + at, mask=(expert < E)[None, :] & (d < D)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    left = tl.where((expert < E)[None, :], total.to(x.dtype.element_ty).to(tl.float32), float("-inf"))
    best = tl.full([ROWS, CHOICES], 0, tl.int32)
    score = tl.full([ROWS, CHOICES], float("-inf"), tl.float32)
    for i in tl.static_range(TOP_K):
        peak, found = tl.max(left, 1, return_indices=True)
        left = tl.where(expert[None, :] == found[:, None], float("-inf"), left)
        is_choice = (choice == i)[None, :]
        best = tl.where(is_choice, found[:, None], best)
        score = tl.where(is_choice, peak[:, None], score)
    best = tl.minimum(best, E - 1)  # where nothing is left but -inf
    factor = tl.load(expert_scale + best).to(tl.float32)
    share = tl.exp(score - tl.max(score, 1)[:, None])
    share = share / tl.sum(share, 1)[:, None] * factor
    at, is_there = row[:, None] * TOP_K + choice[None, :], (row < N)[:, None] & (choice < TOP_K)[None, :]
    tl.store(index + at, best.to(tl.int64), mask=is_there)
    tl.store(of_expert + at, share, mask=is_there)
