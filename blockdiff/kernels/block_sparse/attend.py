"""Attention of a call whose queries select blocks of keys, composed of select_blocks and block_sparse_attention."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdiff.kernels.span_attention.paged import PagedTensor, PrefixTensor, written
from blockdiff.spans import Spans, Sweep

if TYPE_CHECKING:
    from blockdiff.kernels import Kernels

KV = tuple[Tensor, Tensor, Tensor]  # keys, values, index keys


@dataclass(frozen=True)
class Selection:
    """The selection of a layer: block to score as `select_blocks` has them; scale: of attention's scores.

    canvas_length: of canvases whose queries have one selection (None: each query has its own).
    """

    block: int
    topk: int
    init: int
    local: int
    score: str
    scale: float
    canvas_length: int | None = None

    def blocks(self, ops: Kernels, idx_q: Tensor, idx_k: Any, visible_BT: Tensor, first_BT: Tensor | None) -> Tensor:
        """The blocks that `select_blocks` gives by these numbers."""
        return ops.select_blocks(
            idx_q, idx_k, visible_BT, first_BT,
            block=self.block, topk=self.topk, init=self.init, local=self.local, score=self.score,
        )  # fmt: skip


def sparse_attention(
    ops: Kernels, q: Tensor, idx_q: Tensor, kv: KV, spans: Spans | Sweep, past: tuple[PrefixTensor, ...] | None,
    selection: Selection, layer: Hashable,
) -> Tensor:  # fmt: skip
    """The output of attention [B, T, h, d] over the blocks that index queries [B, T, H, d] select.

    kv: keys and values [B, T, K, d] and index keys [B, T, 1, d] of the call, without tokens where these were written
    into the pages of `past`; layer: whose selection is kept, where `spans.kept` stands for several calls. Clean queries
    select among the blocks of all keys before them; noisy ones among those of the prefix, and see all own keys of their
    span besides.
    """
    if not isinstance(spans, Sweep):
        return _over_spans(ops, q, idx_q, kv, spans, past, selection, layer)
    n = spans.clean_tokens
    clean = tuple(x[:, :n] for x in kv)
    prefix = tuple((x.detach() if spans.stop_gradient else x)[:, : min(n, spans.columns)] for x in kv)
    of_clean = _over_spans(ops, q[:, :n], idx_q[:, :n], clean, spans.clean, None, selection, layer)
    noisy = tuple(x[:, n:] for x in kv)
    of_noisy = _over_spans(ops, q[:, n:], idx_q[:, n:], noisy, spans.noisy, prefix, selection, layer)
    return torch.cat([of_clean, of_noisy], 1)


def _over_spans(
    ops: Kernels, q: Tensor, idx_q: Tensor, kv: tuple[Tensor, ...], spans: Spans, past: tuple[PrefixTensor, ...] | None,
    selection: Selection, layer: Hashable,
) -> Tensor:  # fmt: skip
    (k, v, idx_k), block, scale = kv, selection.block, selection.scale
    prefix_lo, prefix_hi, own_lo, own_hi = spans.bounds_BT4.long().unbind(-1)
    pages = written(past)
    if pages is not None:  # pages hold all keys, and begin with a row's first token
        visible_BT = spans.in_one_run.bounds_BT4[..., 1]
        ids = selection.blocks(ops, idx_q, pages[2], visible_BT, None)
        return ops.block_sparse_attention(q, pages[0], pages[1], ids, visible_BT, None, block, scale)
    first_BT: Tensor | None
    if spans.is_causal:
        past_B = prefix_hi.amax(1)
        before = [None] * 3 if past is None else [_dense(x) for x in past]
        k, v, idx_k = (_joined(a, b, past_B) for a, b in zip(before, kv, strict=True))
        first_BT = torch.where(own_lo > 0, past_B[:, None] + own_lo, prefix_lo)
        visible_BT = torch.where(own_hi > own_lo, past_B[:, None] + own_hi - first_BT, 0)
        ids = selection.blocks(ops, idx_q, idx_k.squeeze(2), visible_BT, first_BT)
        return ops.block_sparse_attention(q, k, v, ids, visible_BT, first_BT, block, scale)
    assert past is not None or not bool((prefix_hi > prefix_lo).any())
    prefix_k, prefix_v, prefix_idx = past or tuple(x[:, :0] for x in kv)
    # pages begin with a row's first token
    first_BT = None if isinstance(prefix_k, PagedTensor) else prefix_lo
    visible_BT = (prefix_hi - prefix_lo).clamp(min=0)

    def select() -> Tensor:
        L = min(selection.canvas_length or 1, idx_q.shape[1])
        if L == 1:
            return selection.blocks(ops, idx_q, prefix_idx, visible_BT, first_BT)
        first = None if first_BT is None else first_BT[:, ::L]
        ids = selection.blocks(ops, mean_query(idx_q, own_hi > own_lo, L), prefix_idx, visible_BT[:, ::L], first)
        return ids.repeat_interleave(L, 1)

    ids = select() if spans.kept is None else spans.kept.of(layer, select)
    own_BT2 = torch.stack([own_lo, own_hi], -1)
    return ops.block_sparse_attention(
        q, prefix_k, prefix_v, ids, visible_BT, first_BT, block, scale, own_k=k, own_v=v, own_BT2=own_BT2
    )


def mean_query(idx_q_BTHd: Tensor, is_there_BT: Tensor, canvas_length: int) -> Tensor:
    """The mean index query of each canvas [B, T / canvas_length, H, d]; padding counts for nothing."""
    B, _, H, d = idx_q_BTHd.shape
    weight = is_there_BT.view(B, -1, canvas_length, 1, 1).to(idx_q_BTHd.dtype)
    return (idx_q_BTHd.view(B, -1, canvas_length, H, d) * weight).sum(2) / weight.sum(2).clamp(min=1)


def _dense(x: PrefixTensor) -> Tensor:
    """A tensor of a prefix [B, columns, K, d], whatever it lies in."""
    return x.dense() if isinstance(x, PagedTensor) else x


def _joined(before: Tensor | None, own: Tensor, past_B: Tensor) -> Tensor:
    """Each row's `past_b` tokens before a call and the call's own ones right behind them: [B, columns, ...]."""
    if before is None or not before.shape[1]:
        return own
    if bool((past_B == before.shape[1]).all()):
        return torch.cat([before, own], 1)
    both, columns, T = torch.cat([before, own], 1), before.shape[1], own.shape[1]
    place = torch.arange(columns + T, device=own.device).expand(len(past_B), -1)
    past_B1 = past_B[:, None]
    source = torch.where(place < past_B1, place, (place - past_B1 + columns).clamp(max=columns + T - 1))
    return both[torch.arange(len(past_B), device=own.device)[:, None], source]
