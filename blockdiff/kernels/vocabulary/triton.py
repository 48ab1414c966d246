"""The vocabulary ops in Triton: ops for torch over chunks of raw products, their gradients, and the public functions.

The two matrix products are torch's; the kernels between them read the raw products once or twice and put in their
place what the second product needs. A chunk is whole rows where the table is frozen, and all rows of a slice of the
vocabulary where it trains: then every product sums over all tokens at once, and nothing of the table's size is added
up. A backward that makes raw products again makes them by the same products as the pass that its peaks and sums come
from: another shape may round otherwise in half precision, and exp makes percents of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.launch import empty, registered
from blockdiff.kernels.vocabulary.shaping import Shaping
from blockdiff.kernels.vocabulary.torch import Stats
from blockdiff.kernels.vocabulary.triton_classes import class_stats
from blockdiff.kernels.vocabulary.triton_launch import (
    Logits,
    Rows,
    again,
    chunks_of,
    filtered,
    fit,
    pick,
    soft_rows,
    sweep,
    temperatures,
    to_gradients,
    to_probabilities,
)

__all__ = ["class_stats", "linear_cross_entropy", "log_sums", "soft_embedding", "token_scores", "token_stats"]


def _vector(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return empty(x, len(x), dtype=dtype)


# -- launchers: cross-entropy ----------------------------------------------------------------------------------


@registered("cross_entropy")
def _cross_entropy(
    hidden: Tensor, table: Tensor, target: Tensor, softcap: float | None, observed: Tensor | None,
    bonus: Tensor | None, with_argmax: bool, needs_hidden: bool, needs_table: bool,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Losses, argmax, the rows' peaks and sums, and what a backward takes: dloss/dhidden for a frozen table, for a
    trained one dloss/dx, if one chunk holds it. What is not wanted has no elements."""
    makes_hidden, keeps = needs_hidden and not needs_table, needs_table and fit(hidden, table)
    loss, peak, total = (_vector(hidden) for _ in range(3))
    argmax = empty(hidden, len(hidden) if with_argmax else 0, dtype=torch.int64)
    grad_hidden = empty(hidden, len(hidden) if makes_hidden else 0, hidden.shape[1])
    kept = empty(table, len(hidden) if keeps else 0, len(table))
    yield loss, argmax, peak, total, grad_hidden, kept
    how, factor = Logits(softcap, None, observed, bonus), torch.ones_like(loss)
    chunks = chunks_of(hidden, table, by_tokens=needs_table, memory=kept if keeps else None)
    for rows in chunks.of_rows(hidden):
        out = Rows(peak[rows], total[rows], loss[rows], argmax[rows] if with_argmax else None)
        x = sweep(hidden[rows], table, how.of(rows), chunks, out, target[rows])
        if makes_hidden or keeps:
            to_gradients(x, how.of(rows), target[rows], factor[rows], out, chunks.tile)
        if makes_hidden:
            torch.mm(x, table, out=grad_hidden[rows])


@registered("cross_entropy_backward")
def _cross_entropy_backward(
    hidden: Tensor, table: Tensor, target: Tensor, softcap: float | None, observed: Tensor | None,
    bonus: Tensor | None, peak: Tensor, total: Tensor, kept: Tensor, grad_loss: Tensor, needs_hidden: bool,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Gradients of hidden and of a trained table: from the kept dloss/dx, or from x made again slice by slice."""
    grad_hidden, grad_table = empty(hidden, len(hidden) if needs_hidden else 0, hidden.shape[1]), empty(table)
    yield grad_hidden, grad_table
    factor = grad_loss.contiguous()
    if len(kept) == len(hidden):
        torch.mm(kept.t(), (hidden * factor[:, None]).to(table.dtype), out=grad_table)
        if needs_hidden:
            torch.mm(kept, table, out=grad_hidden).mul_(factor[:, None])
        return
    chunks, how = chunks_of(hidden, table, by_tokens=True), Logits(softcap, None, observed, bonus)
    sum_hidden = torch.zeros_like(grad_hidden, dtype=torch.float32)
    for tokens, x in chunks.products(hidden, table):
        to_gradients(x, how, target, factor, Rows(peak, total), chunks.tile, tokens.start)
        torch.mm(x.t(), hidden, out=grad_table[tokens])
        if needs_hidden:
            sum_hidden += torch.mm(x, table[tokens])
    grad_hidden.copy_(sum_hidden)


# -- launchers: soft embedding and statistics ------------------------------------------------------------------


@registered("soft_embedding")
def _soft_embedding(
    hidden: Tensor, table: Tensor, softcap: float | None, temperature: float, needs_table: bool,
    embedding: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Soft embeddings, and for embeddings that train the probabilities, if one chunk holds them (else no elements).

    embedding: what they are made of where it is not the table.
    """
    keeps = needs_table and fit(hidden, table)
    soft, kept = empty(hidden), empty(table, len(hidden) if keeps else 0, len(table))
    yield soft, kept
    chunks = chunks_of(hidden, table, memory=kept if keeps else None)
    peak, total = _vector(hidden), _vector(hidden)
    how = Logits(softcap, torch.full_like(peak, temperature))
    for rows in chunks.of_rows(hidden):
        merged = Rows(peak[rows], total[rows])
        x = sweep(hidden[rows], table, how.of(rows), chunks, merged)
        to_probabilities(x, how.of(rows), merged, chunks.tile)
        torch.mm(x, table if embedding is None else embedding, out=soft[rows])


@registered("soft_embedding_backward")
def _soft_embedding_backward(
    hidden: Tensor, table: Tensor, softcap: float | None, temperature: float, kept: Tensor, grad: Tensor
) -> Iterator[Tensor]:
    """The table's gradient p^T grad: from the kept p, or from p made again with peaks and sums of its own."""
    grad_table = empty(table)
    yield grad_table
    if len(kept) == len(hidden):
        torch.mm(kept.t(), grad, out=grad_table)
        return
    chunks, merged = chunks_of(hidden, table, by_tokens=True), Rows(_vector(hidden), _vector(hidden))
    how = Logits(softcap, torch.full_like(merged.peak, temperature))
    sweep(hidden, table, how, chunks, merged)
    for tokens, x in chunks.products(hidden, table):
        to_probabilities(x, how, merged, chunks.tile, tokens.start)
        torch.mm(x.t(), grad, out=grad_table[tokens])


@registered("token_stats")
def _token_stats(
    hidden: Tensor, table: Tensor, softcap: float | None, temperature: Tensor, uniform: Tensor,
    allowed: Tensor | None, top_k: int | None, top_p: float, min_p: float, embedding: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """The columns of `Stats`, without the best token, which is the argmax."""
    entropy, log_probability, best_log_p, soft = *(_vector(hidden) for _ in range(3)), soft_rows(hidden, embedding)
    argmax, sample = _vector(hidden, torch.int64), _vector(hidden, torch.int64)
    yield entropy, argmax, sample, soft, log_probability, best_log_p
    own = Logits(softcap, temperature, allowed=allowed, words=0 if allowed is None else allowed.stride(0))
    chunks, (peak, total, rest) = chunks_of(hidden, table), (_vector(hidden) for _ in range(3))
    chosen, has_filters = _vector(hidden, torch.int64), top_k is not None or top_p < 1 or min_p > 0
    own_peak, own_total = (_vector(hidden), _vector(hidden)) if has_filters else (peak, total)
    for rows in chunks.of_rows(hidden):
        of_own = Rows(own_peak[rows], own_total[rows], best_log_probability=best_log_p[rows])
        merged = Rows(peak[rows], total[rows], None, argmax[rows], entropy[rows], chosen[rows], rest[rows])
        how = own.of(rows)
        if has_filters:
            x = sweep(hidden[rows], table, how, chunks, of_own)
            how = filtered(x, how, top_k, top_p, min_p)
            again(x, how, chunks, merged, uniform[rows])
        else:
            whole = merged._replace(best_log_probability=of_own.best_log_probability)
            x = sweep(hidden[rows], table, how, chunks, whole, uniform=uniform[rows])
        pick(x, how, merged, (sample[rows], log_probability[rows]), chunks.tile)
        if soft.shape[1]:
            to_probabilities(x, own.of(rows), of_own, chunks.tile)
            torch.mm(x, table if embedding is None else embedding, out=soft[rows])


@registered("log_sums")
def _log_sums(
    hidden: Tensor, table: Tensor, softcap: float | None, temperature: Tensor, allowed: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Log-sum-exp and maximum, fp32 [N]."""
    log_sum, peak = _vector(hidden), _vector(hidden)
    yield log_sum, peak
    how = Logits(softcap, temperature, allowed=allowed, words=0 if allowed is None else allowed.stride(0))
    chunks, total = chunks_of(hidden, table), _vector(hidden)
    for rows in chunks.of_rows(hidden):
        sweep(hidden[rows], table, how.of(rows), chunks, Rows(peak[rows], total[rows]))
    log_sum.copy_(total.log2().add_(peak).mul_(math.log(2)))
    peak.mul_(math.log(2)).masked_fill_(total == 0, -math.inf)


# -- gradients -------------------------------------------------------------------------------------------------


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, table, target, ctx.softcap, observed, bonus, *_ = inputs
    *_, peak, total, grad_hidden, kept = output
    ctx.set_materialize_grads(False)  # zeros like `kept` would be one more chunk
    of_trained = hidden, table, target, observed, bonus, peak, total, kept
    ctx.save_for_backward(*(of_trained if ctx.needs_input_grad[1] else (grad_hidden,)))


def _cross_entropy_gradients(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    grad_hidden = grad_table = None
    if grad_loss is not None and not ctx.needs_input_grad[1]:
        (made,) = ctx.saved_tensors
        grad_hidden = (made * grad_loss[:, None]).to(made.dtype)
    elif grad_loss is not None:
        hidden, table, target, *of_rows = ctx.saved_tensors
        needs_hidden = ctx.needs_input_grad[0]
        arguments = target, ctx.softcap, *of_rows, grad_loss, needs_hidden
        grad_hidden, grad_table = _cross_entropy_backward(hidden, table, *arguments)
        grad_hidden = grad_hidden if needs_hidden else None
    return grad_hidden, grad_table, *[None] * 7


def _save_soft_embedding(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, table, ctx.softcap, ctx.temperature, _, embedding = inputs
    ctx.is_tied = embedding is None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, table, output[1])


def _soft_embedding_gradients(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    (hidden, table, kept), made = ctx.saved_tensors, None
    if grad is not None and ctx.needs_input_grad[1 if ctx.is_tied else 5]:
        made = _soft_embedding_backward(hidden, table, ctx.softcap, ctx.temperature, kept, grad)
    return None, made if ctx.is_tied else None, None, None, None, None if ctx.is_tied else made


_cross_entropy.register_autograd(_cross_entropy_gradients, setup_context=_save_cross_entropy)
_soft_embedding.register_autograd(_soft_embedding_gradients, setup_context=_save_soft_embedding)


# -- the public functions: signatures and meaning as in torch.py ------------------------------------------------


def _contiguous(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.contiguous() for t in tensors)


def linear_cross_entropy(
    hidden_ND: Tensor,
    table_VD: Tensor,
    target_N: Tensor | None,
    softcap: float | None,
    observed_N: Tensor | None = None,
    bonus_N: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of every token, fp32 [N], holding one chunk of products whatever N; without targets log-sum-exp."""
    hidden, table = in_autocast(hidden_ND, table_VD)
    if target_N is None:
        target_N = torch.full((len(hidden),), -1, dtype=torch.int64, device=hidden.device)
    needs = (torch.is_grad_enabled() and t.requires_grad for t in (hidden, table))
    vectors = _contiguous(observed_N, bonus_N)
    return _cross_entropy(hidden, table, target_N.contiguous(), softcap, *vectors, False, *needs)[0]


def token_scores(
    hidden_ND: Tensor,
    table_VD: Tensor,
    target_N: Tensor,
    softcap: float | None,
    observed_N: Tensor | None = None,
    bonus_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy fp32 [N] and argmax int64 [N] of the same logits (the bonus included), without gradients."""
    hidden, table = (t.detach() for t in in_autocast(hidden_ND, table_VD))
    vectors = _contiguous(observed_N, bonus_N)
    loss, argmax, *_ = _cross_entropy(hidden, table, target_N.contiguous(), softcap, *vectors, True, False, False)
    return loss, argmax


def soft_embedding(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature: float,
    embedding_VD: Tensor | None = None,
) -> Tensor:
    """`softmax(z / T) E` [N, D], without the factor sqrt(D); a gradient flows to E, none through z."""
    hidden, table, *others = in_autocast(
        hidden_ND.detach(), table_VD, *(() if embedding_VD is None else (embedding_VD,))
    )
    embedding = others[0] if others else None
    needs_table = torch.is_grad_enabled() and (table if embedding is None else embedding).requires_grad
    arguments = softcap, temperature, needs_table, embedding
    return _soft_embedding(hidden, table.detach() if others else table, *arguments)[0].to(table_VD.dtype)


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
    """The columns of `Stats` of z / T, with a sample at the given uniform number.

    Samples are those of torch.py except where the uniform number lies within about 1e-6 of an edge of the CDF.
    """
    hidden, table = (t.detach() for t in in_autocast(hidden_ND, table_VD))
    embedding = None if embedding_VD is None else embedding_VD.detach().to(table.dtype)
    temperature_N = temperatures(temperature_N, hidden)
    if allowed_NW is not None and allowed_NW.stride(1) != 1:  # but one mask expanded to all rows stays one
        allowed_NW = allowed_NW.contiguous()
    vectors = _contiguous(temperature_N, uniform_N.float())
    given = hidden, table, softcap, *vectors, allowed_NW, *(shaping or Shaping()), embedding
    entropy, argmax, sample, soft, log_probability, best_log_p = _token_stats(*given)
    return Stats(entropy, argmax, sample, soft.to(table_VD.dtype), log_probability, argmax, best_log_p)


@torch.no_grad()
def log_sums(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor | float = 1.0,
    allowed_NW: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and maximum of z / T over the tokens allowed, fp32 [N] each, -inf where none is."""
    if allowed_NW is not None:
        allowed_NW = allowed_NW.contiguous()
    return _log_sums(hidden_ND, table_VD, softcap, temperatures(temperature_N, hidden_ND), allowed_NW)
