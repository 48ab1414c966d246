"""The Triton kernels of gated, forward and backward, and of gated_linear, forward only."""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.expert_mlp.kernels import _activation
from blockdiff.kernels.fp8.kernels import decoded, factor


@triton.jit(do_not_specialize=["N"])
def gated_product(
    x, gate_weight, up_weight, gate_scale, up_scale, out, N,
    D: tl.constexpr, F: tl.constexpr, ACTIVATION: tl.constexpr, HARDWARE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute out [N, F] = f(x gate^T) * g(x up^T); weights [F, D], with scales [F] if they are in fp8."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, inner = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    rows = tl.minimum(row, N - 1).to(tl.int64)[:, None] * D  # rows and columns past the end repeat the last one
    columns = tl.minimum(column, F - 1)[None, :] * D
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, D, INNER):
        d = start + inner
        if D % INNER == 0:
            a = tl.load(x + rows + d[None, :])
            g = tl.load(gate_weight + columns + d[:, None])
            u = tl.load(up_weight + columns + d[:, None])
        else:
            a = tl.load(x + rows + d[None, :], mask=(d < D)[None, :], other=0.0)
            g = tl.load(gate_weight + columns + d[:, None], mask=(d < D)[:, None], other=0.0)
            u = tl.load(up_weight + columns + d[:, None], mask=(d < D)[:, None], other=0.0)
        if gate_scale is not None:
            g, u = decoded(g, a.dtype, HARDWARE), decoded(u, a.dtype, HARDWARE)
        gate = tl.dot(a, g, gate, input_precision=PRECISION)
        up = tl.dot(a, u, up, input_precision=PRECISION)
    if gate_scale is not None:
        gate *= tl.load(gate_scale + tl.minimum(column, F - 1))[None, :] * factor(HARDWARE)
        up *= tl.load(up_scale + tl.minimum(column, F - 1))[None, :] * factor(HARDWARE)
    activated, _, linear, _ = _activation(gate, up, ACTIVATION)
    is_there = (row < N)[:, None] & (column < F)[None, :]
    offset = row.to(tl.int64)[:, None] * F + column[None, :]
    tl.store(out + offset, (activated * linear).to(out.dtype.element_ty), mask=is_there)


@triton.jit
def _numbers(N, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the offsets of a program's numbers in [N, F], and a mask of those in range."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return row[:, None] * F + column[None, :], (row < N)[:, None] & (column < F)[None, :]


@triton.jit(do_not_specialize=["N"])
def gated_forward(
    gate, up, out, N, F: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute out = f(gate) * g(up), all [N, F]."""
    offset, is_there = _numbers(N, F, ROWS, COLUMNS)
    of_gate = tl.load(gate + offset, mask=is_there, other=0.0).to(tl.float32)
    of_up = tl.load(up + offset, mask=is_there, other=0.0).to(tl.float32)
    activated, _, linear, _ = _activation(of_gate, of_up, ACTIVATION)
    tl.store(out + offset, (activated * linear).to(out.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["N"])
def gated_backward(
    gate, up, grad, grad_gate, grad_up, N,
    F: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_gate and grad_up."""
    offset, is_there = _numbers(N, F, ROWS, COLUMNS)
    of_gate = tl.load(gate + offset, mask=is_there, other=0.0).to(tl.float32)
    of_up = tl.load(up + offset, mask=is_there, other=0.0).to(tl.float32)
    of_out = tl.load(grad + offset, mask=is_there, other=0.0).to(tl.float32)
    activated, slope, linear, slope_up = _activation(of_gate, of_up, ACTIVATION)
    tl.store(grad_gate + offset, (of_out * linear * slope).to(grad_gate.dtype.element_ty), mask=is_there)
    tl.store(grad_up + offset, (of_out * activated * slope_up).to(grad_up.dtype.element_ty), mask=is_there)
