"""Cross-entropy of hidden states against a table in plain torch, chunk by chunk of logits, and its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast, upcast
from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.kernels.vocabulary.logits import chunks, fits, logits


class CrossEntropy(torch.autograd.Function):
    """Loss per token. `of_chunk` computes a chunk like `cross_entropy_chunk`.

    The gradient of the logits is G / total; the division is applied after the matrix products. If the table is frozen,
    the forward computes the hidden states' gradient chunk by chunk. If it trains, G is stored if it fits in one chunk,
    and recomputed in the backward otherwise.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        table_VD: Tensor,
        target_N: Tensor | None,
        softcap: float | None,
        observed_N: Tensor | None,
        bonus_N: Tensor | None,
        of_chunk: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:
        hidden, table = in_autocast(hidden_ND, table_VD)
        N, V = hidden.shape[0], table.shape[0]
        wants_hidden, wants_table = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden and not wants_table else None
        all_G = hidden.new_empty(N, V) if wants_table and fits(N, V, hidden.dtype) else None
        loss_N = hidden.new_empty(N, dtype=torch.promote_types(hidden.dtype, torch.float32))
        total_N = torch.empty_like(loss_N)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in chunks(hidden, V):
                into = None if all_G is None else all_G[rows]
                loss_N[rows], total_N[rows], grad = of_chunk(
                    hidden[rows],
                    table,
                    None if target_N is None else target_N[rows],
                    softcap,
                    _rows_of(observed_N, bonus_N, rows),
                    grad_hidden is not None or all_G is not None,
                    into,
                )
                if grad_hidden is not None:
                    torch.mm(grad.to(table.dtype), table, out=grad_hidden[rows]).div_(total_N[rows, None])
                if into is not None and grad is not into:
                    into.copy_(grad)
        ctx.of_chunk, ctx.softcap, ctx.dtypes = of_chunk, softcap, (hidden_ND.dtype, table_VD.dtype)
        if grad_hidden is not None:
            ctx.save_for_backward(grad_hidden)
        elif wants_table:
            ctx.save_for_backward(hidden, table, target_N, total_N, all_G, observed_N, bonus_N)
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_N: Tensor) -> tuple[Tensor | None, ...]:
        wants_hidden, wants_table = ctx.needs_input_grad[:2]
        if not wants_table:
            (grad_hidden,) = ctx.saved_tensors
            return (grad_hidden * grad_loss_N[:, None]).to(ctx.dtypes[0]), *[None] * 6
        hidden, table, target_N, total_N, all_G, observed_N, bonus_N = ctx.saved_tensors
        factor_N1 = (grad_loss_N / total_N)[:, None]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_table = torch.zeros_like(table, dtype=torch.promote_types(table.dtype, torch.float32))
        weighted = (hidden * factor_N1).to(hidden.dtype)
        all_rows = [slice(0, hidden.shape[0])]
        for rows in chunks(hidden, table.shape[0]) if all_G is None else all_rows:
            if all_G is None:
                favoured = _rows_of(observed_N, bonus_N, rows)
                target = None if target_N is None else target_N[rows]
                *_, grad = ctx.of_chunk(hidden[rows], table, target, ctx.softcap, favoured, True)
                grad = grad.to(table.dtype)
            else:
                grad = all_G
            if grad_hidden is not None:
                torch.mm(grad, table, out=grad_hidden[rows]).mul_(factor_N1[rows])
            if grad_table.dtype == grad.dtype:
                grad_table.addmm_(grad.t(), weighted[rows])
            else:
                grad_table.add_(grad.t() @ weighted[rows])
        grad_hidden = None if grad_hidden is None else grad_hidden.to(ctx.dtypes[0])
        return grad_hidden, grad_table.to(ctx.dtypes[1]), *[None] * 5


def _rows_of(observed_N: Tensor | None, bonus_N: Tensor | None, rows: slice) -> tuple[Tensor, Tensor] | None:
    return None if observed_N is None or bonus_N is None else (observed_N[rows], bonus_N[rows])


def cross_entropy_chunk(
    hidden: Tensor,
    table: Tensor,
    target: Tensor | None,
    softcap: float | None,
    favoured: tuple[Tensor, Tensor] | None,
    with_gradient: bool,
    _: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the normaliser `total` and, with gradient, G = total * dloss/dz of a chunk.

    Without a target the loss is the log-sum-exp. Two buffers of the logits' size are used. The last argument is a
    buffer for G, which other implementations may fill and return; this one ignores it.

    Capped logits are within [-cap, cap], so for caps up to 40 exp needs no shift by the maximum (e^40 * V < 1e24). A
    bonus b multiplies the exponential of the observed token by e^b, which changes two numbers per row.
    """
    z, target = upcast(F.linear(hidden, table)), None if target is None else target[:, None]
    t = None if softcap is None else z.div_(softcap).tanh_()
    observed, bonus = (None, None) if favoured is None else (x[:, None] for x in favoured)
    if t is None or softcap is None or softcap > 40:
        z = z if t is None or softcap is None else t * softcap
        if observed is not None and bonus is not None:
            z.scatter_(1, observed, z.gather(1, observed) + bonus)
        of_target = 0.0 if target is None else z.gather(1, target)
        peak = z.amax(-1, keepdim=True)
        e = z.sub_(peak).exp_()
        total = e.sum(-1, keepdim=True)
        loss = total.log() + peak - of_target
    else:
        of_target = 0.0 if target is None else t.gather(1, target) * softcap
        e = (t * softcap).exp_()
        total = e.sum(-1, keepdim=True)
        if observed is not None and bonus is not None:
            of_observed = e.gather(1, observed)
            more = of_observed * bonus.expm1()
            e.scatter_(1, observed, of_observed + more)
            total += more
            if target is not None:
                of_target += bonus * (observed == target)
        loss = total.log() - of_target
    if with_gradient:
        if target is not None:
            e.scatter_(1, target, e.gather(1, target).sub_(total))
        if t is not None:
            e.mul_(torch.addcmul(t.new_ones(()), t, t, value=-1.0, out=t))  # tanh' = 1 - tanh^2
    return loss.squeeze(-1), total.squeeze(-1), e


def linear_cross_entropy(
    hidden_ND: Tensor,
    table_VD: Tensor,
    target_N: Tensor | None,
    softcap: float | None,
    observed_N: Tensor | None = None,
    bonus_N: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy of every token in nats, [N] in at least fp32; without targets the log-sum-exp.

    bonus_N (fp32, 0 to 40) is added to the soft-capped logit of token observed_N (int64) before the softmax; both or
    neither. One chunk of logits is in memory at a time.
    """
    arguments = hidden_ND, table_VD, target_N, softcap, observed_N, bonus_N
    loss_N: Tensor = CrossEntropy.apply(*arguments, cross_entropy_chunk)
    return loss_N


@torch.no_grad()
def token_scores(
    hidden_ND: Tensor,
    table_VD: Tensor,
    target_N: Tensor,
    softcap: float | None,
    observed_N: Tensor | None = None,
    bonus_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy [N] in at least fp32 and the argmax int64 [N] of the same logits; without gradients.

    observed_N, bonus_N: as in `linear_cross_entropy`; the argmax, too, is of the logits with the bonus.
    """
    hidden, table = in_autocast(hidden_ND, table_VD)
    loss_N = hidden.new_empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32))
    argmax_N = torch.empty_like(target_N)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in chunks(hidden, table.shape[0]):
            z = logits(hidden[rows], table, softcap)
            favoured = _rows_of(observed_N, bonus_N, rows)
            if favoured is not None:
                observed = favoured[0][:, None]
                z.scatter_(1, observed, z.gather(1, observed) + favoured[1][:, None])
            peak, argmax_N[rows] = z.max(-1)
            of_target = z.gather(-1, target_N[rows, None]).squeeze(-1) - peak
            loss_N[rows] = z.sub_(peak[:, None]).exp_().sum(-1).log() - of_target
    return loss_N, argmax_N
