"""Decode tiles of NVFP4 inside Triton kernels.

The bits of e2m1 are shifted to the sign, exponent and mantissa bits of bf16, two numbers of a byte at once. The result
is the number times 2^-126, because bf16's exponent bias is larger by 126; block scales are multiplied by 2^112 first.
All steps are exact: a tile holds numbers times block scales / `UNIT`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.fp8.kernels import decoded as decoded_e4m3
from blockdiff.kernels.fp8.kernels import factor

UNIT = tl.constexpr(2.0**14)
RAISED = tl.constexpr(2.0**112)
# Multiply both halves of a register at once (as an fma with -0); Triton's own bf16 product would split them.
MULTIPLY = tl.constexpr("{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }")


@triton.jit
def pairs(codes):
    """Decode int8 codes to their two numbers times 2^-126, as bf16 in the lower and upper half of an int32."""
    spread = codes.to(tl.uint8, bitcast=True).to(tl.int32) * 0x01001000  # each number in the upper bits of its half
    return (spread & -0x7FFF8000) | ((spread >> 6) & 0x01C001C0)


@triton.jit
def decoded(codes, scale, DTYPE: tl.constexpr):
    """Decode int8 codes [L, C] to numbers [L, 2 C] times 2^-126, times the scales of their blocks, fp32 [L, C / 8].

    If DTYPE is bf16 the scales are rounded to it first.
    """
    L: tl.constexpr = codes.shape[0]
    C: tl.constexpr = codes.shape[1]
    both = pairs(codes)
    if DTYPE == tl.bfloat16:
        twice = (scale.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) * 0x10001
        twice = tl.broadcast_to(twice[:, :, None], L, C // 8, 8).reshape(L, C)
        both = tl.inline_asm_elementwise(MULTIPLY, "=r,r,r", [both, twice], dtype=tl.int32, is_pure=True, pack=1)
        return tl.join(both.to(tl.int16), (both >> 16).to(tl.int16)).reshape(L, 2 * C).to(tl.bfloat16, bitcast=True)
    else:
        tl.static_assert(DTYPE == tl.float32)
        wide = tl.join((both << 16).to(tl.float32, bitcast=True), (both & -0x10000).to(tl.float32, bitcast=True))
        return (wide.reshape(L, C // 8, 16) * scale[:, :, None]).reshape(L, 2 * C)


@triton.jit
def tile_of(
    codes, blocks, channels, k, n, K: tl.constexpr, N: tl.constexpr, INNER: tl.constexpr, COLUMNS: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Decode the tile [INNER, COLUMNS] at (k, n) of a matrix [K, N], divided by UNIT.

    IS_TRANSPOSED: the matrix is stored as [N, K]. Numbers past the end of a stored row are 0, those past the last row
    undefined. channels: the scales of stored rows, multiplied in here; None: the caller multiplies by them.
    """
    if IS_TRANSPOSED:
        row = tl.minimum(n + tl.arange(0, COLUMNS), N - 1)
        return tl.trans(_of_rows(codes, blocks, channels, row, k, K, INNER, DTYPE, HARDWARE))
    else:
        row = tl.minimum(k + tl.arange(0, INNER), K - 1)
        return _of_rows(codes, blocks, channels, row, n, N, COLUMNS, DTYPE, HARDWARE)


@triton.jit
def _of_rows(
    codes, blocks, channels, row, first,
    LENGTH: tl.constexpr, COUNT: tl.constexpr, DTYPE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Decode COUNT numbers from number `first` on, of stored rows with LENGTH numbers."""
    pair, block = first // 2 + tl.arange(0, COUNT // 2), first // 16 + tl.arange(0, COUNT // 16)
    codes += row[:, None] * (LENGTH // 2) + pair[None, :]
    blocks += row[:, None] * (LENGTH // 16) + block[None, :]
    if LENGTH % COUNT == 0:
        of_pairs, of_blocks = tl.load(codes), tl.load(blocks)
    else:
        of_pairs = tl.load(codes, mask=(pair < LENGTH // 2)[None, :], other=0)
        of_blocks = tl.load(blocks, mask=(block < LENGTH // 16)[None, :], other=0)
    scale = decoded_e4m3(of_blocks, tl.float32, HARDWARE) * (factor(HARDWARE) * RAISED)
    if channels is not None:
        scale *= tl.load(channels + row)[:, None]
    return decoded(of_pairs, scale, DTYPE)
