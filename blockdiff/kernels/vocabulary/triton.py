"""The vocabulary ops in Triton: registered ops over chunks of raw products, their gradients, the public functions.

torch computes the two matrix products. The kernels between them read the raw products h E^T once or twice and overwrite
them by the operand of the second product. A chunk has whole rows if the table is frozen. If it trains, a chunk has all
rows and a slice of the vocabulary, so that each product sums over all tokens and no table-sized sums are accumulated.
A backward recomputes raw products in the same shapes as the pass that its peaks and sums come from: in half precision
another shape may round differently, and exp amplifies that to percents.
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
    LogitTransform,
    RowStats,
    chunks_of,
    draw,
    filtered,
    fit,
    soft_rows,
    sweep,
    sweep_again,
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
    """Return loss, argmax, peak and sum of every row, dloss/dhidden and dloss/dx, which the backward reads.

    dloss/dhidden is filled if the table is frozen, dloss/dx if the table trains and one chunk holds all of it. Results
    that are not needed have no elements.
    """
    makes_hidden, keeps = needs_hidden and not needs_table, needs_table and fit(hidden, table)
    loss, peak, total = (_vector(hidden) for _ in range(3))
    argmax = empty(hidden, len(hidden) if with_argmax else 0, dtype=torch.int64)
    grad_hidden = empty(hidden, len(hidden) if makes_hidden else 0, hidden.shape[1])
    grad_x = empty(table, len(hidden) if keeps else 0, len(table))
    yield loss, argmax, peak, total, grad_hidden, grad_x
    transform, factor = LogitTransform(softcap, None, observed, bonus), torch.ones_like(loss)
    chunks = chunks_of(hidden, table, by_tokens=needs_table, memory=grad_x if keeps else None)
    for rows in chunks.of_rows(hidden):
        out = RowStats(peak[rows], total[rows], loss[rows], argmax[rows] if with_argmax else None)
        x = sweep(hidden[rows], table, transform.of(rows), chunks, out, target[rows])
        if makes_hidden or keeps:
            to_gradients(x, transform.of(rows), target[rows], factor[rows], out, chunks.tile)
        if makes_hidden:
            torch.mm(x, table, out=grad_hidden[rows])


@registered("cross_entropy_backward")
def _cross_entropy_backward(
    hidden: Tensor, table: Tensor, target: Tensor, softcap: float | None, observed: Tensor | None,
    bonus: Tensor | None, peak: Tensor, total: Tensor, grad_x: Tensor, grad_loss: Tensor, needs_hidden: bool,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Return the gradients of hidden and of a trained table, from the stored dloss/dx or recomputed slices of x."""
    grad_hidden, grad_table = empty(hidden, len(hidden) if needs_hidden else 0, hidden.shape[1]), empty(table)
    yield grad_hidden, grad_table
    factor = grad_loss.contiguous()
    if len(grad_x) == len(hidden):
        torch.mm(grad_x.t(), (hidden * factor[:, None]).to(table.dtype), out=grad_table)
        if needs_hidden:
            torch.mm(grad_x, table, out=grad_hidden).mul_(factor[:, None])
        return
    chunks, transform = chunks_of(hidden, table, by_tokens=True), LogitTransform(softcap, None, observed, bonus)
    sum_hidden = torch.zeros_like(grad_hidden, dtype=torch.float32)
    for tokens, x in chunks.products(hidden, table):
        to_gradients(x, transform, target, factor, RowStats(peak, total), chunks.tile, tokens.start)
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
    """Return soft embeddings, and the probabilities p if the embeddings train and one chunk holds p (else no elements).

    embedding: the embeddings, if they are not the table.
    """
    keeps = needs_table and fit(hidden, table)
    soft, all_p = empty(hidden), empty(table, len(hidden) if keeps else 0, len(table))
    yield soft, all_p
    chunks = chunks_of(hidden, table, memory=all_p if keeps else None)
    peak, total = _vector(hidden), _vector(hidden)
    transform = LogitTransform(softcap, torch.full_like(peak, temperature))
    for rows in chunks.of_rows(hidden):
        merged = RowStats(peak[rows], total[rows])
        x = sweep(hidden[rows], table, transform.of(rows), chunks, merged)
        to_probabilities(x, transform.of(rows), merged, chunks.tile)
        torch.mm(x, table if embedding is None else embedding, out=soft[rows])


@registered("soft_embedding_backward")
def _soft_embedding_backward(
    hidden: Tensor, table: Tensor, softcap: float | None, temperature: float, all_p: Tensor, grad: Tensor
) -> Iterator[Tensor]:
    """Return the table's gradient p^T grad, from the stored p or, if that has no elements, from recomputed slices."""
    grad_table = empty(table)
    yield grad_table
    if len(all_p) == len(hidden):
        torch.mm(all_p.t(), grad, out=grad_table)
        return
    chunks, merged = chunks_of(hidden, table, by_tokens=True), RowStats(_vector(hidden), _vector(hidden))
    transform = LogitTransform(softcap, torch.full_like(merged.peak, temperature))
    sweep(hidden, table, transform, chunks, merged)
    for tokens, x in chunks.products(hidden, table):
        to_probabilities(x, transform, merged, chunks.tile, tokens.start)
        torch.mm(x.t(), grad, out=grad_table[tokens])


@registered("token_stats")
def _token_stats(
    hidden: Tensor, table: Tensor, softcap: float | None, temperature: Tensor, uniform: Tensor,
    allowed: Tensor | None, top_k: int | None, top_p: float, min_p: float, embedding: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Return the columns of `Stats` except `best`, which is the argmax."""
    entropy, log_probability, best_log_p, soft = *(_vector(hidden) for _ in range(3)), soft_rows(hidden, embedding)
    argmax, sample = _vector(hidden, torch.int64), _vector(hidden, torch.int64)
    yield entropy, argmax, sample, soft, log_probability, best_log_p
    unfiltered = LogitTransform(
        softcap, temperature, allowed=allowed, words=0 if allowed is None else allowed.stride(0)
    )
    chunks, (peak, total, rest) = chunks_of(hidden, table), (_vector(hidden) for _ in range(3))
    chosen, has_filters = _vector(hidden, torch.int64), top_k is not None or top_p < 1 or min_p > 0
    all_peak, all_total = (_vector(hidden), _vector(hidden)) if has_filters else (peak, total)  # before filters
    for rows in chunks.of_rows(hidden):
        before = RowStats(all_peak[rows], all_total[rows], best_log_probability=best_log_p[rows])
        merged = RowStats(peak[rows], total[rows], None, argmax[rows], entropy[rows], chosen[rows], rest[rows])
        transform = unfiltered.of(rows)
        if has_filters:
            x = sweep(hidden[rows], table, transform, chunks, before)
            transform = filtered(x, transform, top_k, top_p, min_p)
            sweep_again(x, transform, chunks, merged, uniform[rows])
        else:
            both = merged._replace(best_log_probability=before.best_log_probability)
            x = sweep(hidden[rows], table, transform, chunks, both, uniform=uniform[rows])
        draw(x, transform, merged, (sample[rows], log_probability[rows]), chunks.tile)
        if soft.shape[1]:
            to_probabilities(x, unfiltered.of(rows), before, chunks.tile)
            torch.mm(x, table if embedding is None else embedding, out=soft[rows])


@registered("log_sums")
def _log_sums(
    hidden: Tensor, table: Tensor, softcap: float | None, temperature: Tensor, allowed: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return log-sum-exp and maximum, fp32 [N]."""
    log_sum, peak = _vector(hidden), _vector(hidden)
    yield log_sum, peak
    transform = LogitTransform(softcap, temperature, allowed=allowed, words=0 if allowed is None else allowed.stride(0))
    chunks, total = chunks_of(hidden, table), _vector(hidden)
    for rows in chunks.of_rows(hidden):
        sweep(hidden[rows], table, transform.of(rows), chunks, RowStats(peak[rows], total[rows]))
    log_sum.copy_(total.log2().add_(peak).mul_(math.log(2)))
    peak.mul_(math.log(2)).masked_fill_(total == 0, -math.inf)


# -- gradients -------------------------------------------------------------------------------------------------


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, table, target, ctx.softcap, observed, bonus, *_ = inputs
    *_, peak, total, grad_hidden, grad_x = output
    ctx.set_materialize_grads(False)  # zeros like `grad_x` would be one more chunk
    of_trained = hidden, table, target, observed, bonus, peak, total, grad_x
    ctx.save_for_backward(*(of_trained if ctx.needs_input_grad[1] else (grad_hidden,)))


def _cross_entropy_gradients(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    grad_hidden = grad_table = None
    if grad_loss is not None and not ctx.needs_input_grad[1]:
        (grad_of_sum,) = ctx.saved_tensors
        grad_hidden = (grad_of_sum * grad_loss[:, None]).to(grad_of_sum.dtype)
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
    (hidden, table, all_p), grad_E = ctx.saved_tensors, None
    if grad is not None and ctx.needs_input_grad[1 if ctx.is_tied else 5]:
        grad_E = _soft_embedding_backward(hidden, table, ctx.softcap, ctx.temperature, all_p, grad)
    return None, grad_E if ctx.is_tied else None, None, None, None, None if ctx.is_tied else grad_E


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
    """Return the cross-entropy of every token, fp32 [N], in chunks of products; without targets the log-sum-exp."""
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
    """Return the cross-entropy fp32 [N] and the argmax int64 [N] of the same logits, without gradients."""
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
    """Return `softmax(z / T) E` [N, D], without the factor sqrt(D); a gradient flows to E, none through z."""
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
    """Return the columns of `Stats` of z / T.

    Samples equal those of torch.py unless the uniform number is within about 1e-6 of a step of the CDF.
    """
    hidden, table = (t.detach() for t in in_autocast(hidden_ND, table_VD))
    embedding = None if embedding_VD is None else embedding_VD.detach().to(table.dtype)
    temperature_N = temperatures(temperature_N, hidden)
    if allowed_NW is not None and allowed_NW.stride(1) != 1:  # one mask expanded to all rows is not copied
        allowed_NW = allowed_NW.contiguous()
    vectors = _contiguous(temperature_N, uniform_N.float())
    arguments = hidden, table, softcap, *vectors, allowed_NW, *(shaping or Shaping()), embedding
    entropy, argmax, sample, soft, log_probability, best_log_p = _token_stats(*arguments)
    return Stats(entropy, argmax, sample, soft.to(table_VD.dtype), log_probability, argmax, best_log_p)


@torch.no_grad()
def log_sums(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor | float = 1.0,
    allowed_NW: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-sum-exp and maximum of z / T over the allowed tokens, fp32 [N] each, -inf if there is none."""
    if allowed_NW is not None:
        allowed_NW = allowed_NW.contiguous()
    return _log_sums(hidden_ND, table_VD, softcap, temperatures(temperature_N, hidden_ND), allowed_NW)
