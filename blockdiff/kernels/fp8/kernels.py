"""The Triton kernels of fp8: a product whose weights are decoded in registers, or that is one of fp8 with fp8; rounding
rows to fp8, and decoding alone.

Codes are the bytes of e4m3 as int8. sm_89 and newer have an instruction that makes fp16 of them (HARDWARE); elsewhere,
and in the interpreter, their bits are moved to where fp16 has them. That gives the number divided by 256, for the bias
of fp16's exponent is larger by 8, and scales are multiplied by 256 instead. Both are exact, subnormal numbers too; a
channel or row with a NaN has a scale that is NaN, since only the first of the two knows that code. The same GPUs
multiply fp8 by fp8; elsewhere both are decoded.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def decoded(codes, DTYPE: tl.constexpr, HARDWARE: tl.constexpr):
    """The numbers of int8 codes in a dtype, divided by `factor(HARDWARE)`."""
    if HARDWARE:
        half = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = (codes.to(tl.int16) << 7) & -16385  # 0xBFFF: the copies of the sign go, but for the first
        half = bits.to(tl.float16, bitcast=True)
    if DTYPE == tl.float16:
        return half
    else:  # by way of fp32: the direct conversion to bf16 takes eight times as long on sm_90
        return half.to(tl.float32).to(DTYPE)


@triton.jit
def factor(HARDWARE: tl.constexpr):
    """The factor of scales, by which `decoded` divides."""
    if HARDWARE:
        return 1.0
    else:
        return 256.0


@triton.jit
def multiplied(a, b, total, HARDWARE: tl.constexpr, PRECISION: tl.constexpr):
    """total + a b; b alone or both may be int8 codes, whose scales are to be multiplied by `factor(HARDWARE)`.

    sm_90 keeps fewer bits of sums of fp8 products than fp32 has, about 14. What that adds is small beside what rounding
    to fp8 costs (tests/kernels/test_fp8.py), so sums stay there to the end: adding each part in fp32 would let every
    product wait for the one before.
    """
    if b.dtype == tl.int8:
        if a.dtype == tl.int8:
            if HARDWARE:
                a, b = a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)
                return tl.dot(a, b, total)
            else:
                return tl.dot(decoded(a, tl.float16, HARDWARE), decoded(b, tl.float16, HARDWARE), total)
        else:
            return tl.dot(a, decoded(b, a.dtype, HARDWARE), total, input_precision=PRECISION)
    else:
        return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _rounded(y, HARDWARE: tl.constexpr):
    """The int8 code of e4m3 nearest to each fp32 number of at most 448, of two the even one."""
    if HARDWARE:
        return y.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        bits = y.to(tl.int32, bitcast=True)
        least = tl.abs(y) + 16384.0  # whose last bit is 2^-9, the least number of e4m3: rounded to it by the sum
        small = least.to(tl.int32, bitcast=True) & 0x7FFFFF
        size = bits & 0x7FFFFFFF
        large = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960  # three bits of mantissa stay; the bias 127 is 7
        code = tl.where(tl.abs(y) < 0.015625, small, large)
        code = tl.where(y == y, code, 127) | ((bits >> 24) & 128)
        return code.to(tl.int8)


@triton.jit(do_not_specialize=["N"])
def fp8_round_rows(
    x, codes, scale, N, K: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """codes [N, K] and scale [N] of the rows of x: the largest number of each becomes 448 times its scale."""
    row, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_there = (row < N)[:, None] & (k < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + k[None, :]
    wide = tl.load(x + at, mask=is_there, other=0.0).to(tl.float32)
    own = tl.div_rn(tl.max(tl.abs(wide), 1), 448.0)
    own = tl.where(own == 0.0, 1.0, own)
    own = tl.where(tl.sum((wide != wide).to(tl.int32), 1) > 0, float("nan"), own)
    tl.store(scale + row, own, mask=row < N)
    made = _rounded(tl.div_rn(wide, tl.broadcast_to(own[:, None], wide.shape)), HARDWARE)
    tl.store(codes + at, made, mask=is_there)


@triton.jit(do_not_specialize=["N"])
def fp8_product(
    x, of_rows, codes, scale, out, N,
    K: tl.constexpr, F: tl.constexpr, HARDWARE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out [N, F] = x [N, K] codes^T * scale; codes [F, K], scale [F]; of_rows: the scales [N] of an x in fp8."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, inner = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    rows = tl.minimum(row, N - 1).to(tl.int64)[:, None] * K  # rows and columns too many repeat the last one
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
    if of_rows is not None:
        total *= tl.load(of_rows + tl.minimum(row, N - 1))[:, None] * factor(HARDWARE)
    total *= tl.load(scale + tl.minimum(column, F - 1))[None, :] * factor(HARDWARE)
    is_there = (row < N)[:, None] & (column < F)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * F + column[None, :], total.to(out.dtype.element_ty), mask=is_there)


@triton.jit(do_not_specialize=["F"])
def fp8_decode(
    codes, scale, out, F, K: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """out [F, K] = codes * scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_there = (row < F)[:, None] & (column < K)[None, :]
    at = row.to(tl.int64)[:, None] * K + column[None, :]
    wide = decoded(tl.load(codes + at, mask=is_there, other=0), tl.float32, HARDWARE)
    wide *= tl.load(scale + row, mask=row < F, other=0.0)[:, None] * factor(HARDWARE)
    tl.store(out + at, wide.to(out.dtype.element_ty), mask=is_there)
