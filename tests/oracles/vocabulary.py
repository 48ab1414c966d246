"""The oracle of the vocabulary ops: all logits at once, autograd for the gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(hidden_ND: Tensor, table_VD: Tensor, softcap: float | None) -> Tensor:
    """`softcap * tanh(h E^T / softcap)`, [N, V]."""
    z = hidden_ND @ table_VD.T
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def linear_cross_entropy(
    hidden_ND: Tensor,
    table_VD: Tensor,
    target_N: Tensor | None,
    softcap: float | None,
    observed_N: Tensor | None = None,
    bonus_N: Tensor | None = None,
) -> Tensor:
    """-log softmax(z + bonus on the observed token)[target], nats [N]; log-sum-exp without targets."""
    z = logits(hidden_ND, table_VD, softcap)
    if observed_N is not None and bonus_N is not None:
        z = z + F.one_hot(observed_N, z.shape[-1]) * bonus_N[:, None].to(z.dtype)
    return z.logsumexp(-1) if target_N is None else F.cross_entropy(z, target_N, reduction="none")


def log_sums(hidden_ND: Tensor, table_VD: Tensor, softcap: float | None, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and maximum of z / T, [N] each."""
    z = logits(hidden_ND, table_VD, softcap) / temperature
    return z.logsumexp(-1), z.amax(-1)


def soft_embedding(hidden_ND: Tensor, table_VD: Tensor, softcap: float | None, temperature: float) -> Tensor:
    """softmax(z / T) E, [N, D]."""
    return (logits(hidden_ND, table_VD, softcap) / temperature).softmax(-1) @ table_VD


def log_probabilities(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor,
    is_allowed_NV: Tensor | None = None,
) -> Tensor:
    """log softmax(z / T) over the allowed tokens, nats [N, V]; -inf for the others."""
    z = logits(hidden_ND, table_VD, softcap) / temperature_N[:, None].to(hidden_ND.dtype)
    return (z if is_allowed_NV is None else z.masked_fill(~is_allowed_NV, -torch.inf)).log_softmax(-1)


def class_stats(log_weight_NV: Tensor, class_V: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each class of tokens: log-sum-exp, maximum, argmax and entropy of logits / T, each [N, C]."""
    columns = []
    for place in range(count):
        tokens = (class_V == place).nonzero().squeeze(-1)
        of_class = log_weight_NV[:, tokens]
        log_p = of_class.log_softmax(-1)
        top, where = of_class.max(-1)
        columns.append((of_class.logsumexp(-1), top, tokens[where], -(log_p.exp() * log_p).sum(-1)))
    log_sum, maximum, argmax, entropy = (torch.stack(column, -1) for column in zip(*columns, strict=True))
    return log_sum, maximum, argmax, entropy


def is_left(z_NV: Tensor, top_k: int | None, top_p: float, min_p: float) -> Tensor:
    """Which tokens of tempered logits the filters leave, bool [N, V], one row and one token after the other.

    The top_k likeliest; of these the fewest likeliest that hold top_p of their probability; of these those at least
    min_p times as likely as the likeliest. What is as likely as the last one that is left is left, too.
    """
    left_NV = torch.zeros_like(z_NV, dtype=torch.bool)
    for row, z_V in enumerate(z_NV.double()):
        ranked = [token for token in z_V.argsort(descending=True).tolist() if z_V[token] > -torch.inf]
        if top_k is not None:
            ranked = [token for token in ranked if z_V[token] >= z_V[ranked[min(top_k, len(ranked)) - 1]]]
        p_V, held, last = (z_V - z_V.max()).exp(), 0.0, ranked[0]
        wanted = top_p * sum(float(p_V[token]) for token in ranked)
        for token in ranked:
            if top_p >= 1 or held < wanted:
                last, held = token, held + float(p_V[token])
        for token in ranked:
            left_NV[row, token] = bool(z_V[token] >= z_V[last]) and float(p_V[token]) >= min_p * float(p_V.max())
    return left_NV
