"""Triton kernels that do the work of several ops of a layer at once, without gradient: fp32 inside, rounded once."""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.expert_mlp.triton_kernels import _activation
from blockdiff.kernels.fp8.triton_kernels import decoded, factor
from blockdiff.kernels.norm_rope.triton_kernels import _load, _rstd, _scalar_of, _tile, _weight

NO_EXPERT = tl.constexpr(2**31 - 1)


@triton.jit
def _normed_part(
    x, rstd, weight, first: tl.constexpr, size: tl.constexpr, is_value, dtype: tl.constexpr, COLUMNS: tl.constexpr,
    NORM: tl.constexpr, NORMS_VALUES: tl.constexpr,
):  # fmt: skip
    """A part of heads after their norm: `size` of the numbers of each, from its number `first` on."""
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


@triton.jit
def attention_heads(
    tensors, strides, outs, places, q_weight, k_weight, cos, sin, N, eps,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, NORM: tl.constexpr,
    NORMS_VALUES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Queries and keys normed and turned, values as they are or normed; a program takes ROWS tokens of one head.

    tensors, outs: queries [N, QUERIES, D], keys and, if there are any, values [N, KEYS, D]; strides: from token to
    token and from head to head of each of `tensors`, whose numbers of a head are neighbours; outs are dense. places
    [N]: which of their rows the keys and values of each token become, where these are pages (None: as tokens stand).
    cos, sin: [N, TURNED], for the first numbers of a head; the others pass. COLUMNS: at least TURNED / 2; REST: at
    least D - TURNED (0: all turn). NORM: "none"; "plain" multiplies by the weight, "centred" by 1 + the weight, "cast"
    multiplies what was rounded before.
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
    at = token[:, None] * of_token + head * of_head + column[None, :]
    first, second = _load(source, at, is_there), _load(source, at + HALF, is_there)
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
    at = token[:, None] * TURNED + column[None, :]
    cos1, cos2 = _load(cos, at, is_there), _load(cos, at + HALF, is_there)
    sin1, sin2 = _load(sin, at, is_there), _load(sin, at + HALF, is_there)
    turned1 = tl.where(is_value, first, first * cos1 + second * sin1)
    turned2 = tl.where(is_value, second, second * cos2 + first * sin2)
    at = (row[:, None] * heads + head) * D + column[None, :]
    tl.store(out + at, turned1, mask=is_there)
    tl.store(out + at + HALF, turned2, mask=is_there)
    if REST != 0:
        rest = _normed_part(rest, rstd, weight, TURNED, D - TURNED, is_value, dtype, REST, NORM, NORMS_VALUES)
        at = (row[:, None] * heads + head) * D + TURNED + other[None, :]
        tl.store(out + at, rest, mask=is_other)


@triton.jit
def residual_norms(
    x, y, weight, weights, out, outs, N, eps, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """out = x + norm of y under its weight, and the norms of out under each of `weights` (None: no weight)."""
    _, at, is_there = _tile(tl.program_id(0), N, D, ROWS, COLUMNS)
    branch = _load(y, at, is_there)
    total = _load(x, at, is_there) + branch * _rstd(branch * branch, eps, D) * _weight(weight, D, COLUMNS)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=is_there)
    wide = rounded.to(tl.float32)
    normed = wide * _rstd(wide * wide, eps, D)
    for i in tl.static_range(len(outs)):
        if weights[i] is None:
            tl.store(outs[i] + at, normed, mask=is_there)
        else:
            tl.store(outs[i] + at, normed * _weight(weights[i], D, COLUMNS), mask=is_there)


@triton.jit
def layer_end(
    x, dense, slots, index, dense_weight, slots_weight, weight, scalar, step, out, N, E, eps,
    TOP_K: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = (x + norm of (norm of dense + norm of routed)) * scalar, routed: the sum of a token's slots [N, TOP_K, D].

    index: the expert of each slot; slots whose index is none of the E count for nothing (None: every slot counts).
    """
    row, at, is_there = _tile(tl.program_id(0), N, D, ROWS, COLUMNS)
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
    mlp = _load(dense, at, is_there)
    both += mlp * _rstd(mlp * mlp, eps, D) * _weight(dense_weight, D, COLUMNS)
    total = _load(x, at, is_there) + both * _rstd(both * both, eps, D) * _weight(weight, D, COLUMNS)
    if scalar is not None:
        total *= _scalar_of(scalar, step, row, N)
    tl.store(out + at, total, mask=is_there)


@triton.jit
def routed_tokens(
    x, scale, root, weight, expert_scale, index, of_expert, N,
    E: tl.constexpr, D: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """index [N, TOP_K]: the experts of the largest scores, the largest first; of_expert: their softmax times
    expert_scale.

    Scores: x times scale times root, rounded to x's dtype after each factor, times weight [E, D]. COLUMNS and CHOICES:
    E and TOP_K rounded up to powers of two. Of equal scores the expert with the lower number comes first.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert, inner, choice = tl.arange(0, COLUMNS), tl.arange(0, INNER), tl.arange(0, CHOICES)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, D, INNER):
        d = start + inner
        is_there = (row < N)[:, None] & (d < D)[None, :]
        a = tl.load(x + row[:, None] * D + d[None, :], mask=is_there, other=0.0)
        factor = tl.load(scale + d, mask=d < D, other=0.0)
        a = (a.to(tl.float32) * factor.to(tl.float32)[None, :]).to(a.dtype)
        a = (a.to(tl.float32) * root).to(a.dtype)
        at = expert[None, :] * D + d[:, None]
        b = tl.load(weight + at, mask=(expert < E)[None, :] & (d < D)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    left = tl.where((expert < E)[None, :], total.to(x.dtype.element_ty).to(tl.float32), float("-inf"))
    of_all = tl.load(expert_scale + expert, mask=expert < E, other=0.0).to(tl.float32)
    best = tl.full([ROWS, CHOICES], 0, tl.int32)
    score = tl.full([ROWS, CHOICES], float("-inf"), tl.float32)
    factor = tl.zeros([ROWS, CHOICES], tl.float32)
    for i in tl.static_range(TOP_K):
        peak = tl.max(left, 1)
        found = tl.min(tl.where(left == peak[:, None], expert[None, :], NO_EXPERT), 1)
        found = tl.minimum(found, E - 1)  # NaN equals nothing
        is_found = expert[None, :] == found[:, None]
        of_found = tl.sum(tl.where(is_found, of_all[None, :], 0.0), 1)
        left = tl.where(is_found, float("-inf"), left)
        is_choice = (choice == i)[None, :]
        best = tl.where(is_choice, found[:, None], best)
        score = tl.where(is_choice, peak[:, None], score)
        factor = tl.where(is_choice, of_found[:, None], factor)
    share = tl.exp(score - tl.max(score, 1)[:, None])
    share = share / tl.sum(share, 1)[:, None] * factor
    at, is_there = row[:, None] * TOP_K + choice[None, :], (row < N)[:, None] & (choice < TOP_K)[None, :]
    tl.store(index + at, best.to(tl.int64), mask=is_there)
    tl.store(of_expert + at, share, mask=is_there)


@triton.jit
def gated_product(
    x, gate_weight, up_weight, gate_scale, up_scale, out, N,
    D: tl.constexpr, F: tl.constexpr, ACTIVATION: tl.constexpr, HARDWARE: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """out [N, F] = f(x gate^T) * g(x up^T); the weights are [F, D], those in fp8 with scales [F]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, inner = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, INNER)
    rows = tl.minimum(row, N - 1).to(tl.int64)[:, None] * D  # rows and columns too many repeat the last one
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
    at = row.to(tl.int64)[:, None] * F + column[None, :]
    tl.store(out + at, (activated * linear).to(out.dtype.element_ty), mask=is_there)
