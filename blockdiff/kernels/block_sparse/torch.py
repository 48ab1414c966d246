"""Block selection, block-sparse attention, and the attention of a layer that does both, in plain torch.

A query sees the keys [first, first + visible) of its row, those of its document. Blocks of keys are counted from
`first`, so padding and other documents do not shift them; the last block may be incomplete. Attention is torch's with a
dense mask. Large calls compute some queries at a time and recompute them in the backward, so that nothing of size
[T, S] is stored.

Tensors: B rows, T queries, S keys, h query heads, K key heads, H index heads, d head dimension, k blocks of a query.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blockdiff.kernels.autocast import upcast
from blockdiff.kernels.op import Ops
from blockdiff.kernels.span_attention.paged import PagedTensor, PrefixTensor, written
from blockdiff.spans import Spans, Sweep

SCORE_BYTES = 64 << 20  # most bytes of index scores in memory at a time
MASK = 1 << 24  # most elements of the mask [B, h, T, S] in memory at a time
UNUSED = -1

KV = tuple[Tensor, Tensor, Tensor]  # keys, values, index keys


@torch.no_grad()
def select_blocks(
    idx_q_BTHd: Tensor,
    idx_k_BSd: Tensor | PagedTensor,
    visible_BT: Tensor,
    first_BT: Tensor | None = None,
    *,
    block: int = 128,
    topk: int = 16,
    init: int = 0,
    local: int = 1,
    score: str = "max",
) -> Tensor:
    """Select the blocks that every query and index head attends to, int64 [B, T, H, k], unused entries -1 at the end.

    visible_BT: number of keys that a query sees, 0 for padding. first_BT: the first of them (None: key 0), from which
    blocks, and the indices returned, are counted. idx_k_BSd: may be a PagedTensor with one head. A key's score is
    idx_q . idx_k / sqrt(d) in fp32 (fp64 scores are rounded to fp32, so that rounding errors do not decide). A block's
    score is the maximum ("max") or log-sum-exp ("lse") of its visible keys' scores. At most `topk` blocks are chosen:
    the first `init` blocks, then the last `local` ones, then those of the highest scores, ties to the lower index.
    Source: transformers' MiniMaxM3VLIndexer, with vLLM's order of forced blocks.
    """
    B, T, H, _ = idx_q_BTHd.shape
    idx_k_BSd = as_heads(idx_k_BSd).squeeze(2)
    S = idx_k_BSd.shape[1]
    k = max(1, min(topk, -(-S // block)))
    ids = torch.full((B, T, H, k), UNUSED, dtype=torch.int64, device=idx_q_BTHd.device)
    for rows, queries, first in _documents(first_BT, visible_BT):
        visible = visible_BT[rows, queries]
        q, keys = idx_q_BTHd[rows, queries], idx_k_BSd[rows, first:]
        chosen = _select(q, keys, visible, block, topk, init, local, score)
        ids[rows, queries, :, : chosen.shape[-1]] = chosen
    return ids


def as_heads(keys: Tensor | PagedTensor) -> Tensor:
    """Return keys or values, dense or in pages, as a tensor [B, S, K, d]; without an axis of heads K is 1."""
    dense = keys.dense() if isinstance(keys, PagedTensor) else keys
    return dense if dense.dim() == 4 else dense.unsqueeze(2)


def _documents(first_BT: Tensor | None, visible_BT: Tensor) -> Iterator[tuple[slice, slice, int]]:
    """Yield slices of rows and queries with the same first key, and that key; one slice of all if it is always 0."""
    B, T = visible_BT.shape
    if first_BT is None or not bool(((first_BT != 0) & (visible_BT > 0)).any()):
        yield slice(0, B), slice(0, T), 0
        return
    for row, (firsts, visible) in enumerate(zip(first_BT.tolist(), visible_BT.tolist(), strict=True)):
        start = 0
        for end in range(1, T + 1):
            if end == T or firsts[end] != firsts[start] or (visible[end] > 0) != (visible[start] > 0):
                if visible[start] > 0:
                    yield slice(row, row + 1), slice(start, end), firsts[start]
                start = end


def _select(
    q_BTHd: Tensor, k_BSd: Tensor, visible_BT: Tensor, block: int, topk: int, init: int, local: int, score: str
) -> Tensor:
    B, T, H, d = q_BTHd.shape
    size = max(1, SCORE_BYTES // max(1, 4 * B * H * k_BSd.shape[1]))
    parts = []
    for lo in range(0, T, size):
        visible = visible_BT[:, lo : lo + size]
        seen = max(1, int(visible.max()))
        blocks = -(-seen // block)
        q = upcast(q_BTHd[:, lo : lo + size]).transpose(1, 2).flatten(1, 2)  # [B, H * t, d]
        keys = upcast(k_BSd[:, :seen])
        keys = F.pad(keys, (0, 0, 0, blocks * block - keys.shape[1]))
        scores = (q @ keys.transpose(1, 2) * d**-0.5).float().view(B, H, visible.shape[1], blocks, block)
        column = torch.arange(blocks * block, device=q.device).view(blocks, block)
        scores.masked_fill_((column >= visible[..., None, None])[:, None], -torch.inf)
        of_block = scores.amax(-1) if score == "max" else scores.logsumexp(-1)  # [B, H, t, blocks]
        parts.append(_highest(of_block.transpose(1, 2), visible, block, topk, init, local))
    width = max(part.shape[-1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[-1]), value=UNUSED) for part in parts], 1)


def _highest(score_BTHN: Tensor, visible_BT: Tensor, block: int, topk: int, init: int, local: int) -> Tensor:
    """Return the `topk` best blocks of every query and index head: first forced ones, then by score, then by index.

    Each block gets one integer that orders it so, because ties must be resolved as in the kernel.
    """
    N = score_BTHN.shape[-1]
    index = torch.arange(N, device=score_BTHN.device)
    last = torch.div(visible_BT - 1, block, rounding_mode="floor")[..., None, None]
    bits = score_BTHN.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits + (1 << 31)), bits)  # ordered like the scores; +0 and -0 are equal
    ordered = torch.where(index > last - local, (1 << 31) + 1, ordered)
    ordered = torch.where(index < init, (1 << 31) + 2, ordered)
    claim = torch.where(index <= last, ordered * N + (N - 1 - index), torch.iinfo(torch.int64).min)
    top = claim.topk(min(topk, N), dim=-1)
    return top.indices.masked_fill(top.values == torch.iinfo(torch.int64).min, UNUSED)


def block_sparse_attention(
    q_BThd: Tensor,
    k_BSKd: Tensor | PagedTensor,
    v_BSKd: Tensor | PagedTensor,
    ids_BTHk: Tensor,
    visible_BT: Tensor,
    first_BT: Tensor | None,
    block: int,
    scale: float,
    own_k: Tensor | None = None,
    own_v: Tensor | None = None,
    own_BT2: Tensor | None = None,
) -> Tensor:
    """Attend to the chosen blocks of the visible keys and to a range of the call's own keys; return [B, T, h, d].

    ids_BTHk, visible_BT, first_BT: as in `select_blocks`; each index head chooses for h / H query heads. own_k, own_v:
    [B, O, K, d], of which a query sees the range own_BT2 = [lo, hi) (all three or none). A query that sees no key gets
    0. Gradients flow to queries, keys and values, but not to keys and values in pages.
    """
    B, T, h, _ = q_BThd.shape
    k, v, is_own = as_heads(k_BSKd), as_heads(v_BSKd), None
    if own_k is not None and own_v is not None and own_BT2 is not None:
        column = torch.arange(own_k.shape[1], device=k.device)
        is_own = (column >= own_BT2[..., :1]) & (column < own_BT2[..., 1:])
        k, v = torch.cat([k, own_k], 1), torch.cat([v, own_v], 1)
    seen = ids_BTHk, visible_BT, first_BT, is_own
    size = max(1, MASK // max(1, B * h * k.shape[1]))
    if size >= T:
        return _masked(q_BThd, k, v, seen, block, scale)
    outs = []
    for lo in range(0, T, size):
        part = tuple(None if x is None else x[:, lo : lo + size] for x in seen)
        arguments = q_BThd[:, lo : lo + size], k, v, part, block, scale
        outs.append(checkpoint(_masked, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outs, 1)


def seen_keys(ids_BTHk: Tensor, visible_BT: Tensor, first_BT: Tensor | None, block: int, keys: int) -> Tensor:
    """Return which keys every query and index head attends to, bool [B, T, H, keys]."""
    blocks = -(-keys // block)
    is_chosen = torch.zeros(*ids_BTHk.shape[:3], blocks + 1, dtype=torch.bool, device=ids_BTHk.device)
    is_chosen.scatter_(-1, torch.where(ids_BTHk < 0, blocks, ids_BTHk), True)
    is_chosen[..., blocks] = False
    place_BTS = torch.arange(keys, device=ids_BTHk.device).expand(*visible_BT.shape, keys)
    if first_BT is not None:
        place_BTS = place_BTS - first_BT[..., None]
    is_there = (place_BTS >= 0) & (place_BTS < visible_BT[..., None])
    of_key = torch.where(is_there, torch.div(place_BTS, block, rounding_mode="floor"), blocks)
    return is_chosen.gather(-1, of_key[:, :, None].expand(-1, -1, ids_BTHk.shape[2], -1))


def _masked(q_BThd: Tensor, k: Tensor, v: Tensor, seen: tuple[Tensor | None, ...], block: int, scale: float) -> Tensor:
    """Attend with a dense mask. seen: ids, visible and first as in `select_blocks`, and which own keys are visible.

    The own keys are the last ones of k and v.
    """
    ids_BTHk, visible_BT, first_BT, is_own_BTO = seen
    assert ids_BTHk is not None and visible_BT is not None
    h, H, own_keys = q_BThd.shape[2], ids_BTHk.shape[2], 0 if is_own_BTO is None else is_own_BTO.shape[-1]
    is_seen = seen_keys(ids_BTHk, visible_BT, first_BT, block, k.shape[1] - own_keys)
    if is_own_BTO is not None:
        is_seen = torch.cat([is_seen, is_own_BTO[:, :, None].expand(-1, -1, H, -1)], -1)
    is_seen = is_seen.transpose(1, 2).repeat_interleave(h // H, 1)  # [B, h, T, keys]
    out = F.scaled_dot_product_attention(
        q_BThd.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=is_seen,
        scale=scale,
        enable_gqa=h != k.shape[2],
    )
    return out.masked_fill(~is_seen.any(-1, keepdim=True), 0.0).transpose(1, 2)


@dataclass(frozen=True)
class Selection:
    """The settings by which a layer selects blocks.

    The fields from `block` to `score` are arguments of `select_blocks`. scale: factor of the attention's scores.
    canvas_length: length of canvases whose queries share one selection (None: each query has its own).
    """

    block: int
    topk: int
    init: int
    local: int
    score: str
    scale: float
    canvas_length: int | None = None

    def blocks(self, ops: Ops, idx_q: Tensor, idx_k: Any, visible_BT: Tensor, first_BT: Tensor | None) -> Tensor:
        """Call `select_blocks` with these settings."""
        return ops.select_blocks(
            idx_q, idx_k, visible_BT, first_BT,
            block=self.block, topk=self.topk, init=self.init, local=self.local, score=self.score,
        )  # fmt: skip


def sparse_attention(
    ops: Ops, q: Tensor, idx_q: Tensor, kv: KV, spans: Spans | Sweep, past: tuple[PrefixTensor, ...] | None,
    selection: Selection, layer: Hashable,
) -> Tensor:  # fmt: skip
    """Attend to the blocks that index queries [B, T, H, d] select; return [B, T, h, d].

    kv: keys and values [B, T, K, d] and index keys [B, T, 1, d] of the call's tokens, T = 0 if the pages of `past` have
    them already. past: the same three of the prefix (None: no prefix). layer: the key of this layer's selection in
    `spans.kept`, which several calls may share. Clean queries select among the blocks of all keys that they see. Noisy
    queries select among the prefix's blocks, and also see all own keys of their span.
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
    ops: Ops, q: Tensor, idx_q: Tensor, kv: tuple[Tensor, ...], spans: Spans, past: tuple[PrefixTensor, ...] | None,
    selection: Selection, layer: Hashable,
) -> Tensor:  # fmt: skip
    (k, v, idx_k), block, scale = kv, selection.block, selection.scale
    prefix_lo, prefix_hi, own_lo, own_hi = spans.bounds_BT4.long().unbind(-1)
    pages = written(past)
    if pages is not None:  # pages hold all keys, from a row's first token on
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
    # pages start with a row's first token
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
    """Return the mean index query of each canvas [B, T / canvas_length, H, d], without padding."""
    B, _, H, d = idx_q_BTHd.shape
    weight = is_there_BT.view(B, -1, canvas_length, 1, 1).to(idx_q_BTHd.dtype)
    return (idx_q_BTHd.view(B, -1, canvas_length, H, d) * weight).sum(2) / weight.sum(2).clamp(min=1)


def _dense(x: PrefixTensor) -> Tensor:
    """Return a tensor of a prefix, dense or in pages, as [B, columns, K, d]."""
    return x.dense() if isinstance(x, PagedTensor) else x


def _joined(before: Tensor | None, own_tokens: Tensor, past_B: Tensor) -> Tensor:
    """Concatenate each row's `past_B[b]` tokens before a call and the call's own tokens, [B, columns, ...]."""
    if before is None or not before.shape[1]:
        return own_tokens
    if bool((past_B == before.shape[1]).all()):
        return torch.cat([before, own_tokens], 1)
    both, columns, T = torch.cat([before, own_tokens], 1), before.shape[1], own_tokens.shape[1]
    column = torch.arange(columns + T, device=own_tokens.device).expand(len(past_B), -1)
    past_B1 = past_B[:, None]
    source = torch.where(column < past_B1, column, (column - past_B1 + columns).clamp(max=columns + T - 1))
    return both[torch.arange(len(past_B), device=own_tokens.device)[:, None], source]
