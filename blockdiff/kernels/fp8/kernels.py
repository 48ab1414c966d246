"""The Triton kernels of fp8: a product whose weights are decoded in registers, and decoding alone.

Codes are the bytes of e4m3 as int8. sm_89 and newer convert them to fp16 by an instruction (HARDWARE). Elsewhere, and
in the interpreter, their bits are shifted to fp16's, which gives the number divided by 256, because fp16's exponent
bias is larger by 8; scales are multiplied by 256 instead. Both ways are exact, also for subnormal numbers. Only the
instruction decodes NaN, so a channel that contains a NaN has NaN as its scale.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoded(codes, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """Decode int8 codes to DTYPE, divided by `factor(HARDWARE)`."""
    if HARDWARE:
        half = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = (codes.to(tl.int16) << 7) & -16385  # 0xBFFF: clear the extended sign bit below bit 15
        half = bits.to(tl.float16, bitcast=True)
    if DTYPE == tl.float16:
        return half
    else:  # by way of fp32: the direct conversion to bf16 takes eight times as long on sm_90
        return half.to(tl.float32).to(DTYPE)


@triton.jit
def factor(HARDWARE: tl.constexpr):
    """Return the factor that `decoded` divides by, which scales must be multiplied by."""
    if HARDWARE:
        return 1.0
    else:
        return 256.0


@triton.jit
def multiplied(a, b, total, HARDWARE: tl.constexpr, PRECISION: tl.constexpr):
    """Return total + a b. If b is int8 codes, the caller multiplies by their scales times `factor(HARDWARE)`."""
    if b.dtype == tl.int8:
        b = decoded(b, a.dtype, HARDWARE)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit(do_not_specialize=["N"])
def fp8_product(
    x, codes, scale, out, N,
    K: tl.constexpr, F: tl.constexpr, HARDWARE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute out [N, F] = x [N, K] codes^T * scale; codes [F, K], scale [F]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, inner = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    rows = tl.minimum(row, N - 1).to(tl.int64)[:, None] * K  # rows and columns past the end repeat the last one
    columns = tl.minimum(column, F - 1).to(tl.int64)[None, :] * K
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K, INNER):
        k = start + inner
        if K % INNER == 0:
            a = tl.load(x + rows + k[None, :])
            b = tl.load(codes + columns + k[:, None])
        else:
            a = tl.load(x + rows + k[None, :], mask=(k < K)[None, :], other=0)
            b = tl.load(codes + columns + k[:, None], mask=(k < K)[:, None], other=0)
        total = multiplied(a, b, total, HARDWARE, PRECISION)
    total *= tl.load(scale + tl.minimum(column, F - 1))[None, :] * factor(HARDWARE)
    is_there = (row < N)[:, None] & (column < F)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * F + column[None, :], total.to(out.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["F"])
def fp8_decode(
    codes, scale, out, F, K: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Decode a matrix: out [F, K] = codes * scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = (row < F)[:, None] & (column < K)[None, :]
    offset = row.to(tl.int64)[:, None] * K + column[None, :]
    wide = decoded(tl.load(codes + offset, mask=is_there, other=0), tl.float32, HARDWARE)
    wide *= tl.load(scale + row, mask=row < F, other=0.0)[:, None] * factor(HARDWARE)
    tl.store(out + offset, wide.to(out.dtype.element_ty), mask=is_there)
