"""The vocabulary ops in plain torch, in chunks of whole logit rows, of which one is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.kernels.vocabulary.classes import Classes, ClassStats, Penalty, of_logits, penalised
from blockdiff.kernels.vocabulary.cross_entropy import linear_cross_entropy, token_scores
from blockdiff.kernels.vocabulary.divergence import divergence
from blockdiff.kernels.vocabulary.logits import chunk_rows, chunks, fits, logits
from blockdiff.kernels.vocabulary.shaping import Shaping, is_left

__all__ = [
    "class_stats",
    "divergence",
    "linear_cross_entropy",
    "log_sums",
    "logits",
    "soft_embedding",
    "token_scores",
    "token_stats",
]


class Stats(NamedTuple):
    """Statistics of the logits z / T at every position, for one denoising step; forbidden tokens have z = -inf."""

    entropy: Tensor  # fp32 [...], nats
    argmax: Tensor  # int64 [...], ties to the lower id
    sample: Tensor  # int64 [...], by inverse CDF
    soft_embedding: Tensor  # [..., D], in the table's dtype
    log_probability: Tensor  # fp32 [...], nats: of the sample
    best: Tensor  # int64 [...]: the likeliest token; equals `argmax` until a strategy fixes another token there
    best_log_probability: Tensor  # fp32 [...], nats: of `best`, under the logits z before temperature and filters


class _SoftEmbedding(torch.autograd.Function):
    """Soft embeddings with a gradient for the embeddings alone, p^T grad; p is stored if it fits in one chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        table_VD: Tensor,
        softcap: float | None,
        temperature: float,
        embedding_VD: Tensor | None,
        probabilities: Callable[..., Tensor],
    ) -> Tensor:
        N, V = hidden_ND.shape[0], table_VD.shape[0]
        embedding = table_VD if embedding_VD is None else embedding_VD
        is_trained = ctx.needs_input_grad[1 if embedding_VD is None else 4]
        keeps = is_trained and fits(N, V, table_VD.dtype)
        all_p = table_VD.new_empty(N, V) if keeps else None
        out = torch.empty_like(hidden_ND, dtype=table_VD.dtype)
        for rows in chunks(hidden_ND, V):
            p = probabilities(hidden_ND[rows], table_VD, softcap, temperature)
            torch.mm(p, embedding, out=out[rows])
            if all_p is not None:
                all_p[rows] = p
        ctx.save_for_backward(*((all_p,) if all_p is not None else (hidden_ND, table_VD)))
        ctx.arguments, ctx.probabilities = (softcap, temperature), probabilities
        ctx.is_tied = embedding_VD is None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        if len(ctx.saved_tensors) == 1:
            grad_table = torch.mm(ctx.saved_tensors[0].t(), grad_ND)
        else:
            hidden_ND, table_VD = ctx.saved_tensors
            softcap, temperature = ctx.arguments
            grad_table = torch.zeros_like(table_VD, dtype=torch.promote_types(table_VD.dtype, torch.float32))
            for rows in chunks(hidden_ND, table_VD.shape[0]):
                p = ctx.probabilities(hidden_ND[rows].to(table_VD.dtype), table_VD, softcap, temperature)
                grad_table += p.t() @ grad_ND[rows]
            grad_table = grad_table.to(table_VD.dtype)
        return (None, grad_table, *[None] * 4) if ctx.is_tied else (*[None] * 4, grad_table, None)


def _probabilities(hidden: Tensor, table: Tensor, softcap: float | None, temperature: float) -> Tensor:
    z = logits(hidden, table, softcap)
    z = z if temperature == 1.0 else z.div_(temperature)
    return z.softmax(-1).to(table.dtype)


def soft_embedding(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature: float,
    embedding_VD: Tensor | None = None,
) -> Tensor:
    """Return `softmax(z / T) E` [N, D], without the factor sqrt(D); a gradient flows to E, none through z.

    embedding_VD: E, if it is not the table that computes the logits z.
    """
    return soft_embedding_by(_probabilities, hidden_ND, table_VD, softcap, temperature, embedding_VD)


def soft_embedding_by(
    probabilities: Callable[..., Tensor],
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature: float,
    embedding_VD: Tensor | None,
) -> Tensor:
    """Return `soft_embedding`, with probabilities computed by a backend's `probabilities`."""
    is_plain = not (torch.is_grad_enabled() or torch.is_autocast_enabled(hidden_ND.device.type))
    if is_plain and hidden_ND.shape[0] <= chunk_rows(hidden_ND, table_VD.shape[0]):
        # for few tokens the autograd function would cost as much as these two lines
        embedding = table_VD if embedding_VD is None else embedding_VD
        return torch.mm(probabilities(hidden_ND, table_VD, softcap, temperature), embedding)
    return _SoftEmbedding.apply(hidden_ND, table_VD, softcap, temperature, embedding_VD, probabilities)


def pack_allowed(is_allowed_NV: Tensor) -> Tensor:
    """Pack a mask of allowed tokens for token_stats, int32 [N, ceil(V / 32)]: token v is bit v % 32 of word v // 32."""
    N, V = is_allowed_NV.shape
    bits = F.pad(is_allowed_NV.long(), (0, -V % 32)).view(N, -1, 32)
    words = (bits << torch.arange(32, device=bits.device)).sum(-1)
    return torch.where(words >> 31 > 0, words - (1 << 32), words).int()


def is_forbidden_by(allowed_NW: Tensor, vocabulary: int) -> Tensor:
    """Unpack a mask of `pack_allowed` and negate it: the forbidden tokens, bool [N, vocabulary]."""
    bits = torch.arange(32, dtype=torch.int32, device=allowed_NW.device)
    return ((allowed_NW[..., None] >> bits) & 1 == 0).flatten(-2)[:, :vocabulary]


def token_stats(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor | float,
    uniform_N: Tensor,
    allowed_NW: Tensor | None = None,
    shaping: Shaping | None = None,
    embedding_VD: Tensor | None = None,
) -> Stats:
    """Return the columns of `Stats` of z / T; samples are drawn with uniform_N, numbers in [0, 1).

    allowed_NW: the tokens allowed at every position, packed by `pack_allowed`, at least one each; others are never
    sampled. shaping: filters of the distribution, which apply to everything except the soft embedding. embedding_VD:
    the embeddings, if they are not the table that computes the logits.
    """
    parts, embedding = [], table_VD if embedding_VD is None else embedding_VD
    with torch.no_grad():
        for rows in chunks(hidden_ND, table_VD.shape[0]):
            z = logits(hidden_ND[rows], table_VD, softcap).float()  # samples are drawn in fp32 whatever the dtype
            is_forbidden = soft = None
            if allowed_NW is not None:
                masks = slice(0, 1) if allowed_NW.stride(0) == 0 else rows  # unpack a mask shared by all rows once
                is_forbidden = is_forbidden_by(allowed_NW[masks], z.shape[-1]).expand(z.shape)
                z.masked_fill_(is_forbidden, -torch.inf)
            best_log_probability = z.amax(-1) - z.logsumexp(-1)
            temperature = temperature_N[rows, None] if isinstance(temperature_N, Tensor) else temperature_N
            z.div_(temperature)
            if shaping is not None and shaping.has_filters:
                soft = torch.mm(z.log_softmax(-1).exp_().to(table_VD.dtype), embedding)
                is_forbidden = ~is_left(z, *shaping)
                z.masked_fill_(is_forbidden, -torch.inf)
            log_p = z.log_softmax(-1)
            p = log_p.exp()
            entropy = -(p * (log_p if is_forbidden is None else log_p.masked_fill(is_forbidden, 0.0))).sum(-1)
            cdf = p.cumsum(-1)
            threshold = uniform_N[rows, None].to(cdf.dtype) * cdf[:, -1:]
            sample = torch.searchsorted(cdf, threshold, right=True).clamp_(max=z.shape[-1] - 1)
            argmax = z.argmax(-1)
            if is_forbidden is not None:  # a parallel cumsum can decrease by a rounding, at a forbidden token
                sample = torch.where(is_forbidden.gather(-1, sample), argmax[:, None], sample)
            log_probability = log_p.gather(-1, sample).squeeze(-1)
            if soft is None:
                soft = torch.mm(p.to(table_VD.dtype), embedding)
            columns = entropy, argmax, sample.squeeze(-1), soft, log_probability
            parts.append(Stats(*columns, argmax, best_log_probability))
    return parts[0] if len(parts) == 1 else Stats(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def log_sums(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor | float = 1.0,
    allowed_NW: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp and the maximum of z / T over the allowed tokens, [N] each in at least fp32.

    Both are -inf if no token is allowed. Ranks that hold parts of a table merge them. Arguments as in `token_stats`.
    """
    parts = []
    for rows in chunks(hidden_ND, table_VD.shape[0]):
        z = logits(hidden_ND[rows], table_VD, softcap)
        if allowed_NW is not None:
            z.masked_fill_(is_forbidden_by(allowed_NW[rows], z.shape[-1]), -torch.inf)
        z.div_(temperature_N[rows, None] if isinstance(temperature_N, Tensor) else temperature_N)
        parts.append((z.logsumexp(-1), z.amax(-1)))
    log_sum_N, peak_N = (torch.cat(column) for column in zip(*parts, strict=True))
    return log_sum_N, peak_N


def class_stats(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor | float,
    uniform_N: Tensor,
    classes: Classes,
    penalty: Penalty | None = None,
    excluded: int | None = None,
    embedding_VD: Tensor | None = None,
) -> ClassStats:
    """Return the columns of `ClassStats` for every position and class of tokens.

    excluded: a token of probability 0 everywhere, also in the soft embedding, such as the mask token of mask noise.
    Other arguments as in `token_stats`.
    """
    parts, rows_of_sums = [], max(1, chunk_rows(hidden_ND, table_VD.shape[0]) // 4)  # the sums are in fp64
    with torch.no_grad():
        for rows in chunks(hidden_ND, table_VD.shape[0]):
            z = logits(hidden_ND[rows], table_VD, softcap).float()
            if excluded is not None:
                z[:, excluded].fill_(-torch.inf)
            temperature = temperature_N[rows, None] if isinstance(temperature_N, Tensor) else temperature_N
            tempered = (z if penalty is None else z.clone()).div_(temperature)
            embedding = table_VD if embedding_VD is None else embedding_VD
            soft = torch.mm(tempered.log_softmax(-1).exp_().to(table_VD.dtype), embedding)
            if penalty is not None:
                tempered = penalised(z, penalty, rows).div_(temperature)
            uniform = uniform_N[rows]
            columns = [
                of_logits(tempered[lo : lo + rows_of_sums], uniform[lo : lo + rows_of_sums], classes)
                for lo in range(0, len(tempered), rows_of_sums)
            ]
            parts.append((*(torch.cat(column) for column in zip(*columns, strict=True)), soft))
    return ClassStats(*(column[0] if len(parts) == 1 else torch.cat(column) for column in zip(*parts, strict=True)))
