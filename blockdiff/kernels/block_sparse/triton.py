"""Block-sparse attention in Triton: launchers as registered ops, the gradient, and the public function.

`select_blocks`, which chooses the blocks, is in `triton_selection.py`. Memory is linear in tokens: the output, one
log-sum-exp per query and head, and in the backward one more number and the choices sorted by block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.block_sparse import kernels
from blockdiff.kernels.block_sparse import kernels_backward as backward
from blockdiff.kernels.block_sparse.torch import as_heads
from blockdiff.kernels.block_sparse.triton_selection import (
    _int32,
    _padded,
    _reads_pages,
    _sources,
    _tile,
    select_blocks,
)
from blockdiff.kernels.launch import Unserved, check_dtypes, empty, empty_gradients, launch, only_needed, registered
from blockdiff.kernels.span_attention.kernels import span_attention_combine
from blockdiff.kernels.span_attention.kernels_backward import span_attention_backward_delta
from blockdiff.kernels.span_attention.paged import PagedTensor
from blockdiff.kernels.span_attention.triton import (
    _backward_keys,
    _dense_heads,
    _multiprocessors,
    _strides,
    splits_of,
    tiles_for,
)
from blockdiff.kernels.tiles import LEAST, elementwise, power_of_2, precision_of, runs_products_aside, tile_of

__all__ = ["block_sparse_attention", "select_blocks"]

LARGEST_BLOCK = 128  # keys of a block that a program can hold
MOST_PARTS = 32  # partial results of a query that can be merged
LEAST_QUERIES = 2048  # least queries of a row for which the forward iterates over blocks rather than queries
SHARED_BY = 256  # least mean number of queries per block for which it iterates over blocks
PART_BYTES = 1 << 30  # most bytes of partial results in memory at a time
FAR = torch.iinfo(torch.int32).max  # the first key of an unused choice

# -- launchers -------------------------------------------------------------------------------------------------


@registered("block_sparse_attention")
def _attention(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, visible: Tensor, first: Tensor | None, own_k: Tensor, own_v: Tensor,
    own_range: Tensor | None, block: int, scale: float, splits: int,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Return output, and log-sum-exp in fp32; splits: of the keys that a query sees (0: choose)."""
    yield from _forward(q, (k, v, own_k, own_v), ids, (visible, first, own_range), block, scale, splits, k.shape[1])


@registered("block_sparse_attention_paged")
def _attention_paged(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, visible: Tensor, first: Tensor | None, own_k: Tensor, own_v: Tensor,
    own_range: Tensor | None, table: Tensor, columns: int, block: int, scale: float, splits: int,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Return output and log-sum-exp of attention to blocks in pages, without gradient.

    k, v: pools [N, P, K, d]. table: int32 [B, pages]. columns: upper bound of a row's columns.
    """
    yield from _forward(q, (k, v, own_k, own_v), ids, (visible, first, own_range), block, scale, splits, columns, table)


def _groups(q: Tensor, k: Tensor, ids: Tensor, block: int) -> dict[str, Any]:
    """Return the constants of the attention kernels. Query heads with one key head and one index head are a group."""
    (h, d), K, (H, topk) = q.shape[2:], k.shape[2], ids.shape[2:]
    parts = max(H, K)
    sizes = dict(K=K, H=H, PARTS=parts, GROUP=h // parts, D=d, BLOCK=block, TOPK=topk)
    return dict(PRECISION=precision_of(q.dtype, d), **sizes)


def _forward(
    q: Tensor, sources: tuple[Tensor, ...], ids: Tensor, sees: tuple[Tensor | None, ...], block: int, scale: float,
    splits: int, columns: int, table: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yield output and log-sum-exp unfilled, then fill them (see `launch.registered`).

    sources: block keys, block values, own keys, own values. sees: number of visible keys, first of them, own range.
    """
    (B, T, h, d), own_k = q.shape, sources[2]
    out, lse = empty(q), empty(q, B, T, h, dtype=torch.float32)
    yield out, lse
    constants = _groups(q, own_k, ids, block)
    if table is None and sees[2] is None and goes_by_block(q, columns, constants):
        _forward_by_block(q, sources[0], sources[1], ids, sees, constants, scale, (out, lse))
        return
    tile = _tile("forward", q, block, constants["GROUP"])
    programs = constants["PARTS"] * tile.grid(constants["GROUP"])[0]
    if not splits:
        tiles = constants["TOPK"] * -(-block // tile.columns) + -(-own_k.shape[1] // tile.columns)
        splits = splits_of(programs * B * T, tiles, _multiprocessors(q.device))
    parts, part_lse = out, lse
    if splits > 1:
        parts, part_lse = (empty(x, splits, *x.shape, dtype=torch.float32) for x in (out, lse))
    q, (k, v), page = _dense_heads(q), *_sources(B, table, *sources[:2])
    own_k, own_v = (_dense_heads(x) for x in sources[2:])
    of_keys = (k, own_k), _strides(k, own_k), (v, own_v), _strides(v, own_v)
    tensors = q, q.stride()[:3], *of_keys, ids.contiguous(), *sees, table, parts, part_lse
    arguments = *tensors, B, T, columns, own_k.shape[1], 0 if table is None else table.shape[1], scale
    constants |= dict(CHOICES=power_of_2(constants["TOPK"]), PAGE=page, **tile.options)
    launch(kernels.block_sparse_forward, (T, B * programs, splits), *arguments, **constants)
    if splits > 1:
        tensors, tile = (parts, part_lse, out, lse), elementwise(d)
        launch(span_attention_combine, tile.grid(B * T * h), *tensors, B * T * h, splits, **tile.options)


def goes_by_block(q: Tensor, S: int, constants: dict[str, Any]) -> bool:
    """Return True if iterating over blocks is possible, and likely faster than iterating over queries.

    It loads each block once and merges partial results.
    """
    T, block, topk = q.shape[1], constants["BLOCK"], constants["TOPK"]
    if T < LEAST_QUERIES or T * topk < SHARED_BY * -(-S // block):
        return False
    try:
        tile_of("block_sparse_forward_keys", q, q.shape[-1])
    except Unserved:
        return False  # a block of such heads is too large for a program
    return topk <= MOST_PARTS and LEAST <= block <= LARGEST_BLOCK and block == power_of_2(block)


def _forward_by_block(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, sees: tuple[Tensor | None, ...], constants: dict[str, Any],
    scale: float, outputs: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """Fill output and log-sum-exp block by block: for some queries at a time, every choice, then their sum."""
    (B, T, h, d), S, block, topk = q.shape, k.shape[1], constants["BLOCK"], constants["TOPK"]
    tile, merging, blocks = tile_of("block_sparse_forward_keys", q, d), elementwise(d), -(-S // block)
    size = max(1, min(T, PART_BYTES // (4 * topk * h * d)))
    parts, part_lse = empty(q, topk, size, h, d, dtype=torch.float32), empty(q, topk, size, h, dtype=torch.float32)
    grid = blocks, constants["PARTS"], splits_of(blocks * constants["PARTS"], topk * size, _multiprocessors(q.device))
    constants = constants | replace(tile, columns=block).options
    for b in range(B):
        (visible, first), (out, lse) = (None if x is None else x[b] for x in sees[:2]), (x[b] for x in outputs)
        of_row = [y for x in (q, k, v) for y in (_dense_heads(x)[b], _dense_heads(x).stride()[:3])]
        for begin in range(0, T, size):
            here = slice(begin, min(begin + size, T))
            of_first = None if first is None else first[None, here]
            of_choices = _by_key(ids[b : b + 1, here], of_first, block, blocks, block, 1)
            part_lse.fill_(-torch.inf)
            arguments = *of_row, *of_choices, visible, first, parts, part_lse, begin, here.stop - begin, S, scale
            launch(kernels.block_sparse_forward_keys, grid, *arguments, **constants)
            rows, merged = (here.stop - begin) * h, (parts, part_lse, out[here], lse[here])
            launch(span_attention_combine, merging.grid(rows), *merged, rows, topk, **merging.options)


@registered("block_sparse_attention_backward")
def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, visible: Tensor, first: Tensor | None, own_k: Tensor, own_v: Tensor,
    own_range: Tensor | None, block: int, scale: float, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor,
    needs: Sequence[bool],
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Return the gradients of queries, keys, values, own keys and own values; needs: which to compute."""
    inputs = q, k, v, own_k, own_v
    grads = empty_gradients(inputs, needs)
    yield tuple(grads)  # type: ignore[misc]
    (B, T, h, d), ids, constants = q.shape, ids.contiguous(), _groups(q, k, ids, block)
    grad_out, delta, tile = grad_out.contiguous(), empty(lse), elementwise(d)
    rows = out, grad_out, lse, grad_lse.contiguous(), delta, B * T * h
    launch(span_attention_backward_delta, tile.grid(B * T * h), *rows, **tile.options)
    q, k, v, own_k, own_v = (_dense_heads(x) for x in inputs)
    if needs[0]:
        tile = _tile("backward_queries", q, block, constants["GROUP"])
        grid = T, B * constants["PARTS"] * tile.grid(constants["GROUP"])[0]
        of_keys = (k, own_k), _strides(k, own_k), (v, own_v), _strides(v, own_v)
        tensors = q, q.stride()[:3], *of_keys, ids, visible, first, own_range, lse, delta, grad_out, grads[0]
        arguments = *tensors, T, k.shape[1], own_k.shape[1], scale
        options = dict(CHOICES=power_of_2(constants["TOPK"]), **tile.options)
        launch(backward.block_sparse_backward_queries, grid, *arguments, **constants, **options)
    if needs[1] or needs[2]:
        of_k, of_v = (x if need else empty(y) for x, y, need in zip(grads[1:3], (k, v), needs[1:3], strict=True))
        _blocks_backward(q, k, v, ids, visible, first, constants, (lse, delta, grad_out), (of_k, of_v), scale)
    if own_range is not None and (needs[3] or needs[4]):
        of_own = only_needed(grads, needs)[3], only_needed(grads, needs)[4]
        bounds, tiles = F.pad(own_range, (2, 0)), tiles_for(q).keys
        _backward_keys(q, own_k, own_v, bounds, 2, (lse, delta, grad_out), of_own, scale, tiles)


def _blocks_backward(
    q: Tensor, k: Tensor, v: Tensor, ids: Tensor, visible: Tensor, first: Tensor | None, constants: dict[str, Any],
    numbers: tuple[Tensor, Tensor, Tensor], grads: tuple[Tensor, Tensor], scale: float,
) -> None:  # fmt: skip
    """Fill the gradients of the blocks' keys and values. numbers: lse, delta, grad_out."""
    (B, T), (S, K), block = q.shape[:2], k.shape[1:3], constants["BLOCK"]
    tile = _tile("backward_keys", q, block, T * constants["GROUP"])
    key_tiles = -(-S // tile.columns)
    of_choices = _by_key(ids, first, block, key_tiles, tile.columns, block)
    tensors = q, q.stride()[:3], k, k.stride()[:3], v, v.stride()[:3], *of_choices, visible, first, *numbers, *grads
    options = dict(AWAITS=tile.stages > 1 and runs_products_aside(q), **tile.options)
    launch(backward.block_sparse_backward_keys, (key_tiles, B * K), *tensors, T, S, scale, **constants, **options)


def _by_key(
    ids: Tensor, first: Tensor | None, block: int, tiles: int, columns: int, reach: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the choices by the first key of their block; return these keys, the choices' indices and tiles' intervals.

    starts, entries: int32 [B, H, T * k]. intervals: int32 [B, H, tiles, 2], the choices that overlap a tile of
    `columns` keys. reach: number of a block's keys that count for overlap, `block`, or 1 for the tile where it begins.
    Nothing is read on the host.
    """
    starts = ids * block if first is None else ids * block + first[..., None, None]
    starts = torch.where(ids < 0, FAR, starts).to(torch.int32).transpose(1, 2).flatten(2)
    starts, entries = starts.sort(dim=-1, stable=True)
    key = torch.arange(tiles, dtype=torch.int32, device=ids.device) * columns
    edges = torch.stack([key - reach + 1, key + columns], -1).flatten().expand(*starts.shape[:2], -1).contiguous()
    intervals = torch.searchsorted(starts, edges, out_int32=True)
    return starts, entries.to(torch.int32), intervals


# -- gradient --------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.block, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    needs = [ctx.needs_input_grad[n] for n in (0, 1, 2, 6, 7)]
    results = out, lse, grad_out, grad_lse, needs
    grads = only_needed(_attention_backward(*tensors, ctx.block, ctx.scale, *results), needs)
    return *grads[:3], None, None, None, *grads[3:], None, None, None, None


_attention.register_autograd(_gradients, setup_context=_save)


# -- the public functions: signature and meaning as in torch.py -----------------------------------------------


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
    """Attend to the chosen blocks of visible keys and to a range of own keys; return [B, T, h, d].

    Arguments: as in `block_sparse_attention` of torch.py. Raises Unserved unless all tensors are fp32, bf16 or
    fp16 and heads have at most 256 numbers.

    Pages are read in place, except by calls that iterate over blocks. Head sizes that are not powers of two are padded.
    Keys that no query sees may be NaN.
    """
    d, table, columns = q_BThd.shape[-1], None, 0
    if isinstance(k_BSKd, PagedTensor) and isinstance(v_BSKd, PagedTensor) and _reads_pages(q_BThd, k_BSKd, v_BSKd):
        k, v, table, columns = k_BSKd.pool_NPKd, v_BSKd.pool_NPKd, k_BSKd.pages.table_BM, k_BSKd.pages.columns
        if own_k is None and goes_by_block(q_BThd, columns, _groups(q_BThd, k, ids_BTHk, block)):
            k, v, table = k_BSKd.dense(), v_BSKd.dense(), None  # for this many queries a copy pays
    else:
        k, v = as_heads(k_BSKd), as_heads(v_BSKd)
    if own_k is None or own_v is None:
        own_k, own_v = (x[:1, :0].expand(len(q_BThd), -1, -1, -1) for x in (k, v))
        own_BT2 = None
    tensors = in_autocast(q_BThd, k, v, own_k, own_v)
    check_dtypes("block_sparse_attention", *tensors)
    q, k, v, own_k, own_v = (_padded(x) for x in tensors)
    visible, first, own_range = _int32(visible_BT), _int32(first_BT), _int32(own_BT2)
    assert visible is not None
    sees = ids_BTHk, visible, first, own_k, own_v, own_range
    if table is not None:
        out, _ = _attention_paged(q, k, v, *sees, table.contiguous(), columns, block, scale, 0)
    else:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for kernel in ("backward_queries", "backward_keys"):
                _tile(kernel, q, block, 1)  # raises Unserved now rather than in the backward
        out, _ = _attention(q, k, v, *sees, block, scale, 0)
    return out[..., :d] if out.shape[-1] != d else out
