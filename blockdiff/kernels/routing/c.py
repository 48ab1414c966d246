"""The op route by the C functions in `expert_mlp/expert_mlp.c`, for fp32 on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.c_library import BLOCKS, call, serves
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.once_differentiable import once_differentiable


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_NE: Tensor, scale_E: Tensor, k: int) -> tuple[Tensor, Tensor]:
        index_Nk, share_Nk, weight_Nk = _route(scores_NE, scale_E, k)
        ctx.save_for_backward(index_Nk, share_Nk, scale_E)
        ctx.mark_non_differentiable(index_Nk)
        return index_Nk, weight_Nk

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any, grad_Nk: Tensor) -> tuple[Tensor | None, ...]:
        index_Nk, share_Nk, scale_E = ctx.saved_tensors
        return *_route_backward(grad_Nk, index_Nk, share_Nk, scale_E), None


def _route_backward(grad_Nk: Tensor, index_Nk: Tensor, share_Nk: Tensor, scale_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the scores and of the scale per expert."""
    (N, k), E = index_Nk.shape, scale_E.shape[0]
    of_scores, of_scale = share_Nk.new_empty(N, E), torch.empty_like(scale_E)
    partial = share_Nk.new_empty(BLOCKS, E)
    saved = (scale_E, index_Nk, share_Nk)
    call("route_backward", grad_Nk.contiguous(), N, E, k, *saved, partial, of_scores, of_scale)
    return of_scores, of_scale


def _route(scores_NE: Tensor, scale_E: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    N, E = scores_NE.shape
    index_Nk = torch.empty(N, k, dtype=torch.int64)
    share_Nk, weight_Nk = scores_NE.new_empty(2, N, k).unbind(0)
    call("route", scores_NE, N, E, k, scale_E, index_Nk, share_Nk, weight_Nk)
    return index_Nk, share_Nk, weight_Nk


def route(scores_NE: Tensor, scale_E: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each token's k best experts, int64 [N, k], and their softmax times scale_E; Unserved unless fp32."""
    if not serves(scores_NE, scale_E):
        raise Unserved("route in C takes fp32 tensors of a CPU")
    scores_NE = scores_NE.contiguous()
    if torch.is_grad_enabled():
        return _Route.apply(scores_NE, scale_E, k)
    index_Nk, _, weight_Nk = _route(scores_NE, scale_E, k)
    return index_Nk, weight_Nk
