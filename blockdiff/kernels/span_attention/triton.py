"""span_attention in Triton: launchers, ops for torch, gradients, and the public function.

Memory is linear in tokens: the output, one log-sum-exp per query and head, and in the backward one more number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.kernels.span_attention import triton_kernels
from blockdiff.kernels.span_attention.tiles import Tile, Tiles, splits_of, tiles_of
from blockdiff.spans import Spans

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 512
ROW_ELEMENTS = 4096  # elements that a program of the kernels without products holds


def span_attention(
    q_BThd: Tensor,
    prefix_k: Tensor | None,
    prefix_v: Tensor | None,
    own_k: Tensor,
    own_v: Tensor,
    spans: Spans,
    scale: float,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The public op (see `SpanAttention` for shapes): fp32, bf16 or fp16, heads of up to 512.

    Head sizes that are no power of two are padded. Keys that no query sees are not loaded, except where they stand
    between seen ones: there they must be finite. Raises BlockdiffError for what the kernels cannot take.
    """
    d = q_BThd.shape[-1]
    if prefix_k is None or prefix_v is None:
        prefix_k, prefix_v = own_k[:, :0], own_v[:, :0]
    tensors = [q_BThd, prefix_k, prefix_v, own_k, own_v]
    if torch.is_autocast_enabled(q_BThd.device.type):  # fp32 cos and sin leave fp32 q and k beside bf16 v
        tensors = [x.to(torch.get_autocast_dtype(q_BThd.device.type)) for x in tensors]
    if len({x.dtype for x in tensors}) > 1 or tensors[0].dtype not in DTYPES or d > LARGEST_HEAD:
        dtypes = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in tensors}))
        raise BlockdiffError(
            f"span_attention in Triton takes float32, bfloat16 or float16 (one of them) and heads of up to "
            f'{LARGEST_HEAD}, not {dtypes} and {d}; kernels="torch" takes anything'
        )
    padding = max(16, triton.next_power_of_2(d)) - d
    if padding:
        tensors = [F.pad(x, (0, padding)) for x in tensors]
    out, lse = _span_attention(*tensors, spans.bounds_BT4, scale, 0)
    out = out[..., :d] if padding else out
    return (out, lse) if return_lse else out


# -- launchers -------------------------------------------------------------------------------------------------


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Strides over rows, tokens and heads of [B, tokens, heads, d]."""
    return x.stride(0), x.stride(1), x.stride(2)


def _dense_heads(x: Tensor) -> Tensor:
    """The tensor itself where the numbers of a head are neighbours, else a copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _grid(rows: int, tile: Tile, B: int, K: int, splits: int = 1) -> tuple[int, int, int]:
    return triton.cdiv(rows, tile.M), B * K, splits


def _options(tile: Tile) -> dict[str, int]:
    return dict(M=tile.M, N=tile.N, num_warps=tile.warps, num_stages=tile.stages)


@torch.library.custom_op("blockdiff::span_attention", mutates_args=())
def _span_attention(
    q_BThd: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    bounds_BT4: Tensor,
    scale: float,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """Output, and log-sum-exp in fp32; splits: parts of the keys, 0 to choose."""
    B, T, h, d = q_BThd.shape
    prefix_keys, own_keys, K = prefix_k.shape[1], own_k.shape[1], own_k.shape[2]
    out = torch.empty(B, T, h, d, dtype=q_BThd.dtype, device=q_BThd.device)
    lse = torch.empty(B, T, h, dtype=torch.float32, device=q_BThd.device)
    if not out.numel():
        return out, lse
    tiles = tiles_of(d, q_BThd.element_size())
    tile = tiles.forward.fitted(T * h // K)
    grid = _grid(T * h // K, tile, B, K)
    if not splits:
        key_tiles = triton.cdiv(prefix_keys, tile.N) + triton.cdiv(own_keys, tile.N)
        splits = splits_of(grid[0] * grid[1], key_tiles, _multiprocessors(q_BThd.device))
    parts, part_lse = out, lse
    if splits > 1:
        parts = torch.empty(splits, *out.shape, dtype=torch.float32, device=out.device)
        part_lse = torch.empty(splits, *lse.shape, dtype=torch.float32, device=out.device)
    sources = [_dense_heads(x) for x in (q_BThd, prefix_k, prefix_v, own_k, own_v)]
    strides = [stride for x in sources for stride in _strides(x)]
    triton_kernels.forward[*grid[:2], splits](
        *sources, bounds_BT4.contiguous(), parts, part_lse, *strides, B, T, prefix_keys, own_keys, scale,
        K=K, G=h // K, D=d, SPLITS=splits, PRECISION=tiles.precision, **_options(tile),
    )  # fmt: skip
    if splits > 1:
        rows, M = B * T * h, ROW_ELEMENTS // d
        grid_of_rows = (triton.cdiv(rows, M),)
        triton_kernels.merge[grid_of_rows](parts, part_lse, out, lse, rows, D=d, SPLITS=splits, M=M, num_warps=4)
    return out, lse


@torch.library.custom_op("blockdiff::span_attention_backward", mutates_args=())
def _span_attention_backward(
    q_BThd: Tensor,
    prefix_k: Tensor,
    prefix_v: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    bounds_BT4: Tensor,
    scale: float,
    out_BThd: Tensor,
    lse_BTh: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five tensors; needs: which of them to make (the others come back without elements)."""
    inputs = (q_BThd, prefix_k, prefix_v, own_k, own_v)
    grads = [_gradient_of(x, need) for x, need in zip(inputs, needs, strict=True)]
    if not out_BThd.numel():
        q, pk, pv, ok, ov = (grad.zero_() for grad in grads)
        return q, pk, pv, ok, ov
    B, T, h, d = q_BThd.shape
    K, G = own_k.shape[2], h // own_k.shape[2]
    q, *sources = (_dense_heads(x) for x in inputs)
    bounds, grad_out = bounds_BT4.contiguous(), grad_out.contiguous()
    delta = torch.empty_like(lse_BTh)
    rows, M = B * T * h, ROW_ELEMENTS // d
    triton_kernels.backward_rows[(triton.cdiv(rows, M),)](
        out_BThd, grad_out, lse_BTh, grad_lse.contiguous(), delta, rows, D=d, M=M, num_warps=4
    )
    tiles = tiles_of(d, q.element_size())
    shape: dict[str, Any] = dict(K=K, G=G, D=d, PRECISION=tiles.precision)
    if needs[0]:
        tile = tiles.backward_q.fitted(T * G)
        strides = [stride for x in (q, *sources) for stride in _strides(x)]
        triton_kernels.backward_q[_grid(T * G, tile, B, K)](
            q, *sources, bounds, lse_BTh, delta, grad_out, grads[0], *strides,
            B, T, prefix_k.shape[1], own_k.shape[1], scale, **shape, **_options(tile),
        )  # fmt: skip
    for first in (0, 2):  # where a source's span stands in `bounds`, and its k among the sources
        k, v, needs_kv = sources[first], sources[first + 1], (needs[first + 1], needs[first + 2])
        if k.numel() and any(needs_kv):
            numbers, grads_kv = (bounds, lse_BTh, delta, grad_out), (grads[first + 1], grads[first + 2])
            _launch_backward_kv(q, k, v, numbers, grads_kv, scale, first, needs_kv, tiles, shape)
    q, pk, pv, ok, ov = grads
    return q, pk, pv, ok, ov


def _launch_backward_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numbers: tuple[Tensor, Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor],
    scale: float,
    first: int,
    needs: tuple[bool, bool],
    tiles: Tiles,
    shape: dict[str, Any],
) -> None:
    """grad_k and grad_v of one source of keys, in one launch or in two."""
    (B, T), keys = q.shape[:2], k.shape[1]
    N = tiles.backward_kv[0].N
    key_tiles = triton.cdiv(keys, N)
    interval = torch.empty(B, key_tiles, 2, dtype=torch.int32, device=q.device)
    triton_kernels.seeing_queries[key_tiles, B](numbers[0], interval, first, T, key_tiles, N=N)
    which = [needs] if len(tiles.backward_kv) == 1 else [(needs[0], False), (False, needs[1])]
    for tile, (with_k, with_v) in zip(tiles.backward_kv, which, strict=True):
        if with_k or with_v:
            triton_kernels.backward_kv[key_tiles, B * k.shape[2]](
                q, k, v, *numbers, interval, *grads, *_strides(q), *_strides(k), *_strides(v),
                first, T, keys, scale, WITH_K=with_k, WITH_V=with_v, **shape, **_options(tile),
            )  # fmt: skip


def _gradient_of(x: Tensor, is_needed: bool) -> Tensor:
    return torch.empty(x.shape if is_needed else (0,), dtype=x.dtype, device=x.device)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# -- shapes without computing, and autograd --------------------------------------------------------------------


@_span_attention.register_fake
def _(q: Tensor, pk: Tensor, pv: Tensor, ok: Tensor, ov: Tensor, bounds: Tensor, scale: float, splits: int) -> Any:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[:-1], dtype=torch.float32)


@_span_attention_backward.register_fake
def _(q: Tensor, pk: Tensor, pv: Tensor, ok: Tensor, ov: Tensor, *rest: Any) -> Any:
    return tuple(_gradient_of(x, need) for x, need in zip((q, pk, pv, ok, ov), rest[-1], strict=True))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, _ = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> tuple[Any, ...]:
    *tensors, out, lse = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:5])
    grads = torch.ops.blockdiff.span_attention_backward(*tensors, ctx.scale, out, lse, grad_out, grad_lse, needs)
    return *(grad if need else None for grad, need in zip(grads, needs, strict=True)), None, None, None


_span_attention.register_autograd(_gradients, setup_context=_save)
