"""Several ops of a layer in one node of the graph, and their walks in one C function where they join: fp32 on a CPU.

What each computes is said by the method of `Kernels` of the same name, which composes it of single ops wherever this
gives None.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.c_library import BLOCKS, call, serves
from blockdiff.kernels.expert_mlp import cpu as experts
from blockdiff.kernels.norm_rope import cpu as norms
from blockdiff.kernels.span_attention.paged import PagedTensor


def _wanted(ctx: Any, first: int, weights: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Memory for the gradients of those weights, inputs `first` and following, that need one."""
    needed = ctx.needs_input_grad[first : first + len(weights)]
    return [torch.empty_like(w) if w is not None and is_so else None for w, is_so in zip(weights, needed, strict=True)]


class _ResidualNorms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, eps: float, weight: Tensor, *weights: Tensor | None) -> Any:
        rows, _ = norms._rows(y)
        rstd = y.new_empty(2, rows)
        outs = _residual_norms(x, y, eps, weight, weights, rstd)
        ctx.save_for_backward(outs[0], y, rstd, weight, *weights)
        ctx.set_materialize_grads(False)
        return outs

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        total, y, rstd, weight, *weights = ctx.saved_tensors
        rows, width = norms._rows(y)
        dense = [None if grad is None else grad.contiguous() for grad in (grad_sum, *grads)]
        if all(grad is None for grad in dense[1:]):
            dense[1] = torch.zeros_like(total)
        of_weight, *of_weights = _wanted(ctx, 3, (weight, *weights))
        each = [part for of_one in zip(dense[1:], weights, of_weights, strict=True) for part in of_one]
        each += [None] * (3 * norms.MOST - len(each))
        grad_x, grad_y = torch.empty_like(y), torch.empty_like(y)
        into = (y.new_empty(1 + norms.MOST, BLOCKS, width), grad_x, grad_y)
        of_sum = (dense[0], total, y, rows, width, rstd, weight, of_weight)
        call("residual_norms_backward", *of_sum, *each, *into)
        return grad_x, grad_y, None, of_weight, *of_weights


def _residual_norms(
    x: Tensor, y: Tensor, eps: float, weight: Tensor, weights: Sequence[Tensor | None], rstd: Tensor | None
) -> tuple[Tensor, ...]:
    total, *outs = (torch.empty_like(y) for _ in range(1 + len(weights)))
    each = [part for pair in zip(weights, outs, strict=True) for part in pair] + [None, None] * (norms.MOST - len(outs))
    call("residual_norms", x, y, *norms._rows(y), eps, weight, rstd, total, *each)
    return total, *outs


def residual_norms(
    x: Tensor, y: Tensor, weight: Tensor, weights: Sequence[Tensor | None], eps: float
) -> tuple[Tensor, ...] | None:
    """See `Kernels.residual_norms`."""
    if not 1 <= len(weights) <= norms.MOST or x.shape != y.shape or not serves(x, y, weight, *weights):
        return None
    x, y = x.contiguous(), y.contiguous()
    if torch.is_grad_enabled():
        outs: tuple[Tensor, ...] = _ResidualNorms.apply(x, y, eps, weight, *weights)
        return outs
    return _residual_norms(x, y, eps, weight, weights, None)


class _LayerEnd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dense: Tensor, routed: Tensor, eps: float, scalar: Tensor | None, *weights: Tensor
    ) -> Tensor:
        rstd = x.new_empty(3, norms._rows(x)[0])
        ctx.save_for_backward(dense, routed, rstd, scalar, *weights)
        return _layer_end(x, dense, routed, eps, scalar, weights, rstd)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dense, routed, rstd, scalar, *weights = ctx.saved_tensors
        grad, (rows, width) = grad.contiguous(), norms._rows(dense)
        grad_x = None if scalar is None else torch.empty_like(grad)
        grad_dense, grad_routed = torch.empty_like(dense), torch.empty_like(routed)
        of_weights = _wanted(ctx, 5, weights)
        given = (grad, dense, routed, rows, width, rstd, *weights, scalar, norms._step(scalar))
        into = (rstd.new_empty(3, BLOCKS, width), grad_x, grad_dense, grad_routed, *of_weights)
        call("layer_end_backward", *given, *into)
        return grad if grad_x is None else grad_x, grad_dense, grad_routed, None, None, *of_weights


def _layer_end(
    x: Tensor, dense: Tensor, routed: Tensor, eps: float, scalar: Tensor | None, weights: Sequence[Tensor],
    rstd: Tensor | None,
) -> Tensor:  # fmt: skip
    out = torch.empty_like(x)
    call("layer_end", x, dense, routed, *norms._rows(x), eps, *weights, scalar, norms._step(scalar), rstd, out)
    return out


def layer_end(
    x: Tensor, dense: Tensor, routed: Tensor, weights: tuple[Tensor, Tensor, Tensor], eps: float,
    scalar: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """See `Kernels.layer_end`."""
    is_by_row = scalar is None or scalar.numel() in (1, norms._rows(x)[0])
    is_alike = x.shape == dense.shape and x.numel() == routed.numel()
    if not (is_by_row and is_alike and serves(x, dense, routed, *weights, scalar)):
        return None
    x, dense, routed = x.contiguous(), dense.contiguous(), routed.contiguous()
    scalar = None if scalar is None else scalar.contiguous()
    if torch.is_grad_enabled():
        out: Tensor = _LayerEnd.apply(x, dense, routed, eps, scalar, *weights)
        return out
    return _layer_end(x, dense, routed, eps, scalar, weights, None)


class _Heads(torch.autograd.Function):
    """Queries, keys and values; where the values are the raw keys, autograd adds up the two gradients of these."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        of_q, of_k, of_v = (x.new_empty(norms._rows(x)[0]) for x in (q, k, v))
        ctx.save_for_backward(q, k, v, of_q, of_k, of_v, q_weight, k_weight, cos, sin)
        return _heads(q, k, v, q_weight, k_weight, cos, sin, eps, (of_q, of_k, of_v))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *rstds, q_weight, k_weight, cos, sin = ctx.saved_tensors
        of_weights = _wanted(ctx, 3, (q_weight, k_weight))
        outs, partial = [], q.new_empty(BLOCKS, q.shape[-1])
        ways = ((q_weight, cos, sin, of_weights[0]), (k_weight, cos, sin, of_weights[1]), (None, None, None, None))
        for x, grad, rstd, (*way, of_weight) in zip((q, k, v), grads, rstds, ways, strict=True):
            grad = grad if grad.stride(-1) == 1 else grad.contiguous()
            outs.append(torch.empty(x.shape, dtype=x.dtype))
            strides = (grad.stride()[:3], x.stride()[:3])
            given = (grad, *strides[0], x, *strides[1], *x.shape, rstd, *way)
            call("norm_rope_backward", *given, partial, outs[-1], of_weight)
        return *outs, *of_weights, None, None, None


def _heads(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    rstds: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_q, of_k, of_v = rstds
    return (
        norms._norm_rope(q, q_weight, cos, sin, eps, of_q),
        norms._norm_rope(k, k_weight, cos, sin, eps, of_k),
        norms._norm_rope(v, None, None, None, eps, of_v),
    )


def attention_heads(
    q: Tensor, k: Tensor, v: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float, form: str, norms_values: bool, into: tuple[PagedTensor, ...] | None,
) -> tuple[Tensor, Tensor, Tensor | None] | None:  # fmt: skip
    """See `layers.attention.heads`."""
    if form != "plain" or into is not None or not norms_values or v is None or q_weight is None or k_weight is None:
        return None
    if cos.shape[-1] != q.shape[-1] or not serves(q, k, v, q_weight, k_weight, cos, sin):
        return None
    B, T, _, d = q.shape
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    cos, sin = (x.expand(B, T, d).contiguous() for x in (cos, sin))
    if torch.is_grad_enabled():
        made: tuple[Tensor, Tensor, Tensor] = _Heads.apply(q, k, v, q_weight, k_weight, cos, sin, eps)
        return made
    return _heads(q, k, v, q_weight, k_weight, cos, sin, eps, (None, None, None))


class _RoutedTokens(torch.autograd.Function):
    """Of tokens [N, D]: the products with the router's scaled matrix [E, D], and their choice of experts."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, root: float, weight: Tensor, expert_scale: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        factor = scale * root
        scaled = weight * factor
        index, share, out = experts._route(torch.mm(x, scaled.t()), expert_scale, k)
        ctx.save_for_backward(x, weight, factor, scaled, expert_scale, index, share)
        ctx.root = root
        ctx.mark_non_differentiable(index)
        return index, out

    @staticmethod
    def backward(ctx: Any, _: Any, grad_Nk: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, factor, scaled, expert_scale, index, share = ctx.saved_tensors
        of_scores, of_expert_scale = experts._route_backward(grad_Nk, index, share, expert_scale)
        of_x = torch.mm(of_scores, scaled) if ctx.needs_input_grad[0] else None
        of_scale = of_weight = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[3]:
            of_scaled = torch.mm(of_scores.t(), x)
            of_scale, of_weight = (of_scaled * weight).sum(0).mul_(ctx.root), of_scaled.mul_(factor)
        return of_x, of_scale, None, of_weight, of_expert_scale, None


def routed_tokens(
    x_ND: Tensor, scale_D: Tensor, root: float, weight_ED: Tensor, expert_scale_E: Tensor, k: int
) -> tuple[Tensor, Tensor] | None:
    """See `Kernels.routed_tokens`."""
    given = x_ND, scale_D, root, weight_ED, expert_scale_E, k
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    if not serves(x_ND, scale_D, weight_ED, expert_scale_E):
        return None
    routes: tuple[Tensor, Tensor] = _RoutedTokens.apply(*given)
    return routes


# Not the module itself, which no copy of a model could hold.
JOINED = SimpleNamespace(
    attention_heads=attention_heads, residual_norms=residual_norms, routed_tokens=routed_tokens, layer_end=layer_end
)
