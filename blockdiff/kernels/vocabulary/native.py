"""The vocabulary ops in plain torch, in chunks of whole logit rows: at most CHUNK_BYTES of logits live at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.vocabulary.classes import Classes, ClassStats, Penalty, of_logits, penalised
from blockdiff.kernels.vocabulary.shaping import Shaping, is_left

CHUNK_BYTES = 64 << 20  # one fp32 chunk of logits; the cross-entropy holds two or three of them
CPU_BYTES = 8 << 20  # chunks on a CPU


class Stats(NamedTuple):
    """What one denoising step needs of the logits z / T of every position; tokens not allowed have z = -inf."""

    entropy: Tensor  # fp32 [...], nats
    argmax: Tensor  # int64 [...], ties to the lower id
    sample: Tensor  # int64 [...], by inverse CDF
    soft_embedding: Tensor  # [..., D], in the table's dtype
    log_probability: Tensor  # fp32 [...], nats: of the given token, of the sample where none is given


def logits(hidden: Tensor, table_VD: Tensor, softcap: float | None) -> Tensor:
    """`softcap * tanh(h E^T / softcap)`, the product in the model's dtype, the cap in fp32; [..., V] fp32."""
    z = F.linear(hidden, table_VD).float()
    if softcap is None:
        return z
    return z.div(softcap).tanh().mul(softcap) if z.requires_grad else z.div_(softcap).tanh_().mul_(softcap)


def _chunk_rows(hidden_ND: Tensor, vocabulary: int) -> int:
    """How many rows' fp32 logits fill a chunk, on a CPU one that stays in its caches."""
    rows = max(1, (min(CHUNK_BYTES, CPU_BYTES) if hidden_ND.is_cpu else CHUNK_BYTES) // (4 * vocabulary))
    return max(rows, min(64, CHUNK_BYTES // (4 * vocabulary)))  # the product needs some rows to be efficient


def _chunks(hidden_ND: Tensor, vocabulary: int) -> Iterator[slice]:
    rows = _chunk_rows(hidden_ND, vocabulary)
    for lo in range(0, max(hidden_ND.shape[0], 1), rows):
        yield slice(lo, min(lo + rows, hidden_ND.shape[0]))


class _CrossEntropy(torch.autograd.Function):
    """Loss per token; the gradient of the raw products is G / total, the rows' factors waiting for the products.

    A frozen table needs only the hidden gradients, which the forward makes chunk by chunk. A trained one keeps G where
    all of it is no larger than a chunk, and recomputes it otherwise.
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
        kept = hidden.new_empty(N, V) if wants_table and hidden.element_size() * N * V <= CHUNK_BYTES else None
        loss_N = torch.empty(N, dtype=torch.float32, device=hidden.device)
        total_N = torch.empty_like(loss_N)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(hidden, V):
                into = None if kept is None else kept[rows]
                loss_N[rows], total_N[rows], grad = of_chunk(
                    hidden[rows],
                    table,
                    None if target_N is None else target_N[rows],
                    softcap,
                    _rows_of(observed_N, bonus_N, rows),
                    grad_hidden is not None or kept is not None,
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
            ctx.save_for_backward(hidden, table, target_N, total_N, kept, observed_N, bonus_N)
        return loss_N

    @staticmethod
    def backward(ctx: Any, grad_loss_N: Tensor) -> tuple[Tensor | None, ...]:
        wants_hidden, wants_table = ctx.needs_input_grad[:2]
        if not wants_table:
            (grad_hidden,) = ctx.saved_tensors
            return (grad_hidden * grad_loss_N[:, None]).to(ctx.dtypes[0]), *[None] * 6
        hidden, table, target_N, total_N, kept, observed_N, bonus_N = ctx.saved_tensors
        factor_N1 = (grad_loss_N / total_N)[:, None]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_table = torch.zeros_like(table, dtype=torch.promote_types(table.dtype, torch.float32))
        weighted = (hidden * factor_N1).to(hidden.dtype)
        whole = [slice(0, hidden.shape[0])]
        for rows in _chunks(hidden, table.shape[0]) if kept is None else whole:
            if kept is None:
                favoured = _rows_of(observed_N, bonus_N, rows)
                target = None if target_N is None else target_N[rows]
                *_, grad = ctx.of_chunk(hidden[rows], table, target, ctx.softcap, favoured, True)
                grad = grad.to(table.dtype)
            else:
                grad = kept
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


def _cross_entropy_chunk(
    hidden: Tensor,
    table: Tensor,
    target: Tensor | None,
    softcap: float | None,
    favoured: tuple[Tensor, Tensor] | None,
    with_gradient: bool,
    _: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, normaliser and (with gradient) G = total * dloss/dz of a chunk, fp32, in two buffers of logits.

    Without a target the loss is the log-sum-exp.

    Capped logits lie in [-cap, cap], so for caps up to 40 exp needs no maximum taken off (e^40 * V < 1e24). A bonus b
    multiplies the exponential of the observed token by e^b: two numbers per row change, and no sweep is added.
    """
    z, target = F.linear(hidden, table).float(), None if target is None else target[:, None]
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
            e.mul_(torch.addcmul(torch.ones((), device=t.device), t, t, value=-1.0, out=t))  # tanh' = 1 - tanh^2
    return loss.squeeze(-1), total.squeeze(-1), e


def linear_cross_entropy(
    hidden_ND: Tensor,
    table_VD: Tensor,
    target_N: Tensor | None,
    softcap: float | None,
    observed_N: Tensor | None = None,
    bonus_N: Tensor | None = None,
    is_ignored_N: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of every token, fp32 [N], holding one chunk of logits whatever N; without targets log-sum-exp.

    bonus_N (fp32, 0 to 40) is added to the soft-capped logit of token observed_N (int64) before the softmax; both or
    neither. Rows where is_ignored_N have loss 0 and no gradient, whatever they and their targets hold.
    """
    given = hidden_ND, table_VD, target_N, softcap, observed_N, bonus_N, is_ignored_N
    return cross_entropy_by(_cross_entropy_chunk, *given)


def cross_entropy_by(
    of_chunk: Callable[..., tuple[Tensor, Tensor, Tensor]],
    hidden_ND: Tensor,
    table_VD: Tensor,
    target_N: Tensor | None,
    softcap: float | None,
    observed_N: Tensor | None,
    bonus_N: Tensor | None,
    is_ignored_N: Tensor | None,
) -> Tensor:
    """`linear_cross_entropy` by a function that computes as `_cross_entropy_chunk` does.

    Its last argument is where it may put G; it returns that very tensor if it does.
    """
    if is_ignored_N is None:
        return _CrossEntropy.apply(hidden_ND, table_VD, target_N, softcap, observed_N, bonus_N, of_chunk)
    kept = (~is_ignored_N).nonzero().squeeze(-1)
    observed, bonus = (None if x is None else x[kept] for x in (observed_N, bonus_N))
    target = None if target_N is None else target_N[kept]
    loss = _CrossEntropy.apply(hidden_ND[kept], table_VD, target, softcap, observed, bonus, of_chunk)
    return loss.new_zeros(hidden_ND.shape[0]).index_copy(0, kept, loss)


@torch.no_grad()
def token_scores(
    hidden_ND: Tensor,
    table_VD: Tensor,
    target_N: Tensor,
    softcap: float | None,
    observed_N: Tensor | None = None,
    bonus_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy fp32 [N] and argmax int64 [N] of the same logits (the bonus included), without gradients."""
    hidden, table = in_autocast(hidden_ND, table_VD)
    loss_N = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
    argmax_N = torch.empty_like(target_N)
    with torch.autocast(hidden.device.type, enabled=False):
        for rows in _chunks(hidden, table.shape[0]):
            z = logits(hidden[rows], table, softcap)
            favoured = _rows_of(observed_N, bonus_N, rows)
            if favoured is not None:
                observed = favoured[0][:, None]
                z.scatter_(1, observed, z.gather(1, observed) + favoured[1][:, None])
            peak, argmax_N[rows] = z.max(-1)
            of_target = z.gather(-1, target_N[rows, None]).squeeze(-1) - peak
            loss_N[rows] = z.sub_(peak[:, None]).exp_().sum(-1).log() - of_target
    return loss_N, argmax_N


class _SoftEmbedding(torch.autograd.Function):
    """The logits are given, the table is not: its gradient is p^T grad, with p kept where it fits in a chunk."""

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
        keeps = is_trained and table_VD.element_size() * N * V <= CHUNK_BYTES
        kept = table_VD.new_empty(N, V) if keeps else None
        out = torch.empty_like(hidden_ND, dtype=table_VD.dtype)
        for rows in _chunks(hidden_ND, V):
            p = probabilities(hidden_ND[rows], table_VD, softcap, temperature)
            torch.mm(p, embedding, out=out[rows])
            if kept is not None:
                kept[rows] = p
        ctx.save_for_backward(*((kept,) if kept is not None else (hidden_ND, table_VD)))
        ctx.arguments, ctx.probabilities = (softcap, temperature), probabilities
        ctx.is_tied = embedding_VD is None
        return out

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        if len(ctx.saved_tensors) == 1:
            grad_table = ctx.saved_tensors[0].t() @ grad_ND
        else:
            hidden_ND, table_VD = ctx.saved_tensors
            softcap, temperature = ctx.arguments
            grad_table = torch.zeros_like(table_VD, dtype=torch.promote_types(table_VD.dtype, torch.float32))
            for rows in _chunks(hidden_ND, table_VD.shape[0]):
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
    """`softmax(z / T) E` [N, D], without the factor sqrt(D); a gradient flows to E, none through z.

    embedding_VD: E where it is not the table that makes the logits z.
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
    """`soft_embedding` by a function that computes as `_probabilities` does."""
    is_plain = not (torch.is_grad_enabled() or torch.is_autocast_enabled(hidden_ND.device.type))
    if is_plain and hidden_ND.shape[0] <= _chunk_rows(hidden_ND, table_VD.shape[0]):
        # where tokens are few, the calls around these two lines cost as much as they do
        embedding = table_VD if embedding_VD is None else embedding_VD
        return torch.mm(probabilities(hidden_ND, table_VD, softcap, temperature), embedding)
    return _SoftEmbedding.apply(hidden_ND, table_VD, softcap, temperature, embedding_VD, probabilities)


def pack_allowed(is_allowed_NV: Tensor) -> Tensor:
    """A mask as token_stats takes it, int32 [N, ceil(V / 32)]: token v is bit v % 32 of word v // 32."""
    N, V = is_allowed_NV.shape
    bits = F.pad(is_allowed_NV.long(), (0, -V % 32)).view(N, -1, 32)
    words = (bits << torch.arange(32, device=bits.device)).sum(-1)
    return torch.where(words >> 31 > 0, words - (1 << 32), words).int()


def _is_forbidden(allowed_NW: Tensor, vocabulary: int) -> Tensor:
    places = torch.arange(32, dtype=torch.int32, device=allowed_NW.device)
    return ((allowed_NW[..., None] >> places) & 1 == 0).flatten(-2)[:, :vocabulary]


def token_stats(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor | float,
    uniform_N: Tensor,
    given_N: Tensor | None = None,
    allowed_NW: Tensor | None = None,
    shaping: Shaping | None = None,
    embedding_VD: Tensor | None = None,
) -> Stats:
    """Entropy, argmax, a sample at the given uniform number, and the soft embedding of z / T, in one sweep.

    given_N: int64 tokens whose log-probability is wanted instead of the samples'; allowed_NW: the tokens allowed at
    every position, packed by `pack_allowed`, at least one each. Tokens not allowed are never sampled. shaping: what is
    done to the distribution that all of these but the soft embedding are of. embedding_VD: what soft embeddings are
    made of where it is not the table that makes the logits.
    """
    parts, embedding = [], table_VD if embedding_VD is None else embedding_VD
    with torch.no_grad():
        for rows in _chunks(hidden_ND, table_VD.shape[0]):
            z = logits(hidden_ND[rows], table_VD, softcap)
            is_forbidden = soft = None
            if allowed_NW is not None:
                own = slice(0, 1) if allowed_NW.stride(0) == 0 else rows  # one mask for all is unpacked once
                is_forbidden = _is_forbidden(allowed_NW[own], z.shape[-1]).expand(z.shape)
                z.masked_fill_(is_forbidden, -torch.inf)
            temperature = temperature_N[rows, None] if isinstance(temperature_N, Tensor) else temperature_N
            z.div_(temperature)
            if shaping is not None:
                soft = torch.mm(z.log_softmax(-1).exp_().to(table_VD.dtype), embedding)
                if shaping.other_ND is not None:
                    z_u = logits(shaping.other_ND[rows], table_VD, softcap).div_(temperature)
                    z.mul_(1 + shaping.guidance).sub_(z_u, alpha=shaping.guidance)
                    if is_forbidden is not None:  # 0 times minus infinity is no number
                        z.masked_fill_(is_forbidden, -torch.inf)
                if shaping.observed_N is not None and shaping.bonus_N is not None:
                    z.scatter_add_(1, shaping.observed_N[rows, None], shaping.bonus_N[rows, None] / temperature)
                if shaping.has_filters:
                    is_forbidden = ~is_left(z, shaping.top_k, shaping.top_p, shaping.min_p)
                    z.masked_fill_(is_forbidden, -torch.inf)
            log_p = z.log_softmax(-1)
            p = log_p.exp()
            entropy = -(p * (log_p if is_forbidden is None else log_p.masked_fill(is_forbidden, 0.0))).sum(-1)
            cdf = p.cumsum(-1)
            threshold = uniform_N[rows, None].to(cdf.dtype) * cdf[:, -1:]
            sample = torch.searchsorted(cdf, threshold, right=True).clamp_(max=z.shape[-1] - 1)
            argmax = z.argmax(-1)
            if is_forbidden is not None:  # a parallel cumsum can step back by a rounding, onto a forbidden token
                sample = torch.where(is_forbidden.gather(-1, sample), argmax[:, None], sample)
            log_probability = log_p.gather(-1, sample if given_N is None else given_N[rows, None]).squeeze(-1)
            if soft is None:
                soft = torch.mm(p.to(table_VD.dtype), embedding)
            parts.append(Stats(entropy, argmax, sample.squeeze(-1), soft, log_probability))
    return parts[0] if len(parts) == 1 else Stats(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def log_sums(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor | float = 1.0,
    allowed_NW: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and maximum of z / T over the tokens allowed, fp32 [N] each, -inf where none is.

    What ranks that hold parts of a table merge; the other arguments are those of `token_stats`.
    """
    parts = []
    for rows in _chunks(hidden_ND, table_VD.shape[0]):
        z = logits(hidden_ND[rows], table_VD, softcap)
        if allowed_NW is not None:
            z.masked_fill_(_is_forbidden(allowed_NW[rows], z.shape[-1]), -torch.inf)
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
    """What a constraint needs of every position and class of tokens, and the model's own soft embedding, in one sweep.

    `excluded` is a token that no distribution has, the soft embedding's included: the mask of a model of mask noise.
    """
    parts, rows_of_sums = [], max(1, _chunk_rows(hidden_ND, table_VD.shape[0]) // 4)  # the sums are in fp64
    with torch.no_grad():
        for rows in _chunks(hidden_ND, table_VD.shape[0]):
            z = logits(hidden_ND[rows], table_VD, softcap)
            if excluded is not None:
                z[:, excluded] = -torch.inf
            temperature = temperature_N[rows, None] if isinstance(temperature_N, Tensor) else temperature_N
            own = (z if penalty is None else z.clone()).div_(temperature)
            embedding = table_VD if embedding_VD is None else embedding_VD
            soft = torch.mm(own.log_softmax(-1).exp_().to(table_VD.dtype), embedding)
            if penalty is not None:
                own = penalised(z, penalty, rows).div_(temperature)
            uniform = uniform_N[rows]
            columns = [
                of_logits(own[lo : lo + rows_of_sums], uniform[lo : lo + rows_of_sums], classes)
                for lo in range(0, len(own), rows_of_sums)
            ]
            parts.append((*(torch.cat(column) for column in zip(*columns, strict=True)), soft))
    return ClassStats(*(column[0] if len(parts) == 1 else torch.cat(column) for column in zip(*parts, strict=True)))
