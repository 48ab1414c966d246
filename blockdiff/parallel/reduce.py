"""The collectives of tensor parallelism with their gradients: replicated values, sums, log-sum-exps.

An ordinary differentiable all-reduce would multiply gradients by the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, autograd

from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.tensor_pieces import PlannedMesh


def copied(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x, which is equal on all ranks, for use by one rank alone: the backward sums its gradient over ranks."""
    copy: Tensor = _Copied.apply(x, group)
    return copy


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of x over ranks, equal on all; in the backward each rank's x gets the sum's gradient."""
    total: Tensor = _Summed.apply(x, group)
    return total


def merged_log_sum(log_sum_N: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the log-sum-exp [N] over all ranks' parts, equal on all; each rank gets the gradient of its part."""
    merged: Tensor = _MergedLogSum.apply(log_sum_N, group)
    return merged


def stacked(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return every rank's x, [ranks, ...], without gradients; group: None for all processes."""
    everyone = x.new_empty(dist.get_world_size() if group is None else group.size(), *x.shape)
    if not isinstance(group, PlannedMesh):
        dist.all_gather(list(everyone), x.detach().contiguous(), group=group)
    return everyone


class _Copied(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _total(grad, ctx.group), None


class _Summed(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _total(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _MergedLogSum(autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_sum_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        total_N = stacked(log_sum_N, group).logsumexp(0)
        ctx.save_for_backward((log_sum_N - total_N).exp())
        return total_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        (share_N,) = ctx.saved_tensors
        return grad_N * share_N, None


def _total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.contiguous().clone()
    if not isinstance(group, PlannedMesh):
        dist.all_reduce(total, group=group)
    return total
