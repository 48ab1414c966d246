"""The Triton kernels that only expert_mlp's gradient needs; `kernels.py` explains slots, rows and the plan."""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.expert_mlp.kernels import (
    _activation,
    _load,
    _low_rank,
    _matrix_of,
    _product,
    _rows,
    _tile_of_program,
)


@triton.jit
def expert_mlp_activation_backward(
    grad, weights, channels, blocks, narrow, matrices, scale, h, grad_h, scaled_a, partial, plan,
    E: tl.constexpr, D: tl.constexpr, F: tl.constexpr, R: tl.constexpr, TOP_K: tl.constexpr, HARDWARE: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Backpropagate through the down product and the activation.

    grad [N, D]: the gradient of the tokens' outputs. weights [E, D, F]: `down`; channels [E, D] (fp8, NVFP4) and blocks
    [E, D, F / 16] (NVFP4): its scales. narrow [rows, R] = grad B and matrices A [E, R, F]: the adapter of `down`.

    Writes those that are not None: grad_h [rows, 2F]; scaled_a [rows, F] = scale * a, for the gradient of `down`;
    partial [slots, column tiles], whose sum over tiles is the gradient of scale.
    """
    tile, expert, column_tile, column = _tile_of_program(plan, F, COLUMNS)
    if expert >= E:
        return
    row, slot, is_row = _rows(plan, tile, expert, ROWS)
    is_there = is_row[:, None] & (column < F)[None, :]
    grad_a = tl.zeros([ROWS, COLUMNS], tl.float32)
    if grad_h is not None or partial is not None:
        left = grad + (slot // TOP_K).to(tl.int64) * D
        right, of_blocks = _matrix_of(weights, blocks, expert, D, F)
        of_k = None
        if channels is not None:
            of_k = channels + expert.to(tl.int64) * D
        grad_a, _ = _product(
            left, right, of_k, of_blocks, 0, D, F, F, 1, HARDWARE, column_tile, ROWS, COLUMNS, INNER, PRECISION
        )
        if R:
            mine = matrices + expert.to(tl.int64) * (R * F)
            grad_a = _low_rank(grad_a, narrow, mine, row, column, F, R, F, 1, PRECISION)

    offset = row[:, None] * (2 * F) + column[None, :]
    gate = tl.load(h + offset, mask=is_there, other=0.0).to(tl.float32)
    up = tl.load(h + offset + F, mask=is_there, other=0.0).to(tl.float32)
    activated, gate_slope, linear, up_slope = _activation(gate, up, ACTIVATION)
    factor = tl.load(scale + slot).to(tl.float32)[:, None]
    if partial is not None:
        at_slot = slot.to(tl.int64) * tl.cdiv(F, COLUMNS) + column_tile
        tl.store(partial + at_slot, tl.sum(grad_a * activated * linear, 1), mask=is_row)
    if scaled_a is not None:
        a = (factor * activated * linear).to(scaled_a.dtype.element_ty)
        tl.store(scaled_a + row[:, None] * F + column[None, :], a, mask=is_there)
    if grad_h is not None:
        grad_a *= factor
        tl.store(grad_h + offset, (grad_a * linear * gate_slope).to(grad_h.dtype.element_ty), mask=is_there)
        tl.store(grad_h + offset + F, (grad_a * activated * up_slope).to(grad_h.dtype.element_ty), mask=is_there)


@triton.jit
def expert_mlp_outer_product(
    left, right, out, plan,
    M: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, LEFT_BY_TOKEN: tl.constexpr, RIGHT_BY_TOKEN: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute out[expert, M, N] = left^T right, summed over the expert's rows; left and right are by token or row."""
    per_expert: tl.constexpr = tl.cdiv(M, ROWS) * tl.cdiv(N, COLUMNS)
    program = tl.program_id(0)
    expert = program // per_expert
    m = program % per_expert // tl.cdiv(N, COLUMNS) * ROWS + tl.arange(0, ROWS)
    n = program % tl.cdiv(N, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    end = tl.load(plan.starts + expert + 1)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(tl.load(plan.starts + expert), end, INNER):
        row = first + tl.arange(0, INNER)
        is_row = row < end
        token = tl.load(plan.order + row, mask=is_row, other=0) // TOP_K
        left_row = token if LEFT_BY_TOKEN else row
        right_row = token if RIGHT_BY_TOKEN else row
        lefts = left + left_row.to(tl.int64)[:, None] * M + m[None, :]
        rights = right + right_row.to(tl.int64)[:, None] * N + n[None, :]
        a = _load(lefts, row, end, m < M, 0, True, M % ROWS != 0)
        b = _load(rights, row, end, n < N, 0, True, N % COLUMNS != 0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    pointers = out + expert.to(tl.int64) * (M * N) + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
