"""Block selection in Triton: launchers as registered ops, and the public function.

It stores one score per query, index head and block, never one per key.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.block_sparse import kernels_selection as kernels
from blockdiff.kernels.block_sparse.torch import as_heads
from blockdiff.kernels.launch import Unserved, check_dtypes, empty, launch, registered
from blockdiff.kernels.span_attention.paged import PagedTensor
from blockdiff.kernels.span_attention.triton import _dense_heads, _multiprocessors, is_read_as_it_is, splits_of
from blockdiff.kernels.tiles import LEAST, Tile, elementwise, power_of_2, precision_of, tile_of

LARGEST_HEAD = 256
MOST_CHOSEN_FROM = 1024  # blocks that are ranked at a time

# -- launchers -------------------------------------------------------------------------------------------------


def _int32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.int32).contiguous()


def _tile(kernel: str, x: Tensor, block: int, rows: int) -> Tile:
    """Return the table's tile for heads of x's size, shrunk to a block."""
    return tile_of(f"block_sparse_{kernel}", x, x.shape[-1]).fitted(rows=rows, columns=block)


@registered("block_sparse_scores")
def _scores(
    q: Tensor, k: Tensor, visible: Tensor, first: Tensor | None, table: Tensor | None, columns: int, block: int,
    scale: float, uses_sum: bool, splits: int,
) -> Iterator[Tensor]:  # fmt: skip
    """Return the scores of blocks, fp32 [B, T, H, N]; undefined if a query sees no key of a block.

    k: [B, S, 1, d], or with a table int32 [B, pages] the pool [pages, P, 1, d]. columns: number of keys of a row.
    """
    (B, T, H, d), N = q.shape, -(-columns // block)
    out = empty(q, B, T, H, N, dtype=torch.float32)
    yield out
    tile = tile_of("block_sparse_scores", q, d).fitted(columns=block)
    row_tiles, _ = tile.grid(T * H)
    if not splits:
        splits = splits_of(row_tiles * B, N * -(-block // tile.columns), _multiprocessors(q.device))
    q, (k,), page = _dense_heads(q), *_sources(B, table, k)
    tensors = q, q.stride()[:3], k, k.stride()[:3], visible, first, table, out
    arguments = *tensors, T, columns, N, 0 if table is None else table.shape[1], scale
    constants = dict(H=H, D=d, BLOCK=block, PAGE=page, USES_SUM=uses_sum, PRECISION=precision_of(q.dtype, d))
    launch(kernels.block_sparse_scores, (row_tiles, B, splits), *arguments, **constants, **tile.options)


def _sources(B: int, table: Tensor | None, *tensors: Tensor) -> tuple[list[Tensor], int]:
    """Return keys or values as [B, keys, K, d], with a table the whole pool for every row, and the tokens of a page."""
    if table is None:
        return [_dense_heads(x) for x in tensors], 0
    return [_dense_heads(x).flatten(0, 1).expand(B, -1, -1, -1) for x in tensors], tensors[0].shape[1]


@registered("block_sparse_choose")
def _choose(scores: Tensor, visible: Tensor, block: int, topk: int, init: int, local: int) -> Iterator[Tensor]:
    """Return the blocks of highest rank, int64 [B, T, H, k]."""
    B, T, H, N = scores.shape
    ids = empty(scores, B, T, H, topk, dtype=torch.int64)
    yield ids
    tile = elementwise(min(N, MOST_CHOSEN_FROM))
    arguments = scores, visible, ids, B * T * H, N, local, init
    constants = dict(BLOCK=block, H=H, TOPK=topk, CHOICES=power_of_2(topk), **tile.options)
    launch(kernels.block_sparse_choose, tile.grid(B * T * H)[:1], *arguments, **constants)


# -- the public function: signature and meaning as in torch.py ------------------------------------------------


def _padded(x: Tensor) -> Tensor:
    """Pad heads to a power of two that tensor cores multiply."""
    d = x.shape[-1]
    if d > LARGEST_HEAD:
        raise Unserved(f"block-sparse attention in Triton takes heads of up to {LARGEST_HEAD}, not {d}")
    padding = max(LEAST, power_of_2(d)) - d
    return F.pad(x, (0, padding)) if padding else x


def _reads_pages(q: Tensor, *sources: Tensor | PagedTensor) -> bool:
    """Whether all sources are pages that can be read in place: neither padded nor cast, which would copy them."""
    if q.shape[-1] > LARGEST_HEAD:
        return False
    return all(isinstance(x, PagedTensor) and is_read_as_it_is(q, x.pool_NPKd) for x in sources)


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

    Arguments: as in `select_blocks` of torch.py. Raises Unserved unless all tensors are fp32, bf16 or fp16 and heads
    have at most 256 numbers.
    """
    d, table = idx_q_BTHd.shape[-1], None
    if isinstance(idx_k_BSd, PagedTensor) and _reads_pages(idx_q_BTHd, idx_k_BSd):
        keys, table, columns = idx_k_BSd.pool_NPKd, idx_k_BSd.pages.table_BM.contiguous(), idx_k_BSd.pages.columns
    else:
        keys = as_heads(idx_k_BSd)
        columns = keys.shape[1]
    q, keys = in_autocast(idx_q_BTHd, keys)
    check_dtypes("select_blocks", q, keys)
    q, keys = _padded(q), _padded(keys)
    k = max(1, min(topk, -(-columns // block)))
    visible, first = _int32(visible_BT), _int32(first_BT)
    assert visible is not None
    if not columns:
        return torch.full((*q.shape[:3], k), -1, dtype=torch.int64, device=q.device)
    scores = _scores(q, keys, visible, first, table, columns, block, d**-0.5, score == "lse", 0)
    return _choose(scores, visible, block, k, init, local)
