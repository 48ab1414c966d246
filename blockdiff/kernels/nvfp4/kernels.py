"""The Triton kernel of nvfp4_linear, in both directions."""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.expert_mlp.kernels import _product


@triton.jit(do_not_specialize=["N"])
def nvfp4_product(
    x, codes, channels, blocks, out, N,
    K: tl.constexpr, F: tl.constexpr, BACK: tl.constexpr, HARDWARE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute out [N, F] = x [N, K] W^T of a matrix W [F, K]; BACK: out [N, K] = x [N, F] W."""
    READ: tl.constexpr = F if BACK else K
    WRITTEN: tl.constexpr = K if BACK else F
    row, column_tile = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    tokens = x + tl.minimum(row, N - 1).to(tl.int64) * READ
    if BACK:
        total, _ = _product(
            tokens, codes, channels, blocks, 0, F, K, K, 1, HARDWARE, column_tile, ROWS, COLUMNS, INNER, PRECISION
        )
    else:
        total, _ = _product(
            tokens, codes, None, blocks, 0, K, F, 1, K, HARDWARE, column_tile, ROWS, COLUMNS, INNER, PRECISION
        )
        total *= tl.load(channels + tl.minimum(column, F - 1))[None, :]
    is_there = (row < N)[:, None] & (column < WRITTEN)[None, :]
    pointers = out + row.to(tl.int64)[:, None] * WRITTEN + column[None, :]
    tl.store(pointers, total.to(out.dtype.element_ty), mask=is_there)
