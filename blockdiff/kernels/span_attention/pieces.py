"""Attention of large calls in pieces of the queries, so that memory is linear in the tokens.

A piece reads only the keys that its queries see. Its scores and mask are in memory only while it is computed, and are
recomputed in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.spans import Spans

MASK = 1 << 20  # elements of [B, queries, keys] in a piece
LEAST_QUERIES = 64
PROBED_QUERIES = 128  # size of the pieces from which the number of keys per piece is estimated

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]  # (q, k, v, is_seen, scale) -> output


class _Piece(NamedTuple):
    """A slice of the queries, and the slices of the prefix keys and of the call's own keys that they see."""

    queries: slice
    prefix: slice
    own_keys: slice


def in_pieces(q_BThd: Tensor, sources: Sequence[Tensor], spans: Spans, scale: float, attend: Attend) -> Tensor:
    """Compute attention [B, T, h, d] by `attend`, piece by piece.

    sources: prefix keys, prefix values, own keys, own values, each [B, tokens, K, d].
    """
    if torch.is_grad_enabled():
        return _InPieces.apply(q_BThd, *sources, spans, scale, attend)
    return _forward(q_BThd, sources, spans, scale, attend)


def _forward(q: Tensor, sources: Sequence[Tensor], spans: Spans, scale: float, attend: Attend) -> Tensor:
    out = q.new_empty(*q.shape[:3], sources[3].shape[3])
    for piece in _pieces(q, sources, spans):
        out[:, piece.queries] = _one(piece, [q[:, piece.queries], *_parts(piece, sources)], spans, scale, attend)
    return out


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, pk: Tensor, pv: Tensor, ok: Tensor, ov: Tensor, spans: Spans, scale: float, attend: Attend
    ) -> Tensor:
        ctx.save_for_backward(q, pk, pv, ok, ov)
        ctx.rest = spans, scale, attend
        return _forward(q, (pk, pv, ok, ov), spans, scale, attend)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        q, *sources = ctx.saved_tensors
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q = torch.empty_like(q)
        grads = [torch.zeros_like(x, dtype=wide) for x in sources]
        for piece in _pieces(q, sources, ctx.rest[0]):
            with torch.enable_grad():
                leaves = [x.detach().requires_grad_() for x in (q[:, piece.queries], *_parts(piece, sources))]
                out = _one(piece, leaves, *ctx.rest)
            piece_grads = torch.autograd.grad(out, leaves, grad_out[:, piece.queries], allow_unused=True)
            grad_q[:, piece.queries] = piece_grads[0]
            for total, part in zip(_parts(piece, grads), piece_grads[1:], strict=True):
                if part is not None:
                    total.add_(part)
        return grad_q, *(total.to(q.dtype) for total in grads), None, None, None


def _one(piece: _Piece, parts: Sequence[Tensor], spans: Spans, scale: float, attend: Attend) -> Tensor:
    """Compute one piece. parts: its queries, and prefix keys, prefix values, own keys, own values that they see."""
    q, pk, pv, ok, ov = parts
    is_seen = None
    if not spans.sees_all:
        seen = spans.part(piece.queries, piece.prefix.start, piece.own_keys.start)
        is_seen = seen.dense(pk.shape[1], ok.shape[1])
    k, v = (torch.cat(pair, 1) if pair[0].shape[1] else pair[1] for pair in ((pk, ok), (pv, ov)))
    return attend(q, k, v, is_seen, scale)


def _parts(piece: _Piece, sources: Sequence[Tensor]) -> list[Tensor]:
    """Slice the sources to the keys and values that a piece sees."""
    slices = piece.prefix, piece.prefix, piece.own_keys, piece.own_keys
    return [x[:, part] for x, part in zip(sources, slices, strict=True)]


def _pieces(q: Tensor, sources: Sequence[Tensor], spans: Spans) -> Iterator[_Piece]:
    """Cut the queries into pieces of at least LEAST_QUERIES whose masks have at most about MASK elements."""
    (B, T), tokens = q.shape[:2], (sources[0].shape[1], sources[2].shape[1])

    def of(queries: int) -> Iterator[_Piece]:
        for n, ends in enumerate(spans.hulls(queries)):
            if spans.sees_all:
                ends = [0, tokens[0], 0, tokens[1]]
            hull = zip(ends[0::2], ends[1::2], tokens, strict=True)
            prefix, own_keys = (slice(min(a, most), min(b, most)) for a, b, most in hull)
            yield _Piece(slice(n * queries, min(T, (n + 1) * queries)), prefix, own_keys)

    probed = of(PROBED_QUERIES)
    keys = max(p.prefix.stop - p.prefix.start + p.own_keys.stop - p.own_keys.start for p in probed)
    # at most as many queries as keys: a longer piece would see far more keys than each of its queries
    yield from of(max(LEAST_QUERIES, min(T, MASK // max(1, B * keys), keys)))
