"""span_attention with the C functions of cpu.c for small fp32 calls on a CPU: no mask is ever made; else natively."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.c_library import call, serves
from blockdiff.kernels.linear import cpu as tiles
from blockdiff.kernels.span_attention import native
from blockdiff.kernels.span_attention.paged import PagedTensor, PrefixTensor, ReservedTensor
from blockdiff.spans import Spans


def span_attention(
    q_BThd: Tensor,
    prefix_k: PrefixTensor | None,
    prefix_v: PrefixTensor | None,
    own_k: Tensor,
    own_v: Tensor,
    spans: Spans,
    scale: float,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """See `native.span_attention`."""
    inputs = (q_BThd, prefix_k, prefix_v, own_k, own_v)
    if return_lse or not serves(q_BThd, own_k, own_v):
        return native.span_attention(*inputs, spans, scale, return_lse)
    if torch.is_autocast_enabled("cpu"):
        if not tiles.takes(q_BThd):
            return native.span_attention(*inputs, spans, scale)
        with torch.autocast("cpu", enabled=False):  # heads are fp32 here, and stay it
            return span_attention(*inputs, spans, scale)
    if isinstance(prefix_k, ReservedTensor):
        assert isinstance(prefix_v, ReservedTensor)
        if q_BThd.shape[0] * q_BThd.shape[1] * q_BThd.shape[2] * prefix_k.both_BKSd.shape[2] > native.SMALL_RESERVED:
            return native.span_attention(*inputs, spans, scale)
        k, v = prefix_k.joined(own_k), prefix_v.joined(own_v)
        k_rows, v_rows = k.flatten(0, 1), v.flatten(0, 1)
        q_rows = native._rows_of_queries(q_BThd, k.shape[1])
        weights = _weights(q_rows, k_rows, spans, prefix_k.columns, q_BThd.shape, scale)
        return native._heads_of_rows(torch.bmm(weights, v_rows), *q_BThd.shape[:2])
    if isinstance(prefix_k, PagedTensor):
        prefix_k = prefix_k.dense()
    if isinstance(prefix_v, PagedTensor):
        prefix_v = prefix_v.dense()
    assert not isinstance(prefix_v, ReservedTensor)
    prefix_tokens, (B, T, h, _) = 0 if prefix_k is None else prefix_k.shape[1], q_BThd.shape
    if B * h * T * (prefix_tokens + own_k.shape[1]) > native.SMALL_SCORES:
        return native.span_attention(q_BThd, prefix_k, prefix_v, own_k, own_v, spans, scale)
    k, v = own_k.transpose(1, 2), own_v.transpose(1, 2)
    if prefix_k is not None and prefix_v is not None and prefix_tokens:
        k, v = torch.cat([prefix_k.transpose(1, 2), k], 2), torch.cat([prefix_v.transpose(1, 2), v], 2)
    if torch.is_grad_enabled():
        return _Attention.apply(q_BThd, k, v, spans, prefix_tokens, scale)
    return _attend(q_BThd, k, v, spans, prefix_tokens, scale)[0]


class _Attention(torch.autograd.Function):
    """Scores as one [B*K, g*T, keys] batched product: queries of a group share their key head without repeats."""

    @staticmethod
    def forward(
        ctx: Any, q_BThd: Tensor, k: Tensor, v: Tensor, spans: Spans, prefix_tokens: int, scale: float
    ) -> Tensor:
        out, saved = _attend(q_BThd, k, v, spans, prefix_tokens, scale)
        ctx.save_for_backward(*saved)
        ctx.scale, ctx.shape = scale, q_BThd.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad_BThd: Tensor) -> tuple[Tensor | None, ...]:
        q_rows, k_rows, v_rows, weights = ctx.saved_tensors
        B, T, h, d = ctx.shape
        K, keys = k_rows.shape[0] // B, k_rows.shape[1]
        grad_rows = native._rows_of_queries(grad_BThd, K)
        grad_v = torch.bmm(weights.transpose(1, 2), grad_rows)
        grad_scores = torch.bmm(grad_rows, v_rows.transpose(1, 2))
        call("softmax_backward", grad_scores, weights, weights.numel() // keys, keys, ctx.scale)
        grad_q = torch.bmm(grad_scores, k_rows)
        grad_k = torch.bmm(grad_scores.transpose(1, 2), q_rows)
        grad_k, grad_v = (g.view(B, K, keys, d) for g in (grad_k, grad_v))
        return grad_q.view(B, h, T, d).transpose(1, 2), grad_k, grad_v, None, None, None


def _attend(
    q_BThd: Tensor, k: Tensor, v: Tensor, spans: Spans, prefix_tokens: int, scale: float
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output for keys and values [B, K, keys, d], and what its backward needs.

    Queries that see nothing have zero weights and so zero gradients.
    """
    (B, T), K = q_BThd.shape[:2], k.shape[1]
    q_rows = native._rows_of_queries(q_BThd, K)
    k_rows, v_rows = (x.flatten(0, 1).contiguous() for x in (k, v))
    weights = _weights(q_rows, k_rows, spans, prefix_tokens, q_BThd.shape, scale)
    return native._heads_of_rows(torch.bmm(weights, v_rows), B, T), (q_rows, k_rows, v_rows, weights)


def _weights(
    q_rows: Tensor, k_rows: Tensor, spans: Spans, prefix_tokens: int, shape: tuple[int, ...], scale: float
) -> Tensor:
    """The weight of every key [B*K, group*T, keys]."""
    (B, T, h, _), (heads, keys) = shape, k_rows.shape[:2]
    weights, K = torch.bmm(q_rows, k_rows.transpose(1, 2)), heads // B
    bounds: Tensor | None = None
    strides = (0, 0)
    if not spans.sees_all:
        bounds = spans.bounds_BT4 if spans.bounds_BT4.stride(2) == 1 else spans.bounds_BT4.contiguous()
        strides = (bounds.stride(0) if bounds.shape[0] > 1 else 0, bounds.stride(1) if bounds.shape[1] > 1 else 0)
    call("span_softmax", weights, B, K, h // K, T, keys, prefix_tokens, bounds, *strides, scale)
    return weights
