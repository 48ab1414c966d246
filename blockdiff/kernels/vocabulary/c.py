"""Vocabulary ops with the C functions of vocabulary.c between their matrix products, for fp32 on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.kernels.c_library import call, serves_products
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.vocabulary import torch as in_torch
from blockdiff.kernels.vocabulary.cross_entropy import CrossEntropy
from blockdiff.kernels.vocabulary.logits import chunks
from blockdiff.kernels.vocabulary.shaping import Shaping
from blockdiff.kernels.vocabulary.torch import Stats


def _cross_entropy_chunk(
    hidden: Tensor,
    table: Tensor,
    target: Tensor,
    softcap: float | None,
    favoured: tuple[Tensor, Tensor] | None,
    with_gradient: bool,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, the normaliser `total` and, if `with_gradient`, G = total * dloss/dz of a chunk.

    The logits become G in place, in `into` if that is given.
    """
    z = torch.mm(hidden, table.t(), out=into)
    loss, total = z.new_empty(2, z.shape[0]).unbind(0)
    observed, bonus = (None, None) if favoured is None else (x.contiguous() for x in favoured)
    extra = (float(softcap or 0), observed, bonus, int(with_gradient))
    call("cross_entropy", z, *z.shape, target.contiguous(), *extra, loss, total)
    return loss, total, z if into is None else into


def linear_cross_entropy(
    hidden_ND: Tensor,
    table_VD: Tensor,
    target_N: Tensor | None,
    softcap: float | None,
    observed_N: Tensor | None = None,
    bonus_N: Tensor | None = None,
) -> Tensor:
    """Return the cross-entropy of every token in nats, [N]; Unserved unless fp32 on a CPU with targets."""
    is_served = target_N is not None and serves_products(hidden_ND, table_VD, bonus_N)
    if not is_served:
        raise Unserved("linear_cross_entropy in C takes fp32 tensors of a CPU and targets")
    arguments = hidden_ND, table_VD, target_N, softcap, observed_N, bonus_N
    loss_N: Tensor = CrossEntropy.apply(*arguments, _cross_entropy_chunk)
    return loss_N


def _probabilities(hidden: Tensor, table: Tensor, softcap: float | None, temperature: float) -> Tensor:
    z = torch.mm(hidden, table.t())
    call("capped_softmax", z, *z.shape, float(softcap or 0), 1 / temperature)
    return z


def soft_embedding(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature: float,
    embedding_VD: Tensor | None = None,
) -> Tensor:
    """Return `softmax(z / T) E` [N, D] of the logits z, without the factor sqrt(D); arguments as in torch.py."""
    if not serves_products(hidden_ND, table_VD):
        raise Unserved("soft_embedding in C takes fp32 tensors of a CPU")
    return in_torch.soft_embedding_by(_probabilities, hidden_ND, table_VD, softcap, temperature, embedding_VD)


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
    """Return the columns of `Stats` of z / T, the logits z of hidden states; arguments as in torch.py.

    Raises Unserved for filters of the distribution (`shaping`).
    """
    embedding = table_VD if embedding_VD is None else embedding_VD
    if shaping is not None or not serves_products(hidden_ND, table_VD, uniform_N, embedding):
        raise Unserved("token_stats in C takes fp32 tensors of a CPU and shapes no logits")
    if not isinstance(temperature_N, Tensor):
        temperature_N = torch.tensor([temperature_N])
    factor, N = temperature_N.to(torch.float32).reciprocal().contiguous(), hidden_ND.shape[0]
    entropy, log_probability, best_log_probability = hidden_ND.new_empty(3, N).unbind(0)
    argmax, sample = torch.empty(2, N, dtype=torch.int64).unbind(0)
    line = 0
    if allowed_NW is not None:
        allowed_NW = allowed_NW if allowed_NW.stride(-1) == 1 else allowed_NW.contiguous()
        line = allowed_NW.stride(0)
    soft, uniform_N, step = hidden_ND.new_empty(N, embedding.shape[1]), uniform_N.contiguous(), int(len(factor) > 1)
    with torch.no_grad():
        for rows in chunks(hidden_ND, table_VD.shape[0]):
            z = torch.mm(hidden_ND[rows], table_VD.t())
            factors = factor[rows] if step else factor
            allowed = allowed_NW if line == 0 or allowed_NW is None else allowed_NW[rows]
            inputs = (factors, step, uniform_N[rows], allowed, line)
            outs = (entropy[rows], argmax[rows], sample[rows], log_probability[rows], best_log_probability[rows])
            call("token_stats", z, *z.shape, float(softcap or 0), *inputs, *outs)
            torch.mm(z, embedding, out=soft[rows])
    return Stats(entropy, argmax, sample, soft, log_probability, argmax, best_log_probability)
