"""The Triton kernels of expert_mlp: grouped products with fused epilogues.

A slot is one of the N * k choices of an expert, in the order of expert_index_Nk; a row is a slot's index after sorting
by expert. Tensors by row are defined only for rows below starts[E]: slots without an expert have no row. The row tiles
of all experts are listed on the device, in a list of the largest possible length, so no launch depends on the routing.
`plan` (`triton.Plan`) has order, the slot of each row; starts [E + 1], the first row of each expert; tile_expert and
tile_row of each row tile, whose ROWS rows belong to one expert (E for unused tiles). Arguments that are not needed are
None. `kernels_slots.py` makes the plan, `kernels_backward.py` has the gradient's kernels.

Low-rank matrices, whose product B A is added to an expert's weight, are added before a product's epilogue
(`_low_rank`): `expert_mlp_narrow` computes the rows of x A^T, and these times B^T are added. R is the rank, 0 without.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.expert_mlp import activations
from blockdiff.kernels.fp8.kernels import decoded, factor, multiplied
from blockdiff.kernels.nvfp4.kernels_decode import UNIT, tile_of

OAI_ALPHA = tl.constexpr(activations.OAI_ALPHA)
OAI_LIMIT = tl.constexpr(activations.OAI_LIMIT)
GELU_SCALE = tl.constexpr(0.7978845608028654)  # sqrt(2 / pi)
GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def _activation(gate, up, ACTIVATION: tl.constexpr):
    """Return f(gate), f'(gate), g(up), g'(up). Every f is gate * sigmoid(...); g is up except for swiglu_oai."""
    if ACTIVATION == "gelu_tanh":  # (1 + tanh z) / 2 = sigmoid(2 z)
        square = gate * gate
        share = tl.sigmoid(gate * (2.0 * GELU_SCALE) * (1.0 + square * GELU_CUBE))
        slope = share + gate * share * (1.0 - share) * (2.0 * GELU_SCALE) * (1.0 + square * (3.0 * GELU_CUBE))
        return gate * share, slope, up, tl.full(up.shape, 1.0, tl.float32)
    elif ACTIVATION == "silu":
        share = tl.sigmoid(gate)
        return gate * share, share * (1.0 + gate * (1.0 - share)), up, tl.full(up.shape, 1.0, tl.float32)
    else:
        tl.static_assert(ACTIVATION == "swiglu_oai")
        clamped = tl.minimum(gate, OAI_LIMIT)
        share = tl.sigmoid(clamped * OAI_ALPHA)
        slope = share * (1.0 + clamped * OAI_ALPHA * (1.0 - share))
        linear = tl.minimum(tl.maximum(up, -OAI_LIMIT), OAI_LIMIT)
        slope_up = tl.where(linear == up, 1.0, 0.0)
        return clamped * share, tl.where(gate <= OAI_LIMIT, slope, 0.0), linear + 1.0, slope_up


@triton.jit
def _load(pointers, inner, limit, is_column, AXIS: tl.constexpr, INNER_MASK: tl.constexpr, COLUMN_MASK: tl.constexpr):
    """Load a tile of a product's operand, 0 outside its limits; AXIS: the axis that is summed over."""
    is_there = tl.full(pointers.shape, True, tl.int1)
    if INNER_MASK:
        is_there &= tl.expand_dims(inner < limit, 1 - AXIS)
    if COLUMN_MASK:
        is_there &= tl.expand_dims(is_column, AXIS)
    return tl.load(pointers, mask=is_there, other=0.0)


@triton.jit
def _tile_of_program(plan, N: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the program's row tile, its expert, its column tile and its columns; N: columns of the result.

    Neighbouring programs read the same tokens and the same expert.
    """
    column_tiles: tl.constexpr = tl.cdiv(N, COLUMNS)
    tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    return tile, tl.load(plan.tile_expert + tile), column_tile, column_tile * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _rows(plan, tile, expert, ROWS: tl.constexpr):
    """Return the rows of a tile, their slots, and which exist; the others repeat the expert's last row."""
    row = tl.load(plan.tile_row + tile) + tl.arange(0, ROWS)
    end = tl.load(plan.starts + expert + 1)
    is_row = row < end
    row = tl.minimum(row, end - 1)
    return row.to(tl.int64), tl.load(plan.order + row), is_row


@triton.jit
def _matrix_of(weights, blocks, expert, rows: tl.constexpr, columns: tl.constexpr):
    """Return pointers to an expert's matrix, stored as [rows, columns], and to the scales of its blocks."""
    if blocks is None:
        return weights + expert.to(tl.int64) * (rows * columns), None
    else:
        offset = expert.to(tl.int64) * rows
        return weights + offset * (columns // 2), blocks + offset * (columns // 16)


@triton.jit
def _product(
    left, right, channels, blocks, SECOND: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    right_k: tl.constexpr, right_n: tl.constexpr, HARDWARE: tl.constexpr,
    column_tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Multiply left [ROWS, K] by right [K, COLUMNS] in fp32, and by a second matrix if SECOND is not 0.

    left: pointers to the rows' first elements. SECOND: offset of the second matrix after `right`. right may be codes of
    fp8, or with `blocks`, the scales of their blocks, of NVFP4. channels: the scales of right if the sum is over output
    channels, K of them; None: the caller multiplies the result by them.
    """
    inner, start = tl.arange(0, INNER), column_tile * COLUMNS
    column = start + tl.arange(0, COLUMNS)
    is_column = column < N
    lefts = left[:, None] + inner[None, :]
    rights = right + inner[:, None] * right_k + column[None, :] * right_n
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    other = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, K, INNER):
        a = _load(lefts, inner, K - first, is_column, 1, K % INNER != 0, False)
        if blocks is None:
            b = _load(rights, inner, K - first, is_column, 0, K % INNER != 0, N % COLUMNS != 0)
            if channels is not None:
                scale = tl.load(channels + first + inner, mask=first + inner < K, other=0.0) * factor(HARDWARE)
                b = (decoded(b, tl.float32, HARDWARE) * scale[:, None]).to(a.dtype)
        else:
            b = tile_of(right, blocks, channels, first, start, K, N, INNER, COLUMNS, right_k == 1, a.dtype, HARDWARE)
        total = multiplied(a, b, total, HARDWARE, PRECISION)
        if SECOND:
            if blocks is None:
                b = _load(rights + SECOND, inner, K - first, is_column, 0, K % INNER != 0, N % COLUMNS != 0)
            else:
                codes, others = right + SECOND // 2, blocks + SECOND // 16
                b = tile_of(
                    codes, others, channels, first, start, K, N, INNER, COLUMNS, right_k == 1, a.dtype, HARDWARE
                )
            other = multiplied(a, b, other, HARDWARE, PRECISION)
        lefts += INNER
        rights += INNER * right_k
    if blocks is not None:
        return total * UNIT, other * UNIT
    elif channels is None and right.dtype.element_ty == tl.int8:
        return total * factor(HARDWARE), other * factor(HARDWARE)
    else:
        return total, other


@triton.jit
def _low_rank(
    total, narrow, matrix, row, column, N: tl.constexpr, R: tl.constexpr,
    MATRIX_R: tl.constexpr, MATRIX_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return total plus narrow[row, R] times the expert's matrix [R, N] (strides MATRIX_R, MATRIX_N)."""
    PART: tl.constexpr = 16 if R <= 16 else 32 if R <= 32 else 64
    for first in tl.static_range(0, R, PART):
        r = first + tl.arange(0, PART)
        is_rank, is_column = r < R, column < N
        left = tl.load(narrow + row[:, None] * R + r[None, :], mask=is_rank[None, :], other=0.0)
        pointers = matrix + r[:, None] * MATRIX_R + column[None, :] * MATRIX_N
        right = tl.load(pointers, mask=is_rank[:, None] & is_column[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    return total


@triton.jit
def expert_mlp_narrow(
    left, matrices, out, plan,
    E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, WEIGHT_K: tl.constexpr, WEIGHT_N: tl.constexpr,
    TOP_K: tl.constexpr, LEFT_BY_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute out[row, N] = left times the expert's matrix [K, N], strides WEIGHT_K, WEIGHT_N; left by token or row."""
    tile, expert, column_tile, column = _tile_of_program(plan, N, COLUMNS)
    if expert >= E:
        return
    row, slot, is_row = _rows(plan, tile, expert, ROWS)
    first = left + ((slot // TOP_K).to(tl.int64) if LEFT_BY_TOKEN else row) * K
    right = matrices + expert.to(tl.int64) * (K * N)
    total, _ = _product(
        first, right, None, None, 0, K, N, WEIGHT_K, WEIGHT_N, False, column_tile, ROWS, COLUMNS, INNER, PRECISION
    )
    is_there = is_row[:, None] & (column < N)[None, :]
    tl.store(out + row[:, None] * N + column[None, :], total.to(out.dtype.element_ty), mask=is_there)


@triton.jit
def expert_mlp_gate_up(
    x, weights, channels, blocks, narrow, matrices, h, a, plan,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, HARDWARE: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute h[row] = (gate, up) of the row's token and a[row] = f(gate) * g(up).

    weights: [E, 2F, D]; matrices: B of the low-rank matrices, [E, 2F, R]; narrow: the rows of x A^T. channels: scales
    [E, 2F] of weights in fp8 or NVFP4. blocks: scales of NVFP4's blocks, [E, 2F, D / 16].
    """
    tile, expert, column_tile, column = _tile_of_program(plan, F, COLUMNS)
    if expert >= E:
        return
    row, slot, is_row = _rows(plan, tile, expert, ROWS)
    left = x + (slot // TOP_K).to(tl.int64) * D
    right, of_blocks = _matrix_of(weights, blocks, expert, 2 * F, D)
    gate, up = _product(
        left, right, None, of_blocks, F * D, D, F, 1, D, HARDWARE, column_tile, ROWS, COLUMNS, INNER, PRECISION
    )
    if channels is not None:
        mine = channels + expert.to(tl.int64) * (2 * F) + column
        gate *= tl.load(mine, mask=column < F, other=0.0)[None, :]
        up *= tl.load(mine + F, mask=column < F, other=0.0)[None, :]
    if R:
        mine = matrices + expert.to(tl.int64) * (2 * F * R)
        gate = _low_rank(gate, narrow, mine, row, column, F, R, 1, R, PRECISION)
        up = _low_rank(up, narrow, mine + F * R, row, column, F, R, 1, R, PRECISION)
    is_there = is_row[:, None] & (column < F)[None, :]
    if h is not None:
        pointers = h + row[:, None] * (2 * F) + column[None, :]
        tl.store(pointers, gate.to(h.dtype.element_ty), mask=is_there)
        tl.store(pointers + F, up.to(h.dtype.element_ty), mask=is_there)
    activated, _, linear, _ = _activation(gate, up, ACTIVATION)
    tl.store(a + row[:, None] * F + column[None, :], (activated * linear).to(a.dtype.element_ty), mask=is_there)


@triton.jit
def expert_mlp_product(
    left, weights, channels, blocks, narrow, matrices, scale, out, plan,
    E: tl.constexpr, K: tl.constexpr, N: tl.constexpr, WEIGHT_K: tl.constexpr, WEIGHT_N: tl.constexpr,
    R: tl.constexpr, MATRIX_R: tl.constexpr, MATRIX_N: tl.constexpr, HARDWARE: tl.constexpr, BY_K: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute out[slot, N] = (left[row, K] W + narrow[row, R] M) * scale[slot].

    W: the expert's matrix [K, N] (strides WEIGHT_K, WEIGHT_N). M: its low-rank matrix [R, N] (strides MATRIX_R,
    MATRIX_N). channels: scales [E, K] (BY_K) or [E, N] of weights in fp8 or NVFP4. blocks: scales of NVFP4's blocks.
    row: index in the order by expert; slot: index of (token, choice), the row of `out`. plan: the expert of each tile
    of rows, and each row's slot. E: number of experts. scale: a factor for each slot (None: 1).
    """
    tile, expert, column_tile, column = _tile_of_program(plan, N, COLUMNS)
    if expert >= E:
        return
    row, slot, is_row = _rows(plan, tile, expert, ROWS)
    right, of_blocks = _matrix_of(weights, blocks, expert, K if WEIGHT_N == 1 else N, N if WEIGHT_N == 1 else K)
    of_k = None
    if BY_K:
        of_k = channels + expert.to(tl.int64) * K
    total, _ = _product(
        left + row * K, right, of_k, of_blocks, 0, K, N, WEIGHT_K, WEIGHT_N,
        HARDWARE, column_tile, ROWS, COLUMNS, INNER, PRECISION,
    )  # fmt: skip
    if channels is not None and not BY_K:
        of_n = tl.load(channels + expert.to(tl.int64) * N + column, mask=column < N, other=0.0)
        total *= of_n[None, :]
    if R:
        mine = matrices + expert.to(tl.int64) * (R * N)
        total = _low_rank(total, narrow, mine, row, column, N, R, MATRIX_R, MATRIX_N, PRECISION)
    if scale is not None:
        total *= tl.load(scale + slot).to(tl.float32)[:, None]
    is_there = is_row[:, None] & (column < N)[None, :]
    tl.store(out + slot.to(tl.int64)[:, None] * N + column[None, :], total.to(out.dtype.element_ty), mask=is_there)
