"""The divergence of predictions from given ones over the whole vocabulary, chunk by chunk of logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.kernels.vocabulary.logits import chunks, logits


class _Divergence(torch.autograd.Function):
    """The divergences, whose gradient q - p of the logits is multiplied with the table at once."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, given_ND: Tensor, table_VD: Tensor, softcap: float | None) -> Tensor:
        hidden, given, table = in_autocast(hidden_ND, given_ND, table_VD)
        loss_N = hidden.new_empty(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
        grad_ND = torch.empty_like(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in chunks(hidden, table.shape[0]):
                z = logits(hidden[rows], table, softcap)
                log_p, log_q = (x.log_softmax(-1) for x in (logits(given[rows], table, softcap), z))
                p = log_p.exp()
                loss_N[rows] = (p * (log_p - log_q)).sum(-1)
                grad = log_q.exp_().sub_(p)
                if softcap is not None:
                    grad *= 1 - (z / softcap) ** 2
                torch.mm(grad.to(table.dtype), table, out=grad_ND[rows])
        ctx.save_for_backward(grad_ND)
        ctx.dtype = hidden_ND.dtype
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_N: Tensor) -> tuple[Tensor | None, ...]:
        (grad_ND,) = ctx.saved_tensors
        return (grad_ND * grad_loss_N[:, None]).to(ctx.dtype), None, None, None


def divergence(hidden_ND: Tensor, given_ND: Tensor, table_VD: Tensor, softcap: float | None) -> Tensor:
    """KL(p || q) in nats, [N] in fp32 at least: p is predicted from `given_ND`, q from `hidden_ND` by the same table.

    The table stands still, and so does what is given: a gradient flows to `hidden_ND` alone.
    """
    loss_N: Tensor = _Divergence.apply(hidden_ND, given_ND, table_VD, softcap)
    return loss_N
