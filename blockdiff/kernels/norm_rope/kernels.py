"""The Triton kernels of the norms and of norm_rope: one read and one write of each tensor per direction, fp32 inside.

Every tensor is [N rows, D] and contiguous; rstd = (mean(x^2) + eps)^-0.5. A program handles ROWS rows at a time;
COLUMNS is D (in norm_rope D / 2) rounded up to a power of two. A program of a backward kernel loops over several tiles
and writes one partial sum of the weights' gradients over its rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(block, N, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the rows of a tile, the offsets of its elements, and a mask of those in range."""
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    return row, row.to(tl.int64)[:, None] * D + column[None, :], (row < N)[:, None] & (column < D)[None, :]


@triton.jit
def _load(pointer, offset, is_there):
    return tl.load(pointer + offset, mask=is_there, other=0.0).to(tl.float32)


@triton.jit
def _weight(pointer, size: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    return _load(pointer, column, column < size)[None, :]


@triton.jit
def _store_partial(pointer, program, values, D: tl.constexpr, size: tl.constexpr, COLUMNS: tl.constexpr):
    """Store a program's partial sum of a weight's gradient, its first `size` numbers, to its row of [programs, D]."""
    column = tl.arange(0, COLUMNS)
    tl.store(pointer + program * D + column, values, mask=column < size)


@triton.jit
def _rstd(squares, eps, D: tl.constexpr):
    return tl.rsqrt(tl.sum(squares, 1) / D + eps)[:, None]


@triton.jit
def _scalar_of(scalar, step, row, N):
    """Load the layer scalar of every row; step: stride between rows, 0 if all share one."""
    return tl.load(scalar + row * step, mask=row < N, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["N"])
def rms_norms_forward(x, weights, outs, N, eps, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute the norm of x with each weight (None: no weight)."""
    _, offset, is_there = _tile(tl.program_id(0), N, D, ROWS, COLUMNS)
    wide = _load(x, offset, is_there)
    normed = wide * _rstd(wide * wide, eps, D)
    for i in tl.static_range(len(outs)):
        if weights[i] is None:
            tl.store(outs[i] + offset, normed, mask=is_there)
        else:
            tl.store(outs[i] + offset, normed * _weight(weights[i], D, COLUMNS), mask=is_there)


@triton.jit(do_not_specialize=["N"])
def rms_norms_backward(
    x, weights, grads, grad_x, partials, N, eps, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute grad_x, and the partial sums of the gradients of the weights that train (partials: None for others)."""
    program = tl.program_id(0)
    sums = ()
    for _i in tl.static_range(len(grads)):
        sums += (tl.zeros([COLUMNS], tl.float32),)
    for block in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        _, offset, is_there = _tile(block, N, D, ROWS, COLUMNS)
        wide = _load(x, offset, is_there)
        rstd = _rstd(wide * wide, eps, D)
        normed = wide * rstd
        grad_normed = tl.zeros_like(wide)
        new_sums = ()
        for i in tl.static_range(len(grads)):
            grad = _load(grads[i], offset, is_there)
            if weights[i] is None:
                grad_normed += grad
            else:
                grad_normed += grad * _weight(weights[i], D, COLUMNS)
            if partials[i] is None:
                new_sums += (sums[i],)
            else:
                new_sums += (sums[i] + tl.sum(grad * normed, 0),)
        sums = new_sums
        along = tl.sum(grad_normed * normed, 1)[:, None] / D
        tl.store(grad_x + offset, (grad_normed - normed * along) * rstd, mask=is_there)
    for i in tl.static_range(len(grads)):
        if partials[i] is not None:
            _store_partial(partials[i], program, sums[i], D, D, COLUMNS)


@triton.jit(do_not_specialize=["N"])
def add_rms_norm_forward(
    x, y, w, scalar, step, out, N, eps, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute out = (x + norm of y with weight w) * scalar (None: 1); step: stride between rows' scalars, 0 or 1."""
    row, offset, is_there = _tile(tl.program_id(0), N, D, ROWS, COLUMNS)
    wide = _load(y, offset, is_there)
    total = _load(x, offset, is_there) + wide * _rstd(wide * wide, eps, D) * _weight(w, D, COLUMNS)
    if scalar is not None:
        total *= _scalar_of(scalar, step, row, N)
    tl.store(out + offset, total, mask=is_there)


@triton.jit(do_not_specialize=["N"])
def add_rms_norm_backward(
    y, w, scalar, step, grad_out, grad_x, grad_y, partial, N, eps,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x, grad_y, and the partial sums of w's gradient (None: w is frozen); scalars get no gradient."""
    program = tl.program_id(0)
    weight = _weight(w, D, COLUMNS)
    sums = tl.zeros([COLUMNS], tl.float32)
    for block in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        row, offset, is_there = _tile(block, N, D, ROWS, COLUMNS)
        wide = _load(y, offset, is_there)
        rstd = _rstd(wide * wide, eps, D)
        normed = wide * rstd
        grad = _load(grad_out, offset, is_there)
        if scalar is not None:
            grad *= _scalar_of(scalar, step, row, N)
        tl.store(grad_x + offset, grad, mask=is_there)
        if partial is not None:
            sums += tl.sum(grad * normed, 0)
        grad *= weight
        along = tl.sum(grad * normed, 1)[:, None] / D
        tl.store(grad_y + offset, (grad - normed * along) * rstd, mask=is_there)
    if partial is not None:
        _store_partial(partial, program, sums, D, D, COLUMNS)


# norm_rope: rows are heads, whose two halves are read as two tiles.


@triton.jit
def _halves(block, N, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the offsets of the first halves of a tile's heads and of their tokens' cos and sin, and a mask."""
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_there = (row < N)[:, None] & (column < D // 2)[None, :]
    offset = row.to(tl.int64)[:, None] * D + column[None, :]
    return offset, (row // HEADS).to(tl.int64)[:, None] * D + column[None, :], is_there


@triton.jit
def _load_halves(pointer, offset, is_there, D: tl.constexpr):
    return _load(pointer, offset, is_there), _load(pointer, offset + D // 2, is_there)


@triton.jit(do_not_specialize=["N"])
def norm_rope_forward(
    x, w, cos, sin, out, N, eps, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute out = n cos + roll(n, D / 2) sin; n is the norm of each head of x with weight w."""
    HALF: tl.constexpr = D // 2
    offset, token_at, is_there = _halves(tl.program_id(0), N, HEADS, D, ROWS, COLUMNS)
    first, second = _load_halves(x, offset, is_there, D)
    rstd = _rstd(first * first + second * second, eps, D)
    first *= rstd * _weight(w, HALF, COLUMNS)
    second *= rstd * _weight(w + HALF, HALF, COLUMNS)
    cos1, cos2 = _load_halves(cos, token_at, is_there, D)
    sin1, sin2 = _load_halves(sin, token_at, is_there, D)
    tl.store(out + offset, first * cos1 + second * sin1, mask=is_there)
    tl.store(out + offset + HALF, second * cos2 + first * sin2, mask=is_there)


@triton.jit(do_not_specialize=["N"])
def norm_rope_backward(
    x, w, cos, sin, grad_out, grad_x, partial, N, eps,
    HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x, and the partial sums of w's gradient (None: w is frozen)."""
    HALF: tl.constexpr = D // 2
    program = tl.program_id(0)
    weight1, weight2 = _weight(w, HALF, COLUMNS), _weight(w + HALF, HALF, COLUMNS)
    sum1 = tl.zeros([COLUMNS], tl.float32)
    sum2 = tl.zeros([COLUMNS], tl.float32)
    for block in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        offset, token_at, is_there = _halves(block, N, HEADS, D, ROWS, COLUMNS)
        first, second = _load_halves(x, offset, is_there, D)
        rstd = _rstd(first * first + second * second, eps, D)
        first *= rstd
        second *= rstd
        turned1, turned2 = _load_halves(grad_out, offset, is_there, D)
        cos1, cos2 = _load_halves(cos, token_at, is_there, D)
        sin1, sin2 = _load_halves(sin, token_at, is_there, D)
        grad1 = turned1 * cos1 + turned2 * sin2
        grad2 = turned2 * cos2 + turned1 * sin1
        if partial is not None:
            sum1 += tl.sum(grad1 * first, 0)
            sum2 += tl.sum(grad2 * second, 0)
        grad1 *= weight1
        grad2 *= weight2
        along = tl.sum(grad1 * first + grad2 * second, 1)[:, None] / D
        tl.store(grad_x + offset, (grad1 - first * along) * rstd, mask=is_there)
        tl.store(grad_x + offset + HALF, (grad2 - second * along) * rstd, mask=is_there)
    if partial is not None:
        _store_partial(partial, program, sum1, D, HALF, COLUMNS)
        _store_partial(partial + HALF, program, sum2, D, HALF, COLUMNS)


@triton.jit(do_not_specialize=["N"])
def residual_norms(
    x, y, weight, weights, out, outs, N, eps, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute out = x + norm of y with its weight, and the norm of out with each of `weights` (None: no weight)."""
    _, offset, is_there = _tile(tl.program_id(0), N, D, ROWS, COLUMNS)
    branch = _load(y, offset, is_there)
    total = _load(x, offset, is_there) + branch * _rstd(branch * branch, eps, D) * _weight(weight, D, COLUMNS)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + offset, rounded, mask=is_there)
    wide = rounded.to(tl.float32)
    normed = wide * _rstd(wide * wide, eps, D)
    for i in tl.static_range(len(outs)):
        if weights[i] is None:
            tl.store(outs[i] + offset, normed, mask=is_there)
        else:
            tl.store(outs[i] + offset, normed * _weight(weights[i], D, COLUMNS), mask=is_there)


@triton.jit(do_not_specialize=["N", "E"])
def layer_end(
    x, dense, slots, index, dense_weight, slots_weight, weight, scalar, step, out, N, E, eps,
    TOP_K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute out = (x + norm(norm(dense) + norm(routed))) * scalar; routed: the sum of a token's slots [N, TOP_K, D].

    index: the expert of each slot; slots whose index is not below E are left out (None: every slot counts).
    """
    row, offset, is_there = _tile(tl.program_id(0), N, D, ROWS, COLUMNS)
    column = tl.arange(0, COLUMNS)
    routed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for i in tl.static_range(TOP_K):
        slot = row.to(tl.int64) * TOP_K + i
        counts = row < N
        if index is not None:
            expert = tl.load(index + slot, mask=counts, other=-1)
            counts = counts & (expert >= 0) & (expert < E)
        of_slot = slot[:, None] * D + column[None, :]
        routed += _load(slots, of_slot, counts[:, None] & (column < D)[None, :])
    both = routed * _rstd(routed * routed, eps, D) * _weight(slots_weight, D, COLUMNS)
    mlp = _load(dense, offset, is_there)
    both += mlp * _rstd(mlp * mlp, eps, D) * _weight(dense_weight, D, COLUMNS)
    total = _load(x, offset, is_there) + both * _rstd(both * both, eps, D) * _weight(weight, D, COLUMNS)
    if scalar is not None:
        total *= _scalar_of(scalar, step, row, N)
    tl.store(out + offset, total, mask=is_there)
