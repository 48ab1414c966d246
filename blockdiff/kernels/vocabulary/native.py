"""The vocabulary ops in plain torch, in chunks of whole logit rows: at most CHUNK_BYTES of logits live at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_BYTES = 64 << 20  # one fp32 chunk of logits; the backward holds about two of them beside the product


class Stats(NamedTuple):
    """What one denoising step needs of the logits z / T of every position."""

    entropy: Tensor  # fp32 [...], nats
    argmax: Tensor  # int64 [...], ties to the lower id
    sample: Tensor  # int64 [...], by inverse CDF
    soft_embedding: Tensor  # [..., D], in the table's dtype


def logits(hidden: Tensor, table_VD: Tensor, softcap: float | None) -> Tensor:
    """`softcap * tanh(h E^T / softcap)`, the product in the model's dtype, the cap in fp32; [..., V] fp32."""
    z = F.linear(hidden, table_VD).float()
    if softcap is None:
        return z
    return z.div(softcap).tanh().mul(softcap) if z.requires_grad else z.div_(softcap).tanh_().mul_(softcap)


def _chunks(tokens: int, vocabulary: int, chunk_bytes: int) -> Iterator[slice]:
    rows = max(1, chunk_bytes // (4 * vocabulary))
    for lo in range(0, tokens, rows):
        yield slice(lo, min(lo + rows, tokens))


class _CrossEntropy(torch.autograd.Function):
    """Loss per token. A frozen table gets its hidden gradients in the forward; a trained one recomputes the chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, table_VD: Tensor, target_N: Tensor, softcap: float | None, chunk_bytes: int
    ) -> Tensor:
        hidden, table = hidden_ND, table_VD
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, table = hidden.to(dtype), table.to(dtype)
        loss_N = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
        wants_hidden, wants_table = ctx.needs_input_grad[:2]
        grad_in_forward = wants_hidden and not wants_table
        grad_hidden = torch.empty_like(hidden) if grad_in_forward else None
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(hidden.shape[0], table.shape[0], chunk_bytes):
                loss_N[rows], grad_z = _cross_entropy_chunk(
                    hidden[rows], table, target_N[rows], softcap, with_gradient=grad_in_forward
                )
                if grad_hidden is not None and grad_z is not None:
                    torch.mm(grad_z, table, out=grad_hidden[rows])
        ctx.softcap, ctx.chunk_bytes, ctx.dtypes = softcap, chunk_bytes, (hidden_ND.dtype, table_VD.dtype)
        if grad_hidden is not None:
            ctx.save_for_backward(grad_hidden)
        elif wants_table:
            ctx.save_for_backward(hidden, table, target_N)
        return loss_N

    @staticmethod
    def backward(ctx: Any, grad_loss_N: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        wants_hidden, wants_table = ctx.needs_input_grad[:2]
        if not wants_table:
            (grad_hidden,) = ctx.saved_tensors
            return (grad_hidden * grad_loss_N[:, None]).to(ctx.dtypes[0]), None, None, None, None
        hidden, table, target_N = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_table = torch.zeros_like(table, dtype=torch.promote_types(table.dtype, torch.float32))
        for rows in _chunks(hidden.shape[0], table.shape[0], ctx.chunk_bytes):
            _, grad_z = _cross_entropy_chunk(hidden[rows], table, target_N[rows], ctx.softcap, with_gradient=True)
            assert grad_z is not None
            grad_z.mul_(grad_loss_N[rows, None].to(grad_z.dtype))
            if grad_hidden is not None:
                torch.mm(grad_z, table, out=grad_hidden[rows])
            if grad_table.dtype == grad_z.dtype:
                grad_table.addmm_(grad_z.t(), hidden[rows])
            else:
                grad_table.add_(grad_z.t() @ hidden[rows])
        return (
            None if grad_hidden is None else grad_hidden.to(ctx.dtypes[0]),
            grad_table.to(ctx.dtypes[1]),
            None,
            None,
            None,
        )


def _cross_entropy_chunk(
    hidden: Tensor, table: Tensor, target: Tensor, softcap: float | None, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Loss of a chunk and the gradient of its raw products in the model's dtype, in two buffers of logits."""
    z = logits(hidden.detach(), table.detach(), softcap)
    lse = z.logsumexp(-1) if not with_gradient else None
    observed = z.gather(-1, target[:, None]).squeeze(-1)
    if lse is not None:
        return lse - observed, None
    slope = None if softcap is None else 1.0 - (z / softcap).square_()
    peak = z.amax(-1, keepdim=True)
    total = z.sub_(peak).exp_().sum(-1, keepdim=True)
    loss = (total.log() + peak).squeeze(-1) - observed
    grad = z.div_(total)
    grad[torch.arange(grad.shape[0], device=grad.device), target] -= 1.0
    if slope is not None:
        grad.mul_(slope)
    return loss, grad.to(hidden.dtype)


def linear_cross_entropy(
    hidden_ND: Tensor, table_VD: Tensor, target_N: Tensor, softcap: float | None, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """Cross-entropy of every token, fp32 [N], holding one chunk of logits whatever N."""
    return _CrossEntropy.apply(hidden_ND, table_VD, target_N, softcap, chunk_bytes)


def soft_embedding(
    hidden_ND: Tensor, table_VD: Tensor, softcap: float | None, temperature: float, chunk_bytes: int = CHUNK_BYTES
) -> Tensor:
    """`softmax(z / T) E` [N, D], without the factor sqrt(D); carries no gradient."""
    out = torch.empty_like(hidden_ND, dtype=table_VD.dtype)
    with torch.no_grad():
        for rows in _chunks(hidden_ND.shape[0], table_VD.shape[0], chunk_bytes):
            z = logits(hidden_ND[rows], table_VD, softcap)
            z = z if temperature == 1.0 else z.div_(temperature)
            torch.mm(z.softmax(-1).to(table_VD.dtype), table_VD, out=out[rows])
    return out


def token_stats(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor | float,
    uniform_N: Tensor,
    chunk_bytes: int = CHUNK_BYTES,
) -> Stats:
    """Entropy, argmax, a sample at the given uniform number, and the soft embedding of z / T, in one sweep."""
    parts = []
    with torch.no_grad():
        for rows in _chunks(hidden_ND.shape[0], table_VD.shape[0], chunk_bytes):
            z = logits(hidden_ND[rows], table_VD, softcap)
            z.div_(temperature_N[rows, None] if isinstance(temperature_N, Tensor) else temperature_N)
            log_p = z.log_softmax(-1)
            p = log_p.exp()
            entropy = -(p * log_p).sum(-1)
            cdf = p.cumsum(-1)
            threshold = uniform_N[rows, None].to(cdf.dtype) * cdf[:, -1:]
            sample = torch.searchsorted(cdf, threshold, right=True).squeeze(-1).clamp_(max=z.shape[-1] - 1)
            soft = torch.mm(p.to(table_VD.dtype), table_VD)
            parts.append(Stats(entropy, z.argmax(-1), sample, soft))
    return parts[0] if len(parts) == 1 else Stats(*(torch.cat(column) for column in zip(*parts, strict=True)))
