"""The divergence of predictions from given predictions over the whole vocabulary, chunk by chunk of logits."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.vocabulary.cross_entropy import CrossEntropy
from blockdiff.kernels.vocabulary.logits import logits


def divergence(hidden_ND: Tensor, given_ND: Tensor, table_VD: Tensor, softcap: float | None) -> Tensor:
    """Return KL(p || q) in nats, [N] in at least fp32: p predicted from `given_ND`, q from `hidden_ND`, by one table.

    Gradients flow through q to `hidden_ND` and, if it trains, to the table; p is constant.
    """
    (given_ND,) = in_autocast(given_ND.detach())
    loss_N: Tensor = CrossEntropy.apply(hidden_ND, table_VD, given_ND, softcap, None, None, _divergence_chunk)
    return loss_N


def _divergence_chunk(
    hidden: Tensor, table: Tensor, given_hidden: Tensor, softcap: float | None, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the divergences of a chunk, the normaliser 1, and the gradients q - p of the logits."""
    z = logits(hidden, table, softcap)
    log_p, log_q = (x.log_softmax(-1) for x in (logits(given_hidden, table, softcap), z))
    p = log_p.exp()
    loss = (p * (log_p - log_q)).sum(-1)
    grad = log_q.exp_().sub_(p)
    if softcap is not None:
        grad *= 1 - (z / softcap) ** 2
    return loss, torch.ones_like(loss), grad
