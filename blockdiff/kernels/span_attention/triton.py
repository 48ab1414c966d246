"""span_attention in Triton: launchers as registered ops, their gradient, and the public function.

Memory is linear in tokens: the output, one log-sum-exp per query and head, and in the backward one more number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast, is_on
from blockdiff.kernels.launch import (
    Launch,
    Unserved,
    cached_by_sizes,
    check_dtypes,
    empty,
    empty_gradients,
    have_dtype,
    launch,
    only_needed,
    registered,
)
from blockdiff.kernels.scratch import scratch
from blockdiff.kernels.span_attention import kernels
from blockdiff.kernels.span_attention import kernels_backward as backward
from blockdiff.kernels.span_attention.paged import PagedTensor, PrefixTensor
from blockdiff.kernels.span_attention.torch import in_sweep
from blockdiff.kernels.tiles import (
    LEAST,
    Tile,
    elementwise,
    power_of_2,
    precision_of,
    runs_products_aside,
    tile_for,
    tile_of,
)
from blockdiff.spans import Spans, Sweep

LARGEST_HEAD = 512
SHARED_LAUNCH = 256  # largest head size for which one launch computes the gradients of both keys and values
MOST_SPLITS = 32
TILES_PER_SPLIT = 5  # least key tiles per split: fewer cost less than combining the splits

# -- launchers -------------------------------------------------------------------------------------------------


class AttentionTiles(NamedTuple):
    """The tiles of the kernels with products: rows are the queries of a group of heads, columns are keys.

    keys: one tile if one launch computes the gradients of both keys and values; two, one each, for large heads, for
    which both results would exhaust the registers and computing the scores twice is cheaper.
    """

    forward: Tile
    queries: Tile
    keys: tuple[Tile, ...]


def tiles_for(q: Tensor) -> AttentionTiles:
    """Return the table's tiles for heads of q's size and dtype; Unserved if any kernel, backward included, has none."""
    d = q.shape[-1]
    keys = ("keys",) if d <= SHARED_LAUNCH else ("keys_k", "keys_v")
    forward, queries, *of_keys = (
        tile_of(f"span_attention_{kernel}", q, d)
        for kernel in ("forward", "backward_queries", *(f"backward_{name}" for name in keys))
    )
    return AttentionTiles(forward, queries, tuple(of_keys))


def splits_of(programs: int, key_tiles: int, multiprocessors: int) -> int:
    """Return into how many parts to split the keys so that `programs` row tiles fill the device; 1: do not split.

    Minimises rounds / splits, rounds = ceil(programs * splits / multiprocessors); ties go to fewer splits.
    """
    if programs >= multiprocessors:
        return 1
    most = max(1, min(MOST_SPLITS, key_tiles // TILES_PER_SPLIT))
    return min(range(1, most + 1), key=lambda splits: -(-programs * splits // multiprocessors) / splits)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _dense_heads(x: Tensor) -> Tensor:
    """Return x if its heads are contiguous, else a copy."""
    return x if x.stride()[-1] == 1 or x.shape[-1] == 1 else x.contiguous()


def _heads(h: int, K: int, d: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constants of the kernels with products."""
    return dict(K=K, G=h // K, D=d, PRECISION=precision_of(dtype, d))


def _with_strides(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return `_dense_heads` of [B, tokens, heads, d] and its strides over rows, tokens and heads."""
    of_row, of_token, of_head, of_number = x.stride()
    if of_number == 1 or x.shape[-1] == 1:
        return x, (of_row, of_token, of_head)
    return _with_strides(x.contiguous())


def _strides(*tensors: Tensor) -> tuple[tuple[int, ...], ...]:
    """Return the strides over rows, tokens and heads of each tensor [B, tokens, heads, d]."""
    return tuple([x.stride()[:3] for x in tensors])


def _keys(pk: Tensor, pv: Tensor, ok: Tensor, ov: Tensor) -> tuple[Any, ...]:
    """Return keys, their strides, values, their strides for the kernels: each a pair of the prefix's and the own."""
    return (pk, ok), _strides(pk, ok), (pv, ov), _strides(pv, ov)


@registered("span_attention")
def _span_attention(
    q: Tensor, pk: Tensor, pv: Tensor, ok: Tensor, ov: Tensor, bounds: Tensor, scale: float, splits: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return output and log-sum-exp in fp32. pk, pv, ok, ov: prefix and own. splits: of the keys (0: choose)."""
    return _forward(q, (pk, pv, ok, ov), bounds, scale, splits, pk.shape[1])


@registered("span_attention_paged")
def _span_attention_paged(
    q: Tensor, pk: Tensor, pv: Tensor, ok: Tensor, ov: Tensor, bounds: Tensor, table: Tensor, columns: int,
    scale: float, splits: int,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Return output and log-sum-exp in fp32 over a prefix in pages, without gradient.

    pk, pv: pools [N, P, K, d]. table: int32 [B, pages]. columns: upper bound of a row's prefix columns.
    """
    return _forward(q, (pk, pv, ok, ov), bounds, scale, splits, columns, table)


def _parts(q: Tensor, *sizes: int) -> tuple[Tensor, Tensor]:
    """Allocate the output of each split [splits, B, T, h, d] and its log-sum-exp [splits, B, T, h], in fp32."""
    return q.new_empty(*sizes, dtype=torch.float32), q.new_empty(*sizes[:-1], dtype=torch.float32)


def _forward(
    q: Tensor, sources: tuple[Tensor, ...], bounds: Tensor, scale: float, splits: int, columns: int,
    table: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Yield output and log-sum-exp unfilled, then fill them (see `launch.registered`).

    sources: prefix keys, prefix values, own keys, own values. table: the pages of every row's prefix, if the first two
    are pools [N, P, K, d].
    """
    out, lse = empty(q), empty(q, *q.shape[:3], dtype=torch.float32)
    tile_of("span_attention_forward", q, q.shape[-1])  # raises Unserved if there is none
    yield out, lse
    pk, pv, ok, ov = sources
    (B, T, h, d), (_, own_keys, K, _), page, pages = q.shape, ok.shape, 0, 0
    if table is not None:
        table = table.contiguous()
        page, pages = pk.shape[1], table.shape[1]
    splits, forward, combine = _forward_of(B, T, h, K, d, (columns, own_keys), splits, page, q.dtype, q.device)
    parts, part_lse = out, lse
    if splits > 1:
        parts, part_lse = scratch(_parts, q, splits, B, T, h, d)
    (q, of_q), (pk, of_pk), (pv, of_pv), (ok, of_ok), (ov, of_ov) = map(_with_strides, (q, pk, pv, ok, ov))
    if table is not None:
        # pages are contiguous, so a slot is an index over the tokens of the whole pool
        if of_pk[0] != page * of_pk[1] or of_pv[0] != page * of_pv[1]:
            (pk, of_pk), (pv, of_pv) = _with_strides(pk.contiguous()), _with_strides(pv.contiguous())
        of_pk, of_pv = (0, of_pk[1], of_pk[2]), (0, of_pv[1], of_pv[2])  # the pool is shared by all rows
    keys, values, bounds = ((pk, ok), (of_pk, of_ok)), ((pv, ov), (of_pv, of_ov)), bounds.contiguous()
    numbers = B, T, columns, own_keys, pages, scale
    forward(q, of_q, *keys, *values, bounds, table, parts, part_lse, *numbers)
    if splits > 1:
        combine(parts, part_lse, out, lse, B * T * h, splits)


@cached_by_sizes
def _forward_of(
    B: int, T: int, h: int, K: int, d: int, keys: tuple[int, int], splits: int, page: int, dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, Launch, Launch]:  # fmt: skip
    """Return the number of splits, the launch of the forward, and the launch that combines the splits."""
    tile = tile_for("span_attention_forward", dtype, device, d)
    row_tiles, _ = tile.grid(T * h // K)
    if not splits:
        key_tiles = sum(-(-count // tile.columns) for count in keys)
        splits = splits_of(row_tiles * B * K, key_tiles, _multiprocessors(device))
    constants = dict(PAGE=page, **_heads(h, K, d, dtype), **tile.options)
    forward = Launch(kernels.span_attention_forward, (row_tiles, B * K, splits), **constants)
    tile = elementwise(d)
    combine = Launch(kernels.span_attention_combine, tile.grid(B * T * h), **tile.options)
    return splits, forward, combine


@registered("span_attention_backward")
def _span_attention_backward(
    q: Tensor, pk: Tensor, pv: Tensor, ok: Tensor, ov: Tensor, bounds: Tensor, scale: float,
    out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor, needs: Sequence[bool],
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """Return the gradients of q, pk, pv, ok, ov; needs: which to compute (the others have no elements)."""
    inputs = q, pk, pv, ok, ov
    grads = empty_gradients(inputs, needs)
    yield tuple(grads)  # type: ignore[misc]
    (B, T, h, d), K, tiles = q.shape, ok.shape[2], tiles_for(q)
    bounds, grad_out, delta, tile = bounds.contiguous(), grad_out.contiguous(), empty(lse), elementwise(d)
    rows = out, grad_out, lse, grad_lse.contiguous(), delta, B * T * h
    launch(backward.span_attention_backward_delta, tile.grid(B * T * h), *rows, **tile.options)
    q, *sources = (_dense_heads(x) for x in inputs)
    if needs[0]:
        tile = tiles.queries.fitted(rows=T * h // K)
        grid = tile.grid(T * h // K)[0], B * K
        tensors = q, *_strides(q), *_keys(*sources), bounds, lse, delta, grad_out, grads[0]
        arguments = *tensors, T, pk.shape[1], ok.shape[1], scale
        constants = _backward_constants(q, K, tile)
        launch(backward.span_attention_backward_queries, grid, *arguments, **constants)
    _, *grads_kv = only_needed(grads, needs)
    for first in (0, 2):  # index of a source's span in `bounds`, and of its keys and values among the sources
        (k, v), (grad_k, grad_v) = sources[first : first + 2], grads_kv[first : first + 2]
        _backward_keys(q, k, v, bounds, first, (lse, delta, grad_out), (grad_k, grad_v), scale, tiles.keys)


def _backward_keys(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, first: int, numbers: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor | None, Tensor | None], scale: float, tiles: tuple[Tile, ...],
) -> None:  # fmt: skip
    """Fill the gradients of one source's keys and values (None: skip) in one or two launches.

    first: index of the source's span in `bounds`, 0 for the prefix, 2 for the own keys. numbers: lse, delta, grad_out.
    """
    (B, T), (keys, K), columns = q.shape[:2], k.shape[1:3], tiles[0].columns
    key_tiles = -(-keys // columns)
    interval = empty(bounds, B, key_tiles, 4)
    launches = [grads] if len(tiles) == 1 else [(grads[0], None), (None, grads[1])]
    if grads != (None, None):
        arguments = bounds, first, interval, T, keys, key_tiles
        launch(backward.span_attention_backward_intervals, (key_tiles, B), *arguments, COLUMNS=columns)
    for tile, some in zip(tiles, launches, strict=True):
        if some != (None, None):
            tensors = q, *_strides(q), k, *_strides(k), v, *_strides(v), bounds, first, *numbers, interval, *some
            constants = _backward_constants(q, K, tile)
            launch(backward.span_attention_backward_keys, (key_tiles, B * K), *tensors, T, keys, scale, **constants)


def _backward_constants(q: Tensor, K: int, tile: Tile) -> dict[str, Any]:
    """Return the constants of a backward kernel. In pipelined loops on sm_90 it must wait for each product (AWAITS)."""
    heads = _heads(q.shape[2], K, q.shape[3], q.dtype)
    return dict(AWAITS=tile.stages > 1 and runs_products_aside(q), **heads, **tile.options)


# -- gradient --------------------------------------------------------------------------------------------------


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    grads = _span_attention_backward(*tensors, ctx.scale, out, lse, grad_out, grad_lse, needs)
    return *only_needed(grads, needs), None, None, None


_span_attention.register_autograd(_gradients, setup_context=_save)


def is_read_as_it_is(*tensors: Tensor) -> bool:
    """Whether tensors with heads need neither padding nor casting, which would copy whole pools."""
    q = tensors[0]
    return is_size_of_heads(q.shape[-1]) and have_dtype(q.dtype, tensors) and not is_on(q)


@cached_by_sizes
def is_size_of_heads(d: int) -> bool:
    """Whether kernels read heads of size d without padding."""
    return _padding(d) == 0 and d <= LARGEST_HEAD


@cached_by_sizes
def _padding(d: int) -> int:
    """Return how many zeros pad a head of size d to a size that kernels read."""
    return max(LEAST, power_of_2(d)) - d


# -- the public function: signature and meaning as in torch.py ------------------------------------------------


def span_attention(
    q_BThd: Tensor,
    prefix_k: PrefixTensor | None,
    prefix_v: PrefixTensor | None,
    own_k: Tensor,
    own_v: Tensor,
    spans: Spans | Sweep,
    scale: float,
) -> Tensor:
    """Attend over cached (`prefix`) and own keys, each query to its two spans; arguments as in torch.py.

    For fp32, bf16 or fp16 and heads of up to 512; Unserved for others.

    Head sizes that are not powers of two are padded. Keys that no query sees are not loaded, except between visible
    ones, where they must be finite. Pages are read in place if their heads need no padding, and copied otherwise.
    """
    if isinstance(spans, Sweep):
        return in_sweep(span_attention, q_BThd, own_k, own_v, spans, scale)
    return with_lse(q_BThd, prefix_k, prefix_v, own_k, own_v, spans, scale)[0]


def with_lse(
    q_BThd: Tensor, prefix_k: PrefixTensor | None, prefix_v: PrefixTensor | None, own_k: Tensor, own_v: Tensor,
    spans: Spans, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `span_attention` and the log-sum-exp of every query's scores, fp32 [B, T, h], which has a gradient.

    It is -inf if a query sees no key.
    """
    if isinstance(prefix_k, PagedTensor) and isinstance(prefix_v, PagedTensor):
        paged = q_BThd, prefix_k.pool_NPKd, prefix_v.pool_NPKd, own_k, own_v
        if is_read_as_it_is(*paged):
            check_dtypes("span_attention", q_BThd)
            table, columns = prefix_k.pages.table_BM, prefix_k.pages.columns
            out, lse = _span_attention_paged(*paged, spans.written_BT4, table, columns, scale, 0)
            return out, lse
        prefix_k, prefix_v = prefix_k.dense(), prefix_v.dense()
    assert not isinstance(prefix_k, PagedTensor) and not isinstance(prefix_v, PagedTensor)
    if prefix_k is None or prefix_v is None:
        prefix_k, prefix_v = own_k[:, :0], own_v[:, :0]
    tensors = in_autocast(
        q_BThd, prefix_k, prefix_v, own_k, own_v
    )  # with fp32 cos and sin, q and k are fp32 and v is bf16
    check_dtypes("span_attention", *tensors)
    if (d := q_BThd.shape[-1]) > LARGEST_HEAD:
        raise Unserved(f"span_attention in Triton takes heads of up to {LARGEST_HEAD}, not {d}")
    padding = _padding(d)
    if padding:
        tensors = tuple(F.pad(x, (0, padding)) for x in tensors)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        tiles_for(tensors[0])  # raises Unserved now rather than in the backward
    out, lse = _span_attention(*tensors, spans.written_BT4, scale, 0)
    out = out[..., :d] if padding else out
    return out, lse
