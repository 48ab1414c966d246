"""The Triton kernels of the norms and of norm_rope: one read and one write of a tensor each way, fp32 inside.

A program takes ROWS rows of D elements at a time. The backward kernels loop over such tiles, sum the gradients of
the weights over their own rows and leave a partial sum each.
"""
# mypy: disallow-untyped-defs=False, check-untyped-defs=False

from __future__ import annotations

import triton
import triton.language as tl

# Every tensor is [N rows, D] and dense; a norm's x may be any of them, rstd = (mean(x^2) + eps)^-0.5.


@triton.jit
def _tile(block, N, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Offsets of a tile's elements, and which of them are there."""
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    return row.to(tl.int64)[:, None] * D + column[None, :], (row < N)[:, None] & (column < D)[None, :]


@triton.jit
def _weight(pointer, D: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    return tl.load(pointer + column, mask=column < D, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store_partial(pointer, slot, values, D: tl.constexpr, BLOCK: tl.constexpr):
    """A program's own sum over rows of a weight's gradient: row `slot` of a [slots, D] tensor."""
    column = tl.arange(0, BLOCK)
    tl.store(pointer + slot * D + column, values, mask=column < D)


@triton.jit
def norms(
    x, w0, w1, w2, y0, y1, y2, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
    HAS0: tl.constexpr, HAS1: tl.constexpr, HAS2: tl.constexpr,
):  # fmt: skip
    at, is_there = _tile(tl.program_id(0), N, D, BLOCK, ROWS)
    wide = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
    tl.store(y0 + at, normed * _weight(w0, D, BLOCK) if HAS0 else normed, mask=is_there)
    if COUNT > 1:
        tl.store(y1 + at, normed * _weight(w1, D, BLOCK) if HAS1 else normed, mask=is_there)
    if COUNT > 2:
        tl.store(y2 + at, normed * _weight(w2, D, BLOCK) if HAS2 else normed, mask=is_there)


@triton.jit
def norms_backward(
    x, w0, w1, w2, g0, g1, g2, grad_x, dw0, dw1, dw2, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr,
    HAS0: tl.constexpr, HAS1: tl.constexpr, HAS2: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sum0 = tl.zeros([BLOCK], tl.float32)
    sum1 = tl.zeros([BLOCK], tl.float32)
    sum2 = tl.zeros([BLOCK], tl.float32)
    for block in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        at, is_there = _tile(block, N, D, BLOCK, ROWS)
        wide = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        normed = wide * rstd
        grad = tl.load(g0 + at, mask=is_there, other=0.0).to(tl.float32)
        grad_normed = grad
        if HAS0:
            sum0 += tl.sum(grad * normed, 0)
            grad_normed = grad * _weight(w0, D, BLOCK)
        if COUNT > 1:
            grad = tl.load(g1 + at, mask=is_there, other=0.0).to(tl.float32)
            if HAS1:
                sum1 += tl.sum(grad * normed, 0)
                grad_normed += grad * _weight(w1, D, BLOCK)
            else:
                grad_normed += grad
        if COUNT > 2:
            grad = tl.load(g2 + at, mask=is_there, other=0.0).to(tl.float32)
            if HAS2:
                sum2 += tl.sum(grad * normed, 0)
                grad_normed += grad * _weight(w2, D, BLOCK)
            else:
                grad_normed += grad
        along = tl.sum(grad_normed * normed, 1)[:, None] / D
        tl.store(grad_x + at, (grad_normed - normed * along) * rstd, mask=is_there)
    if HAS0:
        _store_partial(dw0, program, sum0, D, BLOCK)
    if HAS1:
        _store_partial(dw1, program, sum1, D, BLOCK)
    if HAS2:
        _store_partial(dw2, program, sum2, D, BLOCK)


@triton.jit
def add_norm(
    x, y, w, scalar, out, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_SCALAR: tl.constexpr,
):  # fmt: skip
    at, is_there = _tile(tl.program_id(0), N, D, BLOCK, ROWS)
    wide = tl.load(y + at, mask=is_there, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
    total = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32) + wide * rstd * _weight(w, D, BLOCK)
    if HAS_SCALAR:
        total *= tl.load(scalar).to(tl.float32)
    tl.store(out + at, total, mask=is_there)


@triton.jit
def add_norm_backward(
    y, w, scalar, grad_out, grad_x, grad_y, dw, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_SCALAR: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    weight = _weight(w, D, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for block in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        at, is_there = _tile(block, N, D, BLOCK, ROWS)
        wide = tl.load(y + at, mask=is_there, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        normed = wide * rstd
        grad = tl.load(grad_out + at, mask=is_there, other=0.0).to(tl.float32)
        if HAS_SCALAR:
            grad *= tl.load(scalar).to(tl.float32)
        tl.store(grad_x + at, grad, mask=is_there)
        sums += tl.sum(grad * normed, 0)
        grad *= weight
        along = tl.sum(grad * normed, 1)[:, None] / D
        tl.store(grad_y + at, (grad - normed * along) * rstd, mask=is_there)
    _store_partial(dw, program, sums, D, BLOCK)


@triton.jit
def _halves(block, N, HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Offsets of the first halves of a tile's heads, of their tokens' first half of cos and sin, and what is there."""
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    is_there = (row < N)[:, None] & (column < D // 2)[None, :]
    at = row.to(tl.int64)[:, None] * D + column[None, :]
    token_at = (row // HEADS).to(tl.int64)[:, None] * D + column[None, :]
    return at, token_at, is_there


@triton.jit
def norm_rope(
    x, w, cos, sin, out, N, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    at, token_at, is_there = _halves(tl.program_id(0), N, HEADS, D, BLOCK, ROWS)
    first = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    second = tl.load(x + at + HALF, mask=is_there, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(first * first + second * second, 1) / D + eps)[:, None]
    first *= rstd * _weight(w, HALF, BLOCK)
    second *= rstd * _weight(w + HALF, HALF, BLOCK)
    cos1 = tl.load(cos + token_at, mask=is_there, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + token_at + HALF, mask=is_there, other=0.0).to(tl.float32)
    sin1 = tl.load(sin + token_at, mask=is_there, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + token_at + HALF, mask=is_there, other=0.0).to(tl.float32)
    tl.store(out + at, first * cos1 + second * sin1, mask=is_there)
    tl.store(out + at + HALF, second * cos2 + first * sin2, mask=is_there)


@triton.jit
def norm_rope_backward(
    x, w, cos, sin, grad_out, grad_x, dw, N, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = D // 2
    program = tl.program_id(0)
    weight1, weight2 = _weight(w, HALF, BLOCK), _weight(w + HALF, HALF, BLOCK)
    sum1 = tl.zeros([BLOCK], tl.float32)
    sum2 = tl.zeros([BLOCK], tl.float32)
    for block in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        at, token_at, is_there = _halves(block, N, HEADS, D, BLOCK, ROWS)
        first = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
        second = tl.load(x + at + HALF, mask=is_there, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(first * first + second * second, 1) / D + eps)[:, None]
        first *= rstd
        second *= rstd
        turned1 = tl.load(grad_out + at, mask=is_there, other=0.0).to(tl.float32)
        turned2 = tl.load(grad_out + at + HALF, mask=is_there, other=0.0).to(tl.float32)
        cos1 = tl.load(cos + token_at, mask=is_there, other=0.0).to(tl.float32)
        cos2 = tl.load(cos + token_at + HALF, mask=is_there, other=0.0).to(tl.float32)
        sin1 = tl.load(sin + token_at, mask=is_there, other=0.0).to(tl.float32)
        sin2 = tl.load(sin + token_at + HALF, mask=is_there, other=0.0).to(tl.float32)
        grad1 = turned1 * cos1 + turned2 * sin2
        grad2 = turned2 * cos2 + turned1 * sin1
        sum1 += tl.sum(grad1 * first, 0)
        sum2 += tl.sum(grad2 * second, 0)
        grad1 *= weight1
        grad2 *= weight2
        along = tl.sum(grad1 * first + grad2 * second, 1)[:, None] / D
        tl.store(grad_x + at, (grad1 - first * along) * rstd, mask=is_there)
        tl.store(grad_x + at + HALF, (grad2 - second * along) * rstd, mask=is_there)
    column = tl.arange(0, BLOCK)
    tl.store(dw + program * D + column, sum1, mask=column < HALF)
    tl.store(dw + program * D + HALF + column, sum2, mask=column < HALF)
