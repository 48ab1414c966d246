"""The Triton kernel of layer_end, without gradient: fp32 inside, rounded once."""

from __future__ import annotations

import triton
import triton.language as tl

from blockdiff.kernels.norm_rope.kernels import _load, _rstd, _scalar_of, _tile, _weight


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
