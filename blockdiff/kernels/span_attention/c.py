"""span_attention by the C functions in forward.c and backward.c, for fp32 on a CPU; they read only visible keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.c_library import call, serves_products
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.kernels.span_attention.paged import PagedTensor, PrefixTensor, visible_columns
from blockdiff.spans import Spans, Sweep

STEP, LARGEST = 16, 512  # the size of a head is a multiple of STEP, at most LARGEST
LANES = 48  # rows of a block, as in products.h
TASKS = 16  # if a backward has fewer kv heads (over all rows), it splits the queries of each


def span_attention(
    q_BThd: Tensor,
    prefix_k: PrefixTensor | None,
    prefix_v: PrefixTensor | None,
    own_k: Tensor,
    own_v: Tensor,
    spans: Spans | Sweep,
    scale: float,
) -> Tensor:
    """Attend over cached (`prefix`) and own keys, each query to its two spans; a sweep is one C call."""
    if not _takes(q_BThd, own_k, own_v, *map(_stored, (prefix_k, prefix_v))):
        raise Unserved(f"span_attention in C takes fp32 tensors of a CPU, heads of {STEP} n up to {LARGEST}")
    if isinstance(spans, Sweep):
        return _attended(q_BThd, None, own_k, own_v, spans.joint_BT4, scale, spans.columns, spans.stop_gradient)
    (dense_k, _), (dense_v, spans) = _dense(prefix_k, spans), _dense(prefix_v, spans)
    bounds = None if spans.sees_all else spans.bounds_BT4
    prefix = None if dense_k is None or dense_v is None else (dense_k, dense_v)
    return _attended(q_BThd, prefix, own_k, own_v, bounds, scale)


def _takes(q_BThd: Tensor, *tensors: Tensor | None) -> bool:
    return q_BThd.shape[-1] % STEP == 0 and q_BThd.shape[-1] <= LARGEST and serves_products(q_BThd, *tensors)


def _stored(prefix: PrefixTensor | None) -> Tensor | None:
    """Return the tensor in which a prefix is stored: itself, or the pool of its pages."""
    return prefix.pool_NPKd if isinstance(prefix, PagedTensor) else prefix


def _dense(prefix: PrefixTensor | None, spans: Spans) -> tuple[Tensor | None, Spans]:
    """Return a prefix as a dense tensor [B, columns, K, d] (None without a prefix), and the spans over its columns."""
    if not isinstance(prefix, PagedTensor):
        return prefix, spans
    if prefix.gathered is None:
        return prefix.dense(), spans
    visible = visible_columns(prefix.pages, spans)
    return prefix.gathered.prefix(prefix, visible), visible.spans or spans


def _attended(
    q: Tensor, prefix: tuple[Tensor, Tensor] | None, k: Tensor, v: Tensor, bounds: Tensor | None, scale: float,
    columns: int = 0, stop_gradient: bool = False,
) -> Tensor:  # fmt: skip
    """Compute the output [B, T, h, d]. prefix: its keys and values. columns, stop_gradient: as in `Sweep`."""
    prefix_k, prefix_v = (None, None) if prefix is None else prefix
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, prefix_k, prefix_v, k, v)):
        out: Tensor = _Attention.apply(q, prefix_k, prefix_v, k, v, bounds, scale, columns, stop_gradient)
        return out
    return _Call(q, prefix_k, prefix_v, k, v, bounds, scale, columns).forward(None)


class _Call:
    """One call of the C functions: the tensors in a layout that they read, and the array of their sizes and strides.

    columns: in a sweep, the number of the call's first tokens that serve as prefix, in place of prefix_k and prefix_v.
    """

    def __init__(
        self,
        q: Tensor,
        prefix_k: Tensor | None,
        prefix_v: Tensor | None,
        k: Tensor,
        v: Tensor,
        bounds: Tensor | None,
        scale: float,
        columns: int,
    ):
        (B, T, h, d), K = q.shape, k.shape[2]
        self.q, self.scale, self.bounds = q if q.stride(3) == 1 else q.contiguous(), scale, bounds
        self.k, self.v = _equally_strided(k, v)
        self.prefix_k, self.prefix_v = self.k, self.v
        self.tokens = columns, k.shape[1]
        if prefix_k is not None and prefix_v is not None:
            self.prefix_k, self.prefix_v = _equally_strided(prefix_k, prefix_v)
            self.tokens = prefix_k.shape[1], k.shape[1]
        if bounds is not None and bounds.stride(2) != 1:
            self.bounds = bounds.contiguous()
        self.chunks = max(1, -(-TASKS // max(1, B * K)))
        self.shape_B = B, K, d
        self.layout = torch.tensor(
            [
                *(B, T, K, h // K, d, self.chunks),
                *self.q.stride()[:3],
                *((0, 0) if self.bounds is None else self.bounds.stride()[:2]),
                *(self.tokens[0], *self.prefix_k.stride()[:3], k.shape[1] if columns else self.tokens[0]),
                *(self.tokens[1], *self.k.stride()[:3], self.tokens[1]),
            ]
        )
        blocks = B * T * -(-h // (K * LANES)) if K else 0
        self.room = torch.empty(B + 1 + 4 * B * K * self.chunks + 2 * blocks, dtype=torch.int64)

    def inputs(self) -> tuple[Tensor | int | float | None, ...]:
        """Return the arguments with which the calls of the C forward and backward begin."""
        return (self.layout, self.q, self.prefix_k, self.prefix_v, self.k, self.v, self.bounds, self.scale)

    def forward(self, lse: Tensor | None) -> Tensor:
        """Compute the output [B, T, h, d], and write the log-sum-exp of the scores to `lse` [B, T, h], if given."""
        out = self.q.new_empty(self.q.shape)
        call("span_attention", *self.inputs(), out, lse, self.room)
        return out


class _Attention(torch.autograd.Function):
    """Attention without stored scores: the backward recomputes them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, prefix_k: Tensor | None, prefix_v: Tensor | None, k: Tensor, v: Tensor,
        bounds: Tensor | None, scale: float, columns: int, stop_gradient: bool,
    ) -> Tensor:  # fmt: skip
        prepared = _Call(q, prefix_k, prefix_v, k, v, bounds, scale, columns)
        lse = q.new_empty(q.shape[:3])
        out = prepared.forward(lse)
        ctx.scale, ctx.columns, ctx.stop_gradient = scale, columns, stop_gradient
        ctx.save_for_backward(q, prefix_k, prefix_v, k, v, bounds, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, prefix_k, prefix_v, k, v, bounds, out, lse = ctx.saved_tensors
        prepared = _Call(q, prefix_k, prefix_v, k, v, bounds, ctx.scale, ctx.columns)
        grad_q = torch.empty_like(out)
        grad_k, grad_v = k.new_empty(k.shape), v.new_empty(v.shape)
        of_prefix: tuple[Tensor | None, Tensor | None] = None, None
        if ctx.columns and not ctx.stop_gradient:
            of_prefix = grad_k, grad_v
        elif prefix_k is not None and any(ctx.needs_input_grad[1:3]):
            of_prefix = prefix_k.new_empty(prefix_k.shape), prefix_k.new_empty(prefix_k.shape)
        B, K, d = prepared.shape_B
        partial = q.new_empty(B * K * prepared.chunks * 2 * sum(prepared.tokens) * d) if prepared.chunks > 1 else None
        grads = (grad_q, *of_prefix, grad_k, grad_v)
        call(
            "span_attention_backward",
            *prepared.inputs(),
            grad_out.contiguous(),
            out,
            lse,
            *grads,
            partial,
            prepared.room,
        )
        returned = of_prefix if prefix_k is not None else (None, None)
        return grad_q, *returned, grad_k, grad_v, None, None, None, None


def _equally_strided(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values with equal strides over tokens and heads, and heads contiguous; copies if necessary."""
    return (k, v) if k.stride() == v.stride() and k.stride(3) == 1 else (k.contiguous(), v.contiguous())
