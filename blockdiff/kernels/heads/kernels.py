"""The Triton kernel of attention_heads, forward only; fp32 inside, rounded once."""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.norm_rope.kernels import _load, _weight


@triton.jit
def _normed_part(
    x, rstd, weight, first: tl.constexpr, size: tl.constexpr, is_value, dtype: tl.constexpr, COLUMNS: tl.constexpr,
    NORM: tl.constexpr, NORMS_VALUES: tl.constexpr,
):  # fmt: skip
    """Load `size` numbers of each head, from number `first` on, and apply the norm."""
    of_value = x * rstd if NORMS_VALUES else x
    if NORM == "none":
        normed = x
    else:
        weight = _weight(weight + first, size, COLUMNS)
        if NORM == "cast":
            normed = (x * rstd).to(dtype).to(tl.float32) * weight
        elif NORM == "centred":
            normed = x * (rstd * (1.0 + weight))
        else:
            normed = x * (rstd * weight)
    return tl.where(is_value, of_value, normed)


@triton.jit(do_not_specialize=["N"])
def attention_heads(
    tensors, strides, outs, places, q_weight, k_weight, cos, sin, N, eps,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, NORM: tl.constexpr,
    NORMS_VALUES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Norm and rotate queries and keys, and copy or norm values; a program handles ROWS tokens of one head.

    tensors, outs: queries [N, QUERIES, D], keys and optionally values [N, KEYS, D]. strides: over tokens and heads of
    each of `tensors`, whose heads are contiguous; outs are contiguous. places [N]: the slot in `outs` of each token's
    keys and values, if these are pages (None: token i goes to i). cos, sin: [N, TURNED], for the first TURNED numbers
    of a head; the others are not rotated. COLUMNS: at least TURNED / 2. REST: at least D - TURNED (0: all are rotated).
    NORM: "none", or a form of `kernels.heads.Norm`.
    """
    HALF: tl.constexpr = TURNED // 2
    head = tl.program_id(1)
    source, of_token, of_head, out = tensors[0], strides[0][0], strides[0][1], outs[0]
    weight, heads = q_weight, QUERIES
    if head >= QUERIES:
        head -= QUERIES
        source, of_token, of_head, out = tensors[1], strides[1][0], strides[1][1], outs[1]
        weight, heads = k_weight, KEYS
    is_value = tl.program_id(1) >= QUERIES + KEYS
    if len(tensors) > 2:  # noqa: SIM102 (one is known when it is compiled, the other when it runs)
        if is_value:
            head -= KEYS
            source, of_token, of_head, out = tensors[2], strides[2][0], strides[2][1], outs[2]
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = token
    if places is not None:
        row = tl.where(tl.program_id(1) >= QUERIES, tl.load(places + token, mask=token < N, other=0), row)
    column = tl.arange(0, COLUMNS)
    is_there = (token < N)[:, None] & (column < HALF)[None, :]
    offset = token[:, None] * of_token + head * of_head + column[None, :]
    first, second = _load(source, offset, is_there), _load(source, offset + HALF, is_there)
    total = tl.sum(first * first + second * second, 1)
    if REST != 0:
        other = tl.arange(0, REST)
        is_other = (token < N)[:, None] & (other < D - TURNED)[None, :]
        rest = _load(source, token[:, None] * of_token + head * of_head + TURNED + other[None, :], is_other)
        total += tl.sum(rest * rest, 1)
    rstd = tl.rsqrt(total / D + eps)[:, None]
    dtype: tl.constexpr = tensors[0].dtype.element_ty
    first = _normed_part(first, rstd, weight, 0, HALF, is_value, dtype, COLUMNS, NORM, NORMS_VALUES)
    second = _normed_part(second, rstd, weight, HALF, HALF, is_value, dtype, COLUMNS, NORM, NORMS_VALUES)
    offset = token[:, None] * TURNED + column[None, :]
    cos1, cos2 = _load(cos, offset, is_there), _load(cos, offset + HALF, is_there)
    sin1, sin2 = _load(sin, offset, is_there), _load(sin, offset + HALF, is_there)
    turned1 = tl.where(is_value, first, first * cos1 + second * sin1)
    turned2 = tl.where(is_value, second, second * cos2 + first * sin2)
    offset = (row[:, None] * heads + head) * D + column[None, :]
    tl.store(out + offset, turned1, mask=is_there)
    tl.store(out + offset + HALF, turned2, mask=is_there)
    if REST != 0:
        rest = _normed_part(rest, rstd, weight, TURNED, D - TURNED, is_value, dtype, REST, NORM, NORMS_VALUES)
        offset = (row[:, None] * heads + head) * D + TURNED + other[None, :]
        tl.store(out + offset, rest, mask=is_other)
