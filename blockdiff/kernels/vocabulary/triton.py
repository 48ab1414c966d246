"""The vocabulary ops in Triton: ops for torch, their gradients, and the public functions.

The two matrix products are torch's; the kernels between them read the raw products once or twice and put in their
place what the second product needs. A chunk is whole rows on the way forward; the table's gradient takes slices of
the vocabulary instead, so that every product sums over all tokens at once and nothing of the table's size is added up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import triton_launch as launch
from blockdiff.kernels.vocabulary.native import Stats, in_autocast

CHUNK_BYTES = 256 << 20  # raw products in the table's dtype: 512 rows of 262,144 tokens in bf16


# -- ops -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("blockdiff::cross_entropy", mutates_args=())
def _cross_entropy(
    hidden: Tensor,
    table: Tensor,
    target: Tensor,
    softcap: float | None,
    observed: Tensor | None,
    bonus: Tensor | None,
    is_ignored: Tensor | None,
    with_hidden: bool,
    keeps: bool,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Losses, the rows' peaks and sums, and dloss/dhidden and dloss/dx of every row (empty if unwanted)."""
    loss, peak, total, grad_hidden, kept = out = _cross_entropy_like(hidden, table, with_hidden, keeps)
    hidden = _without_ignored(hidden, is_ignored)
    factor = torch.ones_like(loss) if is_ignored is None else (~is_ignored).float()
    for rows, x in launch.by_rows(hidden, table, chunk_bytes, kept if keeps else None):
        favoured, ignored = _pair(observed, bonus, rows), None if is_ignored is None else is_ignored[rows]
        launch.losses_of(x, target[rows], softcap, favoured, ignored, (loss[rows], peak[rows], total[rows]))
        if with_hidden or keeps:
            launch.to_gradients(x, target[rows], softcap, favoured, factor[rows], peak[rows], total[rows])
        if with_hidden:
            torch.mm(x, table, out=grad_hidden[rows])
    return out


@torch.library.custom_op("blockdiff::cross_entropy_table_gradient", mutates_args=())
def _cross_entropy_table_gradient(
    hidden: Tensor,
    table: Tensor,
    target: Tensor,
    softcap: float | None,
    observed: Tensor | None,
    bonus: Tensor | None,
    is_ignored: Tensor | None,
    grad_loss: Tensor,
    peak: Tensor,
    total: Tensor,
    kept: Tensor,
    chunk_bytes: int,
) -> Tensor:
    """From the kept dloss/dx [N, V], or where there is none from x made again, slice by slice of the vocabulary."""
    grad_table = _like(table)
    hidden = _without_ignored(hidden, is_ignored)
    if kept.shape[0] == hidden.shape[0]:
        return torch.mm(kept.t(), (hidden * grad_loss[:, None]).to(table.dtype), out=grad_table)
    factor = grad_loss.contiguous()
    for tokens, x in launch.by_tokens(hidden, table, chunk_bytes):
        launch.to_gradients(x, target, softcap, _pair(observed, bonus), factor, peak, total, tokens.start)
        torch.mm(x.t(), hidden, out=grad_table[tokens])
    return grad_table


@torch.library.custom_op("blockdiff::token_scores", mutates_args=())
def _token_scores(
    hidden: Tensor,
    table: Tensor,
    target: Tensor,
    softcap: float | None,
    observed: Tensor | None,
    bonus: Tensor | None,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor]:
    loss, peak, total, *_ = _cross_entropy_like(hidden, table, False, False)
    argmax = torch.empty(target.shape, dtype=torch.int64, device=target.device)
    for rows, x in launch.by_rows(hidden, table, chunk_bytes):
        out = loss[rows], peak[rows], total[rows]
        launch.losses_of(x, target[rows], softcap, _pair(observed, bonus, rows), None, out, argmax[rows])
    return loss, argmax


@torch.library.custom_op("blockdiff::soft_embedding", mutates_args=())
def _soft_embedding(
    hidden: Tensor, table: Tensor, softcap: float | None, temperature: float, keeps: bool, chunk_bytes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Soft embeddings, the rows' peaks and sums, and the probabilities (empty unless kept)."""
    soft, peak, total, kept = out = _soft_embedding_like(hidden, table, keeps)
    tile, each = launch.tile_of(table.shape[0]), torch.full_like(peak, temperature)
    for rows, x in launch.by_rows(hidden, table, chunk_bytes, kept if keeps else None):
        merged = launch.merge(launch.tiles_of(x, softcap, tile, each[rows]))
        peak[rows], total[rows] = merged["peak"], merged["total"]
        launch.to_probabilities(x, softcap, tile, each[rows], None, merged["peak"], merged["total"])
        torch.mm(x, table, out=soft[rows])
    return out


@torch.library.custom_op("blockdiff::soft_embedding_table_gradient", mutates_args=())
def _soft_embedding_table_gradient(
    hidden: Tensor,
    table: Tensor,
    softcap: float | None,
    temperature: float,
    grad: Tensor,
    peak: Tensor,
    total: Tensor,
    kept: Tensor,
    chunk_bytes: int,
) -> Tensor:
    grad_table = _like(table)
    if kept.shape[0] == hidden.shape[0]:
        return torch.mm(kept.t(), grad, out=grad_table)
    tile, each = launch.tile_of(table.shape[0]), torch.full_like(peak, temperature)
    for tokens, x in launch.by_tokens(hidden, table, chunk_bytes):
        launch.to_probabilities(x, softcap, tile, each, None, peak, total, tokens.start)
        torch.mm(x.t(), grad, out=grad_table[tokens])
    return grad_table


@torch.library.custom_op("blockdiff::token_stats", mutates_args=())
def _token_stats(
    hidden: Tensor,
    table: Tensor,
    softcap: float | None,
    temperature: Tensor,
    uniform: Tensor,
    given: Tensor | None,
    allowed: Tensor | None,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    out = _stats_like(hidden, table)
    tile = launch.tile_of(table.shape[0])
    for rows, x in launch.by_rows(hidden, table, chunk_bytes):
        entropy, argmax, sample, soft, log_probability = (column[rows] for column in out)
        each, wanted, may = temperature[rows], *(None if t is None else t[rows] for t in (given, allowed))
        tiles = launch.tiles_of(x, softcap, tile, each, allowed=may, with_moment=True, with_best=True)
        merged = launch.merge(tiles, uniform[rows])
        entropy.copy_(merged["entropy"])
        argmax.copy_(merged["argmax"])
        launch.pick(x, merged, sample, log_probability, softcap, tile, each, wanted, may)
        launch.to_probabilities(x, softcap, tile, each, may, merged["peak"], merged["total"])
        torch.mm(x, table, out=soft)
    return out


def _pair(observed: Tensor | None, bonus: Tensor | None, rows: slice = slice(None)) -> launch.Favoured:
    return None if observed is None or bonus is None else (observed[rows], bonus[rows])


def _without_ignored(hidden: Tensor, is_ignored: Tensor | None) -> Tensor:
    """Rows that may hold anything must not reach a product: 0 * NaN is NaN."""
    return hidden if is_ignored is None else hidden.masked_fill(is_ignored[:, None], 0.0)


# -- what the ops give, empty: the outputs they fill and those that fake tensors have --------------------------------


def _cross_entropy_like(
    hidden: Tensor, table: Tensor, with_hidden: bool, keeps: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    N, V = hidden.shape[0], table.shape[0]
    loss, peak, total = (_vector(hidden) for _ in range(3))
    grad_hidden, kept = _like(hidden, N if with_hidden else 0), _like(table, N if keeps else 0, V)
    return loss, peak, total, grad_hidden, kept


def _soft_embedding_like(hidden: Tensor, table: Tensor, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kept = _like(table, hidden.shape[0] if keeps else 0, table.shape[0])
    return _like(hidden), _vector(hidden), _vector(hidden), kept


def _stats_like(hidden: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    argmax, sample = (_vector(hidden, torch.int64) for _ in range(2))
    return _vector(hidden), argmax, sample, _like(hidden), _vector(hidden)


def _like(x: Tensor, rows: int | None = None, columns: int | None = None) -> Tensor:
    shape = (x.shape[0] if rows is None else rows, x.shape[1] if columns is None else columns)
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _vector(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(x.shape[0], dtype=dtype, device=x.device)


_cross_entropy.register_fake(
    lambda hidden, table, *rest: _cross_entropy_like(hidden, table, with_hidden=rest[-3], keeps=rest[-2])
)
_cross_entropy_table_gradient.register_fake(lambda hidden, table, *rest: _like(table))
_token_scores.register_fake(lambda hidden, *rest: (_vector(hidden), _vector(hidden, torch.int64)))
_soft_embedding.register_fake(lambda hidden, table, *rest: _soft_embedding_like(hidden, table, keeps=rest[-2]))
_soft_embedding_table_gradient.register_fake(lambda hidden, table, *rest: _like(table))
_token_stats.register_fake(lambda hidden, table, *rest: _stats_like(hidden, table))


# -- autograd --------------------------------------------------------------------------------------------------


def _save_cross_entropy(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, table, target, ctx.softcap, observed, bonus, is_ignored, _, _, ctx.chunk_bytes = inputs
    _, peak, total, grad_hidden, kept = output
    ctx.set_materialize_grads(False)  # zeros like `kept` would be one more chunk
    of_table = (hidden, table, target, observed, bonus, is_ignored, peak, total, kept)
    ctx.save_for_backward(grad_hidden, *(of_table if ctx.needs_input_grad[1] else ()))


def _cross_entropy_gradients(ctx: Any, grad_loss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    grads: list[Tensor | None] = [None, None]
    if grad_loss is not None:
        grad_hidden, *rest = ctx.saved_tensors
        if ctx.needs_input_grad[0]:
            grads[0] = (grad_hidden * grad_loss[:, None]).to(grad_hidden.dtype)
        if ctx.needs_input_grad[1]:
            hidden, table, target, observed, bonus, is_ignored, *of_rows = rest
            arguments = target, ctx.softcap, observed, bonus, is_ignored, grad_loss, *of_rows, ctx.chunk_bytes
            grads[1] = torch.ops.blockdiff.cross_entropy_table_gradient(hidden, table, *arguments)
    return *grads, *[None] * 8


def _save_soft_embedding(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    hidden, table, ctx.softcap, ctx.temperature, _, ctx.chunk_bytes = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, table, *output[1:])


def _soft_embedding_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    hidden, table, *of_rows = ctx.saved_tensors
    grad_table = None
    if grad is not None and ctx.needs_input_grad[1]:
        arguments = ctx.softcap, ctx.temperature, grad, *of_rows, ctx.chunk_bytes
        grad_table = torch.ops.blockdiff.soft_embedding_table_gradient(hidden, table, *arguments)
    return None, grad_table, *[None] * 4


_cross_entropy.register_autograd(_cross_entropy_gradients, setup_context=_save_cross_entropy)
_soft_embedding.register_autograd(_soft_embedding_gradients, setup_context=_save_soft_embedding)


# -- the public functions: signatures and meaning as in native.py ------------------------------------------------


def linear_cross_entropy(
    hidden_ND: Tensor,
    table_VD: Tensor,
    target_N: Tensor,
    softcap: float | None,
    observed_N: Tensor | None = None,
    bonus_N: Tensor | None = None,
    is_ignored_N: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Tensor:
    """Cross-entropy of every token, fp32 [N], holding one chunk of products whatever N."""
    hidden, table = in_autocast(hidden_ND, table_VD)
    wants_hidden, wants_table = (torch.is_grad_enabled() and t.requires_grad for t in (hidden, table))
    keeps = wants_table and _fits(hidden, table, chunk_bytes)
    vectors = (_contiguous(v) for v in (observed_N, bonus_N, is_ignored_N))
    arguments = target_N.contiguous(), softcap, *vectors, wants_hidden, keeps, chunk_bytes
    return _cross_entropy(hidden, table, *arguments)[0]


def token_scores(
    hidden_ND: Tensor,
    table_VD: Tensor,
    target_N: Tensor,
    softcap: float | None,
    observed_N: Tensor | None = None,
    bonus_N: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy fp32 [N] and argmax int64 [N] of the same logits (the bonus included), without gradients."""
    hidden, table = (t.detach() for t in in_autocast(hidden_ND, table_VD))
    favoured = (_contiguous(v) for v in (observed_N, bonus_N))
    return _token_scores(hidden, table, target_N.contiguous(), softcap, *favoured, chunk_bytes)


def soft_embedding(
    hidden_ND: Tensor, table_VD: Tensor, softcap: float | None, temperature: float, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """`softmax(z / T) E` [N, D], without the factor sqrt(D); a gradient flows to E, none through z."""
    hidden, table = in_autocast(hidden_ND.detach(), table_VD)
    keeps = torch.is_grad_enabled() and table.requires_grad and _fits(hidden, table, chunk_bytes)
    return _soft_embedding(hidden, table, softcap, temperature, keeps, chunk_bytes)[0].to(table_VD.dtype)


def token_stats(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor | float,
    uniform_N: Tensor,
    given_N: Tensor | None = None,
    allowed_NW: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Stats:
    """Entropy, argmax, a sample at the given uniform number, the soft embedding and a log-probability of z / T.

    Samples are those of native.py except where the uniform number lies within about 1e-6 of an edge of the CDF.
    """
    hidden, table = (t.detach() for t in in_autocast(hidden_ND, table_VD))
    temperature = torch.as_tensor(temperature_N, dtype=torch.float32, device=hidden.device).expand(hidden.shape[0])
    vectors = (_contiguous(v) for v in (temperature, uniform_N.float(), given_N))
    if allowed_NW is not None and allowed_NW.stride(1) != 1:  # but one mask expanded to all rows stays one
        allowed_NW = allowed_NW.contiguous()
    stats = Stats(*_token_stats(hidden, table, softcap, *vectors, allowed_NW, chunk_bytes))
    return stats._replace(soft_embedding=stats.soft_embedding.to(table_VD.dtype))


def _fits(hidden: Tensor, table: Tensor, chunk_bytes: int) -> bool:
    return hidden.shape[0] * table.shape[0] * table.element_size() <= chunk_bytes


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
