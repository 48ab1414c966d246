"""Block selection and block-sparse attention with the C functions of block_sparse.c for fp32 on a CPU.

Products are torch's, of pieces that stay in the cache; what stands between them is one walk in C.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.block_sparse import torch as in_torch
from blockdiff.kernels.block_sparse.torch import UNUSED, _documents, as_heads
from blockdiff.kernels.c_library import call, serves_products
from blockdiff.kernels.launch import Unserved
from blockdiff.kernels.span_attention.paged import PagedTensor

SCORED_ROWS, SCORED_KEYS = 512, 1024  # of a product of index queries and keys
CHUNK = 1024  # queries whose partial results live at once
PIECE_ROWS = 1024  # of the products of a block: queries times heads, so that what is made of them stays in the cache


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
    """As in torch.py."""
    keys = as_heads(idx_k_BSd).squeeze(2)
    if not serves_products(idx_q_BTHd, keys):
        raise Unserved("select_blocks in C takes fp32 tensors of a CPU")
    (B, T, H, d), S = idx_q_BTHd.shape, keys.shape[1]
    k, queries_each = max(1, min(topk, -(-S // block))), max(1, SCORED_ROWS // H)
    keys_each = max(block, SCORED_KEYS // block * block)
    ids = torch.full((B, T, H, k), UNUSED, dtype=torch.int64)
    for rows, queries, first in _documents(first_BT, visible_BT):
        for b in range(rows.start, rows.stop):
            for lo in range(queries.start, queries.stop, queries_each):
                here = slice(lo, min(lo + queries_each, queries.stop))
                visible = visible_BT[b, here].contiguous().long()
                seen = int(visible.max())
                q, blocks = idx_q_BTHd[b, here].flatten(0, 1).contiguous(), -(-seen // block)
                scores = q.new_empty(len(q), max(1, blocks))
                for begin in range(0, seen, keys_each):
                    part = keys[b, first + begin : first + min(begin + keys_each, seen)]
                    products = q @ part.t()
                    sizes = len(q), H, len(part), begin, block, int(score == "lse"), d**-0.5
                    call("sparse_block_scores", products, visible, *sizes, scores, scores.shape[1])
                found = torch.empty(len(q), k, dtype=torch.int64)
                call("sparse_choose", scores, visible, len(q), H, scores.shape[1], block, k, init, local, found)
                ids[b, here] = found.view(-1, H, k)
    return ids


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
    """As in torch.py."""
    k, v, (B, T, h, _) = as_heads(k_BSKd), as_heads(v_BSKd), q_BThd.shape
    sees = ids_BTHk, visible_BT, first_BT, block, scale
    if B * h * T * k.shape[1] <= in_torch.DENSE_NUMBERS or own_k is not None or not serves_products(q_BThd, k, v):
        raise Unserved("block_sparse_attention in C takes large fp32 tensors of a CPU, without keys of its own")
    out: Tensor = _ByBlocks.apply(q_BThd, k, v, *sees)
    return out


class _ByBlocks(torch.autograd.Function):
    """As in torch.py: block after block, with the queries that chose it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ids: Tensor, visible: Tensor, first: Tensor | None, block: int,
        scale: float,
    ) -> Tensor:  # fmt: skip
        B, T, h, d = q.shape
        out, lse, scratch = torch.zeros(B, T, h, d), torch.full((B, T, h), -torch.inf), _Scratch(q, ids, k, block)
        for chunk in _chunks(q, k, ids, visible, first, block):
            at, heads, (count, group) = chunk.at, chunk.heads, chunk.sizes
            queries = (q[at][:, heads] * scale).contiguous()
            acc, total = torch.zeros(count, group, d), torch.zeros(count, group)
            peak = torch.full((count, group), -torch.inf)
            for rows, keys, begin in chunk.pieces():
                n, (of_k, of_v) = len(rows), (x[at[0], keys, chunk.key_head] for x in (k, v))
                taken, scores = scratch.gathered(0, queries, rows), scratch.of(1, n * group, len(of_k))
                kept, numbers = scratch.of(2, n, group), (n, group, len(of_k), peak, total)
                torch.mm(taken, of_k.t(), out=scores)
                call("sparse_softmax", scores, rows, chunk.visible, begin, *numbers, kept)
                torch.mm(scores, of_v, out=taken)
                call("sparse_merge", acc, taken, kept, rows, n, group, d)
            out[at[0], at[1], heads] = acc / total.where(total > 0, 1.0)[..., None]
            lse[at[0], at[1], heads] = peak + total.log()
        ctx.save_for_backward(q, k, v, ids, visible, first, out, lse)
        ctx.block, ctx.scale = block, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, ids, visible, first, out, lse = ctx.saved_tensors
        dot, d, scratch = (grad * out).sum(-1), q.shape[-1], _Scratch(q, ids, k, ctx.block)
        grad_q, grad_k, grad_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for chunk in _chunks(q, k, ids, visible, first, ctx.block):
            at, heads, (count, group) = chunk.at, chunk.heads, chunk.sizes
            queries, of_out = (q[at][:, heads] * ctx.scale).contiguous(), grad[at][:, heads].contiguous()
            shift, norm = dot[at][:, heads].contiguous(), lse[at][:, heads].contiguous()
            into = torch.zeros(count, group, d)
            for rows, keys, begin in chunk.pieces():
                n, (of_k, of_v) = len(rows), (x[at[0], keys, chunk.key_head] for x in (k, v))
                taken, of_taken = scratch.gathered(0, queries, rows), scratch.gathered(1, of_out, rows)
                weights, of_scores = (scratch.of(place, n * group, len(of_k)) for place in (2, 3))
                torch.mm(taken, of_k.t(), out=weights)
                call("sparse_weights", weights, rows, chunk.visible, begin, n, group, len(of_k), norm)
                grad_v[at[0], keys, chunk.key_head].addmm_(weights.t(), of_taken)
                torch.mm(of_taken, of_v.t(), out=of_scores)
                call("sparse_score_gradients", of_scores, weights, rows, shift, n, group, len(of_k))
                grad_k[at[0], keys, chunk.key_head].addmm_(of_scores.t(), taken)
                torch.mm(of_scores, of_k, out=taken)
                call("sparse_scatter", taken, rows, n, group * d, into)
            grad_q[at[0], at[1], heads] = into * ctx.scale
        return grad_q, grad_k, grad_v, None, None, None, None, None


class _Scratch:
    """Memory for what is made of a piece, the same for every piece."""

    def __init__(self, q: Tensor, ids: Tensor, k: Tensor, block: int):
        rows = max(PIECE_ROWS, q.shape[2] // max(ids.shape[2], k.shape[2]))
        self.memory = torch.empty(4, rows * max(block, q.shape[3]))

    def of(self, place: int, rows: int, columns: int) -> Tensor:
        """A tensor of that shape at one of four places, not filled."""
        return self.memory[place, : rows * columns].view(rows, columns)

    def gathered(self, place: int, x_Ngd: Tensor, rows: Tensor) -> Tensor:
        """The heads of some queries, one after the other [rows * g, d]."""
        _, group, d = x_Ngd.shape
        taken = self.of(place, len(rows) * group, d)
        call("sparse_gather", x_Ngd, rows, len(rows), group * d, taken)
        return taken


class _Chunk:
    """Neighbouring queries of a document under one index head and key head.

    at: their row and place; heads: their query heads; visible: how many keys each sees; keys: how many a row has.
    """

    def __init__(
        self, at: tuple[int, slice], heads: slice, key_head: int, ids: Tensor, visible: Tensor, first: int, block: int,
        keys: int,
    ):  # fmt: skip
        self.at, self.heads, self.key_head = at, heads, key_head
        self.ids, self.visible, self.first, self.block, self.keys = ids, visible, first, block, keys
        self.sizes = at[1].stop - at[1].start, heads.stop - heads.start

    def pieces(self) -> Iterator[tuple[Tensor, slice, int]]:
        """Every block that any of the queries chose, some of these at a time: the queries, the block's keys in the row,
        and its first key in the document."""
        chosen, order = self.ids.flatten().sort(stable=True)
        queries = torch.div(order, self.ids.shape[1], rounding_mode="floor")
        found, counts = chosen.unique_consecutive(return_counts=True)
        start, size = 0, max(1, PIECE_ROWS // self.sizes[1])
        for b, count in zip(found.tolist(), counts.tolist(), strict=True):
            begin = b * self.block
            for lo in range(start, start + count if b >= 0 else start, size):
                rows = queries[lo : min(lo + size, start + count)]
                yield rows, slice(self.first + begin, min(self.first + begin + self.block, self.keys)), begin
            start += count


def _chunks(q: Tensor, k: Tensor, ids: Tensor, visible: Tensor, first: Tensor | None, block: int) -> Iterator[_Chunk]:
    H, (S, K), h = ids.shape[2], k.shape[1:3], q.shape[2]
    parts = max(H, K)
    share = h // parts
    for rows, queries, start in _documents(first, visible):
        for row in range(rows.start, rows.stop):
            for lo in range(queries.start, queries.stop, CHUNK):
                at = row, slice(lo, min(lo + CHUNK, queries.stop))
                seen = visible[at].long().contiguous()
                for part in range(parts):
                    heads, of_part = slice(part * share, (part + 1) * share), ids[row, at[1], part * H // parts]
                    yield _Chunk(at, heads, part * K // parts, of_part, seen, start, block, S)
