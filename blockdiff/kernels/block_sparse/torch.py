"""Block selection and block-sparse attention in plain torch.

A query sees the keys [first, first + visible) of its row: those of its document. Blocks of keys are counted from
`first` on, so padding and other documents move none, and the last block may be part of one. Small calls attend under a
dense mask; large ones go from block to block with the queries that chose it, and keep nothing of size [T, S].

Tensors: B rows, T queries, S keys, h query heads, K key heads, H index heads, d head dimension, k blocks of a query.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import upcast
from blockdiff.kernels.span_attention.paged import PagedTensor

SCORE_BYTES = 64 << 20  # index scores that live at once
DENSE_NUMBERS = 1 << 24  # elements of [B, h, T, S] up to which a dense mask serves
CHUNK = 1024  # queries whose partial results live at once
UNUSED = -1


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
    """The blocks that every query and index head attends to, int64 [B, T, H, k], left-packed, -1 where there is none.

    visible_BT: how many keys a query sees, 0 for padding; first_BT: the first of them (None: key 0). A key's score is
    idx_q . idx_k / sqrt(d) in fp32 (in fp64 of fp64, then rounded to fp32: those that rounding tells apart are equal),
    a block's the maximum ("max") or log-sum-exp ("lse") of its visible keys'. Of at most `topk` blocks the first `init`
    ones come first, then the last `local` ones, then those of the highest scores; of equal ones the lower comes first.
    Keys may stand in pages, as those of one head. Source: transformers' MiniMaxM3VLIndexer, with vLLM's order of forced
    blocks.
    """
    B, T, H, _ = idx_q_BTHd.shape
    idx_k_BSd = as_heads(idx_k_BSd).squeeze(2)
    S = idx_k_BSd.shape[1]
    k = max(1, min(topk, -(-S // block)))
    ids = torch.full((B, T, H, k), UNUSED, dtype=torch.int64, device=idx_q_BTHd.device)
    for rows, queries, first in _documents(first_BT, visible_BT):
        visible = visible_BT[rows, queries]
        q, keys = idx_q_BTHd[rows, queries], idx_k_BSd[rows, first:]
        found = _select(q, keys, visible, block, topk, init, local, score)
        ids[rows, queries, :, : found.shape[-1]] = found
    return ids


def as_heads(keys: Tensor | PagedTensor) -> Tensor:
    """Keys or values [B, S, K, d], whatever they stand in; keys without heads have one."""
    dense = keys.dense() if isinstance(keys, PagedTensor) else keys
    return dense if dense.dim() == 4 else dense.unsqueeze(2)


def _documents(first_BT: Tensor | None, visible_BT: Tensor) -> Iterator[tuple[slice, slice, int]]:
    """Rows and queries that share their first key, as slices: all at once where every row begins with it."""
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
    """The blocks by claim: each claim is one integer, made of its kind or score and, for equal ones, of its place."""
    N = score_BTHN.shape[-1]
    place = torch.arange(N, device=score_BTHN.device)
    last = torch.div(visible_BT - 1, block, rounding_mode="floor")[..., None, None]
    bits = score_BTHN.contiguous().view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits + (1 << 31)), bits)  # rises with the score; +0 and -0 are equal
    ordered = torch.where(place > last - local, (1 << 31) + 1, ordered)
    ordered = torch.where(place < init, (1 << 31) + 2, ordered)
    claim = torch.where(place <= last, ordered * N + (N - 1 - place), torch.iinfo(torch.int64).min)
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
    """Attend to the chosen blocks of the visible keys, and to a run of own keys that stands outside them: [B, T, h, d].

    ids_BTHk, visible_BT, first_BT: as `select_blocks` has them; each index head chooses for h / H query heads. own_k,
    own_v: [B, O, K, d], of which a query sees [own_lo, own_hi) (all three or none). A query that sees nothing gets 0.
    Gradients flow to queries, keys and values, except to those that stand in pages.
    """
    B, T, h, _ = q_BThd.shape
    k_BSKd, v_BSKd = as_heads(k_BSKd), as_heads(v_BSKd)
    is_small = B * h * T * k_BSKd.shape[1] <= DENSE_NUMBERS
    if is_small or own_k is not None:
        return _masked(q_BThd, k_BSKd, v_BSKd, ids_BTHk, visible_BT, first_BT, block, scale, own_k, own_v, own_BT2)
    arguments = ids_BTHk, visible_BT, first_BT, block, scale
    return _ByBlocks.apply(q_BThd, k_BSKd, v_BSKd, *arguments)


def seen_keys(ids_BTHk: Tensor, visible_BT: Tensor, first_BT: Tensor | None, block: int, keys: int) -> Tensor:
    """The keys that every query and index head attends to, bool [B, T, H, keys]."""
    blocks = -(-keys // block)
    kept = torch.zeros(*ids_BTHk.shape[:3], blocks + 1, dtype=torch.bool, device=ids_BTHk.device)
    kept.scatter_(-1, torch.where(ids_BTHk < 0, blocks, ids_BTHk), True)
    kept[..., blocks] = False
    place_BTS = torch.arange(keys, device=ids_BTHk.device).expand(*visible_BT.shape, keys)
    if first_BT is not None:
        place_BTS = place_BTS - first_BT[..., None]
    is_there = (place_BTS >= 0) & (place_BTS < visible_BT[..., None])
    of_key = torch.where(is_there, torch.div(place_BTS, block, rounding_mode="floor"), blocks)
    return kept.gather(-1, of_key[:, :, None].expand(-1, -1, ids_BTHk.shape[2], -1))


def _masked(
    q_BThd: Tensor,
    k_BSKd: Tensor,
    v_BSKd: Tensor,
    ids_BTHk: Tensor,
    visible_BT: Tensor,
    first_BT: Tensor | None,
    block: int,
    scale: float,
    own_k: Tensor | None,
    own_v: Tensor | None,
    own_BT2: Tensor | None,
) -> Tensor:
    h, H = q_BThd.shape[2], ids_BTHk.shape[2]
    is_seen = seen_keys(ids_BTHk, visible_BT, first_BT, block, k_BSKd.shape[1])
    k, v = k_BSKd, v_BSKd
    if own_k is not None and own_v is not None and own_BT2 is not None:
        k, v = torch.cat([k, own_k], 1), torch.cat([v, own_v], 1)
        column = torch.arange(own_k.shape[1], device=k.device)
        is_own = (column >= own_BT2[..., :1]) & (column < own_BT2[..., 1:])
        is_seen = torch.cat([is_seen, is_own[:, :, None].expand(-1, -1, H, -1)], -1)
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


class _ByBlocks(torch.autograd.Function):
    """Block after block, with the queries that chose it; a query's partial results are merged by log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BThd: Tensor,
        k_BSKd: Tensor,
        v_BSKd: Tensor,
        ids_BTHk: Tensor,
        visible_BT: Tensor,
        first_BT: Tensor | None,
        block: int,
        scale: float,
    ) -> Tensor:
        B, T, h, d = q_BThd.shape
        dtype = torch.promote_types(q_BThd.dtype, torch.float32)
        out = torch.zeros(B, T, h, d, dtype=dtype, device=q_BThd.device)
        lse = torch.full((B, T, h), -torch.inf, dtype=dtype, device=q_BThd.device)
        for at, heads, K, pieces in _pieces(q_BThd, k_BSKd, ids_BTHk, visible_BT, first_BT, block):
            q = upcast(q_BThd[at][:, heads]) * scale
            acc, total, peak = out[at][:, heads].clone(), q.new_zeros(q.shape[:2]), lse[at][:, heads].clone()
            for rows, keys, hidden in pieces:
                k, v = (upcast(x[at[0], keys, K]) for x in (k_BSKd, v_BSKd))
                scores = (q[rows].flatten(0, 1) @ k.t()).view(-1, q.shape[1], k.shape[0])
                if hidden is not None:
                    scores.masked_fill_(hidden[:, None], -torch.inf)
                old = peak[rows]
                new = torch.maximum(old, scores.amax(-1))
                p, kept = scores.sub_(new[..., None]).exp_(), (old - new).exp_()
                peak[rows], total[rows] = new, total[rows] * kept + p.sum(-1)
                gained = (p.flatten(0, 1) @ v).view(-1, *acc.shape[1:])
                acc[rows] = acc[rows].mul_(kept[..., None]).add_(gained)
            is_seen = total > 0
            out[at[0], at[1], heads] = acc / total.where(is_seen, 1.0)[..., None]
            lse[at[0], at[1], heads] = peak + total.log()
        ctx.save_for_backward(q_BThd, k_BSKd, v_BSKd, ids_BTHk, visible_BT, first_BT, out, lse)
        ctx.block, ctx.scale = block, scale
        return out.to(q_BThd.dtype)

    @staticmethod
    def backward(ctx: Any, grad_BThd: Tensor) -> tuple[Tensor | None, ...]:
        q_BThd, k_BSKd, v_BSKd, ids_BTHk, visible_BT, first_BT, out, lse = ctx.saved_tensors
        grad = grad_BThd.to(out.dtype)
        dot = (grad * out).sum(-1)
        grad_q = torch.zeros_like(out)
        grad_k, grad_v = (torch.zeros_like(x, dtype=out.dtype) for x in (k_BSKd, v_BSKd))
        for at, heads, K, pieces in _pieces(q_BThd, k_BSKd, ids_BTHk, visible_BT, first_BT, ctx.block):
            q, of_out = q_BThd[at][:, heads].to(out.dtype) * ctx.scale, grad[at][:, heads]
            norm, shift, into = lse[at][:, heads], dot[at][:, heads], torch.zeros_like(q)
            for rows, keys, hidden in pieces:
                k, v = (x[at[0], keys, K].to(out.dtype) for x in (k_BSKd, v_BSKd))
                q_rows, g_rows = q[rows].flatten(0, 1), of_out[rows].flatten(0, 1)
                scores = (q_rows @ k.t()).view(-1, q.shape[1], k.shape[0])
                if hidden is not None:
                    scores.masked_fill_(hidden[:, None], -torch.inf)
                p = scores.sub_(norm[rows][..., None]).exp_().flatten(0, 1)
                grad_v[at[0], keys, K] += p.t() @ g_rows
                of_scores = (g_rows @ v.t()).sub_(shift[rows].flatten()[:, None]).mul_(p)
                grad_k[at[0], keys, K] += of_scores.t() @ q_rows
                into[rows] += (of_scores @ k).view(-1, *into.shape[1:])
            grad_q[at[0], at[1], heads] = into * ctx.scale
        return *(x.to(q_BThd.dtype) for x in (grad_q, grad_k, grad_v)), None, None, None, None, None


Piece = tuple[Tensor, slice, Tensor | None]  # queries of a chunk, the keys of their block, and which they do not see


def _pieces(
    q_BThd: Tensor, k_BSKd: Tensor, ids_BTHk: Tensor, visible_BT: Tensor, first_BT: Tensor | None, block: int
) -> Iterator[tuple[tuple[int, slice], slice, int, Iterator[Piece]]]:
    """Chunks of queries of a row under each index head and key head: where they are, their heads, and their blocks."""
    h = q_BThd.shape[2]
    H, K = ids_BTHk.shape[2], k_BSKd.shape[2]
    share, parts = h // max(H, K), max(H, K)  # query heads that have both in common
    for rows, queries, first in _documents(first_BT, visible_BT):
        for row in range(rows.start, rows.stop):
            for lo in range(queries.start, queries.stop, CHUNK):
                at = row, slice(lo, min(lo + CHUNK, queries.stop))
                for part in range(parts):
                    heads = slice(part * share, (part + 1) * share)
                    ids = ids_BTHk[row, at[1], part * H // parts]
                    yield at, heads, part * K // parts, _by_block(ids, visible_BT[at], first, block)


def _by_block(ids_Tk: Tensor, visible_T: Tensor, first: int, block: int) -> Iterator[Piece]:
    """Every block that any of the queries chose, with these queries."""
    order = ids_Tk.flatten().argsort(stable=True)
    row_N = torch.div(order, ids_Tk.shape[1], rounding_mode="floor")
    chosen, counts = ids_Tk.flatten()[order].unique_consecutive(return_counts=True)
    start = 0
    for b, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        rows = row_N[start : start + count]
        start += count
        if b < 0:
            continue
        visible = visible_T[rows] - b * block
        size = min(block, int(visible.max()))
        hidden = None
        if int(visible.min()) < size:
            hidden = torch.arange(size, device=rows.device) >= visible[:, None]
        yield rows, slice(first + b * block, first + b * block + size), hidden
