"""The divergence of predictions from given ones over the whole vocabulary, chunk by chunk of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.vocabulary.cross_entropy import CrossEntropy
from blockdiff.kernels.vocabulary.logits import logits

Head = tuple[Tensor, float | None]  # a table [V, D] that makes logits, and their cap


def divergence(
    hidden_ND: Tensor,
    given_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    given_head: Head | None = None,
    top: int | None = None,
) -> Tensor:
    """Return KL(p || q) in nats, [N] in at least fp32: p is predicted from given_ND, q from hidden_ND.

    given_head: the table and cap of p's logits (None: q's); it has as many tokens and may have another width. top: keep
    only p's likeliest tokens, renormalised (None: all). Gradients flow to hidden_ND, and to q's table if that
    trains; p is constant.
    """
    table, cap = (table_VD, softcap) if given_head is None else given_head
    given_ND, table = in_autocast(given_ND.detach(), table.detach())
    loss_N: Tensor = CrossEntropy.apply(hidden_ND, table_VD, given_ND, softcap, None, None, _chunk_of(table, cap, top))
    return loss_N


def _chunk_of(given_table: Tensor, given_softcap: float | None, top: int | None) -> Callable[..., Any]:
    """Return the function that computes a chunk for `CrossEntropy`."""

    def of_chunk(
        hidden: Tensor, table: Tensor, target: Tensor, softcap: float | None, *_: object
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the divergences, the normaliser 1, and the gradients q - p of the logits."""
        z, given_z = logits(hidden, table, softcap), logits(target, given_table, given_softcap)
        if top is not None and top < given_z.shape[-1]:
            likeliest = given_z.topk(top)
            given_z = given_z.fill_(-float("inf")).scatter_(-1, likeliest.indices, likeliest.values)
        log_p, log_q = (x.log_softmax(-1) for x in (given_z, z))
        p = log_p.exp()
        if top is not None:
            log_p.masked_fill_(p == 0, 0.0)  # 0 log 0 = 0
        loss = (p * (log_p - log_q)).sum(-1)
        grad = log_q.exp_().sub_(p)
        if softcap is not None:
            grad *= 1 - (z / softcap) ** 2
        return loss, torch.ones_like(loss), grad

    return of_chunk
