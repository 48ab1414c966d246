"""The Triton kernels of routed_tokens: partial sums of the experts' scores, the choice, and its gradient."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["N"])
def router_scores(
    x, scale, root, weight, scores, N,
    E: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute scores [PARTS, N, COLUMNS], fp32, each summed over one of PARTS parts of D.

    A score is x times scale times root, rounded to x's dtype after each factor, times weight [E, D]. COLUMNS: E rounded
    up to a power of two. D is split because the tokens of a canvas alone would fill few programs.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    part, expert, inner = tl.program_id(1), tl.arange(0, COLUMNS), tl.arange(0, INNER)
    LENGTH: tl.constexpr = tl.cdiv(tl.cdiv(D, PARTS), INNER) * INNER
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, LENGTH, INNER):
        d = part * LENGTH + start + inner
        is_there = (row < N)[:, None] & (d < D)[None, :]
        a = tl.load(x + row[:, None] * D + d[None, :], mask=is_there, other=0.0)
        factor = tl.load(scale + d, mask=d < D, other=0.0)
        a = (a.to(tl.float32) * factor.to(tl.float32)[None, :]).to(a.dtype)
        a = (a.to(tl.float32) * root).to(a.dtype)
        offset = expert[None, :] * D + d[:, None]
        b = tl.load(weight + offset, mask=(expert < E)[None, :] & (d < D)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    pointers = scores + (part.to(tl.int64) * N + row[:, None]) * COLUMNS + expert[None, :]
    tl.store(pointers, total, mask=(row < N)[:, None])


@triton.jit(do_not_specialize=["N"])
def routed_tokens(
    x, scores, expert_scale, index, of_expert, shares, N,
    E: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Choose the TOP_K experts of each token.

    index [N, TOP_K]: the experts of the largest scores, largest first, ties to the lower expert. of_expert: their
    softmax times expert_scale. shares: their softmax, needed for a backward (else None). The parts of scores [PARTS, N,
    COLUMNS] are added in order and rounded to x's dtype. CHOICES: TOP_K rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert, choice = tl.arange(0, COLUMNS), tl.arange(0, CHOICES)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in tl.static_range(PARTS):
        pointers = scores + (row + part * N)[:, None] * COLUMNS + expert[None, :]
        total += tl.load(pointers, mask=(row < N)[:, None], other=0.0)
    remaining = tl.where((expert < E)[None, :], total.to(x.dtype.element_ty).to(tl.float32), float("-inf"))
    best = tl.full([ROWS, CHOICES], 0, tl.int32)
    score = tl.full([ROWS, CHOICES], float("-inf"), tl.float32)
    for i in tl.static_range(TOP_K):
        peak, top = tl.max(remaining, 1, return_indices=True)
        remaining = tl.where(expert[None, :] == top[:, None], float("-inf"), remaining)
        is_choice = (choice == i)[None, :]
        best = tl.where(is_choice, top[:, None], best)
        score = tl.where(is_choice, peak[:, None], score)
    best = tl.minimum(best, E - 1)  # if only -inf remains
    factor = tl.load(expert_scale + best).to(tl.float32)
    share = tl.exp(score - tl.max(score, 1)[:, None])
    share = share / tl.sum(share, 1)[:, None]
    offset, is_there = row[:, None] * TOP_K + choice[None, :], (row < N)[:, None] & (choice < TOP_K)[None, :]
    tl.store(index + offset, best.to(tl.int64), mask=is_there)
    tl.store(of_expert + offset, share * factor, mask=is_there)
    if shares is not None:
        tl.store(shares + offset, share, mask=is_there)


@triton.jit(do_not_specialize=["N"])
def routed_tokens_backward(
    index, shares, expert_scale, grad, out, N,
    E: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute out [N, E], the gradient of the scores, from that of the weights of each token's TOP_K experts."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert, is_row = tl.arange(0, COLUMNS), row < N
    mean = tl.zeros([ROWS], tl.float32)
    for i in tl.static_range(TOP_K):
        offset = row * TOP_K + i
        scale = tl.load(expert_scale + tl.load(index + offset, mask=is_row, other=0)).to(tl.float32)
        mean += (
            tl.load(shares + offset, mask=is_row, other=0.0) * tl.load(grad + offset, mask=is_row, other=0.0) * scale
        )
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(TOP_K):
        offset = row * TOP_K + i
        chosen = tl.load(index + offset, mask=is_row, other=0)
        scale = tl.load(expert_scale + chosen).to(tl.float32)
        share, of_weight = (
            tl.load(shares + offset, mask=is_row, other=0.0),
            tl.load(grad + offset, mask=is_row, other=0.0),
        )
        of_score = share * (of_weight * scale - mean)
        total = tl.where(expert[None, :] == chosen[:, None], of_score[:, None], total)
    is_there = is_row[:, None] & (expert < E)[None, :]
    tl.store(out + row[:, None] * E + expert[None, :], total.to(out.dtype.element_ty), mask=is_there)
