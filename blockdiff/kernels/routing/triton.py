"""routed_tokens in Triton: launchers as registered ops, the gradient of tokens, and the public function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.autocast import is_on
from blockdiff.kernels.launch import Launch, Unserved, cached_by_sizes, check_dtypes, empty, registered
from blockdiff.kernels.routing import kernels
from blockdiff.kernels.tiles import elementwise, power_of_2, precision_of, tile_for, tile_of

PARTS = 8  # of every score's sum; constant, so that a token's bits do not depend on the number of tokens


@registered("routed_tokens")
def _routed_tokens(
    x: Tensor, scale: Tensor, root: float, weight: Tensor, expert_scale: Tensor, k: int, keeps_shares: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Return experts int64 [N, k], their fp32 weights, and with `keeps_shares` the weights without experts' scales."""
    E, D = weight.shape
    N = x.numel() // D
    index, of_expert = x.new_empty(N, k, dtype=torch.int64), x.new_empty(N, k, dtype=torch.float32)
    shares = of_expert.new_empty(N if keeps_shares else 0, k)
    yield index, of_expert, shares
    score, choose, columns = _routed_tokens_of(N, E, D, k, x.dtype, x.device)
    scores = x.new_empty(PARTS, N, columns, dtype=torch.float32)
    x = x.contiguous()
    score(x, scale, root, weight.contiguous(), scores, N)
    choose(x, scores, expert_scale, index, of_expert, shares if keeps_shares else None, N)


@cached_by_sizes
def _routed_tokens_of(
    N: int, E: int, D: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[Launch, Launch, int]:
    """Return the launches that score and choose experts, and the number of columns of the scores."""
    tile = tile_for("routed_tokens", dtype, device, E).fitted(columns=E, inner=D)
    constants = dict(E=E, D=D, PARTS=PARTS, PRECISION=precision_of(dtype), **tile.options)
    score = Launch(kernels.router_scores, (tile.grid(N)[0], PARTS), **constants)
    choosing = elementwise(tile.columns, 512)
    constants = dict(E=E, TOP_K=k, CHOICES=power_of_2(k), PARTS=PARTS, **choosing.options)
    return score, Launch(kernels.routed_tokens, choosing.grid(N)[:1], **constants), tile.columns


@registered("routed_tokens_backward")
def _routed_tokens_backward(
    index: Tensor, shares: Tensor, weight: Tensor, expert_scale: Tensor, grad: Tensor
) -> Iterator[Tensor]:
    """Return the gradient of the scores [N, E], from the gradient of the experts' weights [N, k]."""
    (N, k), E = index.shape, weight.shape[0]
    of_scores = weight.new_empty(N, E)
    yield of_scores
    _backward_of(N, E, k)(index, shares, expert_scale, grad.contiguous(), of_scores, N)


@cached_by_sizes
def _backward_of(N: int, E: int, k: int) -> Launch:
    tile = elementwise(E)
    return Launch(kernels.routed_tokens_backward, tile.grid(N), E=E, TOP_K=k, **tile.options)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, scale, ctx.root, weight, expert_scale, *_ = inputs
    ctx.shape = x.shape
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(scale, weight, expert_scale, output[0], output[2])


def _gradients(ctx: Any, _index: None, grad: Tensor | None, _shares: None) -> tuple[Any, ...]:
    grad_x = None
    if grad is not None:
        scale, weight, expert_scale, index, shares = ctx.saved_tensors
        of_scores = _routed_tokens_backward(index, shares, weight, expert_scale, grad)
        grad_x = empty(weight, len(of_scores), weight.shape[1])
        grad_x = grad_x.addmm_(of_scores, weight, beta=0, alpha=ctx.root).mul_(scale).view(ctx.shape)
    return grad_x, *[None] * 6


_routed_tokens.register_autograd(_gradients, setup_context=_save)


def routed_tokens(
    x: Tensor, scale_D: Tensor, root: float, weight_ED: Tensor, expert_scale_E: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Return each token's k best experts by `(x * scale * root) weight^T`, int64 [N, k], and their fp32 weights [N, k].

    The weights are the softmax over the k scores times the experts' scales. Only the tokens get a gradient. Raises
    Unserved if the router trains, under autocast, and for more experts than the table of tiles lists.
    """
    needs_gradient = torch.is_grad_enabled()
    if is_on(x) or (needs_gradient and any(each.requires_grad for each in (scale_D, weight_ED, expert_scale_E))):
        raise Unserved("routed_tokens in Triton has a gradient for tokens alone, and no autocast")
    check_dtypes("routed_tokens", x, weight_ED)
    tile_of("routed_tokens", x, len(weight_ED))
    keeps_shares = needs_gradient and x.requires_grad
    index_Nk, weight_Nk, _ = _routed_tokens(x, scale_D, root, weight_ED, expert_scale_E, k, keeps_shares)
    return index_Nk, weight_Nk
