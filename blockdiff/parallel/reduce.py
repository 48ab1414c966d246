"""The pair of functions that tensor parallelism stands on: what is the same on all ranks, and what is a sum over them.

With an ordinary all-reduce in their place gradients would come out multiplied by the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, autograd


def copied(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x, which all ranks have, as each goes on alone with it: its gradient is the sum of theirs."""
    copy: Tensor = _Copied.apply(x, group)
    return copy


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks of each one's x, with which all go on alike: its gradient is that of each x."""
    total: Tensor = _Summed.apply(x, group)
    return total


class _Copied(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _total(grad, ctx.group), None


class _Summed(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _total(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _total(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total
