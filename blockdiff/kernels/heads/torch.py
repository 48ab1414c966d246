"""attention_heads, composed of the ops for norms and RoPE."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.kernels.heads import HeadNorms, Norm
from blockdiff.kernels.norm_rope.torch import turned
from blockdiff.kernels.op import Ops
from blockdiff.kernels.span_attention.paged import PagedTensor

Rope = tuple[Tensor, ...]  # cos and sin


def attention_heads(
    ops: Ops, q_BThd: Tensor, k: Tensor, v: Tensor | None, norms: HeadNorms, rope: Rope,
    into: tuple[PagedTensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return queries and keys after their norms and RoPE, and values, normed or unchanged.

    k, v: [B, T, K, d] (v None: no values); the queries belong to the last of these tokens, or all. rope: cos and sin
    [B, T, r] of `layers.rope.angles`, which rotate the first r numbers of every head. into: pages that keys and values
    are written to; the returned keys and values are then empty, [B, 0, K, d].
    """
    first = k.shape[1] - q_BThd.shape[1]
    if norms.norms_values and v is not None:
        (v,) = ops.rms_norms(v, (None,), norms.eps)
    q = _normed_and_turned(ops, q_BThd, norms.q_norm, (rope[0][:, first:], rope[1][:, first:]) if first else rope)
    k = _normed_and_turned(ops, k, norms.k_norm, rope)
    if into is None:
        return q, k, v
    return q, into[0].write(k), None if v is None else into[1].write(v)


def _normed_and_turned(ops: Ops, x_BThd: Tensor, norm: Norm | None, rope: Rope) -> Tensor:
    # fp32 needs no cast between the norm and its weight; norm_rope rotates whole heads only
    is_direct = norm is not None and (norm.form == "direct" or (norm.form == "cast" and x_BThd.dtype is torch.float32))
    if norm is not None and is_direct and rope[0].shape[-1] == x_BThd.shape[-1]:
        return ops.norm_rope(x_BThd, norm.gain, *rope, norm.eps)
    return turned(x_BThd if norm is None else norm(x_BThd), *rope)
