"""Several ops of a layer in one launch, as ops for torch without gradient: launchers and the public functions.

What each computes is said by the method of `Kernels` of the same name, which composes it of single ops wherever this
does not serve.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, is_grad_enabled

from blockdiff.kernels.autocast import is_on
from blockdiff.kernels.expert_mlp import Slots
from blockdiff.kernels.expert_mlp.activations import activation_of
from blockdiff.kernels.expert_mlp.triton import _precision, expert_slots
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.fp8.triton import parts_of
from blockdiff.kernels.fused import triton_kernels as kernels
from blockdiff.kernels.launch import DTYPES, Launch, are_of, asks_torch, check_dtypes, empty, of_sizes, op
from blockdiff.kernels.norm_rope.triton import _row_scalars, by_rows
from blockdiff.kernels.span_attention.paged import PagedTensor, PrefixTensor
from blockdiff.kernels.span_attention.triton import fill_forward, has_tile
from blockdiff.kernels.tiles import INTERPRETED, LEAST, Tile, decodes_fp8, elementwise, power_of_2, tile_for

FEW_ROWS = 1024  # for more, torch's product is faster than a product here saves launches
__all__ = ["attention_heads", "expert_slots", "gated_product", "layer_end", "residual_norms", "routed_tokens", "serves"]

_residual_norms_of, _layer_end_of = by_rows(kernels.residual_norms), by_rows(kernels.layer_end)
ROUTER = Tile(16, LEAST, 128, 4, 3)  # few tokens a program: there are never many of them


def serves(x: Tensor) -> bool:
    """Whether a call on x can be fused: no gradient, a device and a dtype for Triton, and no autocast."""
    return not is_grad_enabled() and (x.is_cuda or INTERPRETED) and x.dtype in DTYPES and not is_on(x)


# -- launchers -------------------------------------------------------------------------------------------------


@op("attention_heads")
def _attention_heads(
    q: Tensor, k: Tensor, v: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float, norm: str, norms_values: bool,
) -> Iterator[list[Tensor]]:  # fmt: skip
    """Queries [B, T, h, d], keys and values [B, T, K, d], dense; norm: as the kernel has it."""
    heads = [x for x in (q, k, v) if x is not None]
    outs = [empty(x) for x in heads]
    yield outs
    _launch_heads(heads, outs, None, q_weight, k_weight, cos, sin, eps, norm, norms_values)


@op("attention_heads_into", mutates=("k_pages", "v_pages"))
def _attention_heads_into(
    q: Tensor, k: Tensor, v: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float, norm: str, norms_values: bool, k_pages: Tensor, v_pages: Tensor | None, places: Tensor,
) -> Iterator[Tensor]:  # fmt: skip
    """Queries alone; keys and values go into pools [pages, P, K, d], to `places` int64 [B * T], counted in tokens."""
    heads, pages = ([x for x in both if x is not None] for both in ((q, k, v), (k_pages, v_pages)))
    out = empty(q)
    yield out
    _launch_heads(heads, [out, *pages], places, q_weight, k_weight, cos, sin, eps, norm, norms_values)


def _launch_heads(
    heads: Sequence[Tensor], outs: Sequence[Tensor], places: Tensor | None, q_weight: Tensor | None,
    k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, norm: str, norms_values: bool,
) -> None:  # fmt: skip
    """Fill what queries, keys and values are written to; the heads of a token may stand in one axis."""
    (B, T, h, d), K, turned = outs[0].shape, outs[1].shape[2], cos.shape[-1]
    # a token's heads are neighbours in what a product gives, whole or sliced: rows and tokens are then one axis
    tensors, strides = zip(*[_of_tokens(x, d) for x in heads], strict=True)
    arguments = tensors, strides, tuple(outs), places, q_weight, k_weight, cos.contiguous(), sin.contiguous()
    _attention_heads_of(B * T, h, K * (len(heads) - 1), K, d, turned, norm, norms_values)(*arguments, B * T, eps)


@of_sizes
def _attention_heads_of(
    N: int, h: int, others: int, K: int, d: int, turned: int, norm: str, norms_values: bool
) -> Launch:
    rest = power_of_2(d - turned) if d > turned else 0
    tile = replace(elementwise(max(turned // 2, rest)), columns=power_of_2(turned // 2))
    constants = dict(QUERIES=h, KEYS=K, D=d, TURNED=turned, NORM=norm, NORMS_VALUES=norms_values, REST=rest)
    return Launch(kernels.attention_heads, (tile.grid(N)[0], h + others), **constants, **tile.options)


def _of_tokens(x: Tensor, d: int) -> tuple[Tensor, tuple[int, int]]:
    """Heads [B, T, heads, d] or [B, T, heads * d] with rows and tokens as one axis, a copy if they are not, and strides
    over tokens and over heads."""
    of_row, of_token, *of_heads, of_number = x.stride()
    if of_number == 1 and of_row == x.shape[1] * of_token:
        return x, (of_token, of_heads[0] if of_heads else d)
    return x.contiguous(), (math.prod(x.shape[2:]), d)


@op("residual_norms")
def _residual_norms(
    x: Tensor, y: Tensor, weight: Tensor, w0: Tensor | None, w1: Tensor | None, w2: Tensor | None, count: int,
    eps: float,
) -> Iterator[list[Tensor]]:  # fmt: skip
    """The sum, and its norms under the first `count` weights."""
    x = x.contiguous()
    out, *norms = outs = [torch.empty_like(x) for _ in range(count + 1)]
    yield outs
    launched, N = _residual_norms_of(x.numel(), x.shape[-1])
    launched(x, y.contiguous(), weight, (w0, w1, w2)[:count], out, tuple(norms), N, eps)


@op("layer_end")
def _layer_end(
    x: Tensor, dense: Tensor, slots: Tensor, index: Tensor | None, dense_weight: Tensor, slots_weight: Tensor,
    weight: Tensor, scalar: Tensor | None, E: int, eps: float,
) -> Iterator[Tensor]:  # fmt: skip
    """The end of a layer; slots: [N, k, D] with their experts `index` [N, k], or x's shape without."""
    x = x.contiguous()
    out = torch.empty_like(x)
    yield out
    top_k = 1 if index is None else slots.shape[1]
    launched, N = _layer_end_of(x.numel(), x.shape[-1], TOP_K=top_k)
    tensors = x, dense.contiguous(), slots.contiguous(), index, dense_weight, slots_weight, weight
    launched(*tensors, *_row_scalars(scalar, x), out, N, E, eps)


@op("routed_tokens")
def _routed_tokens(
    x: Tensor, scale: Tensor, root: float, weight: Tensor, expert_scale: Tensor, k: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Experts int64 [N, k] and their fp32 weights of N tokens [..., D]."""
    E, D = weight.shape
    N = x.numel() // D
    index, of_expert = x.new_empty(N, k, dtype=torch.int64), x.new_empty(N, k, dtype=torch.float32)
    yield index, of_expert
    launched = _routed_tokens_of(N, E, D, k, x.dtype)
    launched(x.contiguous(), scale, root, weight.contiguous(), expert_scale, index, of_expert, N)


@of_sizes
def _routed_tokens_of(N: int, E: int, D: int, k: int, dtype: torch.dtype) -> Launch:
    tile = Tile(ROUTER.rows, max(LEAST, power_of_2(E)), ROUTER.inner, ROUTER.warps, ROUTER.stages).fitted(inner=D)
    constants = dict(E=E, D=D, TOP_K=k, CHOICES=power_of_2(k), PRECISION=_precision(dtype), **tile.options)
    return Launch(kernels.routed_tokens, tile.grid(N)[:1], **constants)


@op("gated_product")
def _gated_product(
    x: Tensor, gate: Tensor, up: Tensor, gate_scale: Tensor | None, up_scale: Tensor | None, activation: str
) -> Iterator[Tensor]:
    """f(x gate^T) * g(x up^T) [..., F] of tokens [..., D]."""
    D, F = x.shape[-1], gate.shape[0]
    out = x.new_empty(*x.shape[:-1], F)
    yield out
    N, hardware = x.numel() // D, gate_scale is not None and decodes_fp8(x)
    launched = _gated_product_of(N, D, F, activation, hardware, x.dtype, x.device)
    launched(x.contiguous(), gate.contiguous(), up.contiguous(), gate_scale, up_scale, out, N)


@of_sizes
def _gated_product_of(
    N: int, D: int, F: int, activation: str, hardware: bool, dtype: torch.dtype, device: torch.device
) -> Launch:
    activation_of(activation)  # raises where there is none
    tile = tile_for("expert_mlp_gate_up", dtype, device, N / 4).fitted(rows=N, columns=F, inner=D)
    constants = dict(D=D, F=F, ACTIVATION=activation, HARDWARE=hardware, PRECISION=_precision(dtype), **tile.options)
    return Launch(kernels.gated_product, tile.grid(N, F), **constants)


# -- the public functions: meaning as in `Kernels` ---------------------------------------------------------------


def attention_heads(
    q_BThd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None,
    cos_BTr: Tensor, sin_BTr: Tensor, eps: float, norm: str, norms_values: bool,
    into: tuple[PagedTensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """What `layers.attention.heads` gives, with a norm of that form; its values are None where it gets none."""
    inputs = q_BThd, k_BTKd, v_BTKd, q_weight, k_weight, cos_BTr, sin_BTr, eps, norm, norms_values
    if into is None:
        q, k, *v = _attention_heads(*inputs)
        return q, k, v[0] if v else None
    k_pages, v_pages = into[0].pool_NPKd, None if v_BTKd is None else into[1].pool_NPKd
    q = _attention_heads_into(*inputs, k_pages, v_pages, into[0].pages.own_N)
    return q, k_BTKd[:, :0], None if v_BTKd is None else v_BTKd[:, :0]


def attended(
    products: Sequence[Tensor], d: int, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor,
    sin: Tensor, eps: float, norm: str, norms_values: bool, past: tuple[PrefixTensor, ...], bounds_BT4: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor] | None:  # fmt: skip
    """What `span_attention` gives of `attention_heads` over pages, [B, T, h * d], and the own keys and values; d: of a
    head. It is what both ops launch, past torch's views of heads and the checks of two ops.

    None where torch has to see the ops, and where pages are not read as they are or there is no tile.
    """
    prefix_k, prefix_v, *others = past
    if asks_torch() or others or not (isinstance(prefix_k, PagedTensor) and isinstance(prefix_v, PagedTensor)):
        return None
    heads = products if len(products) == 3 else (*products, products[1])
    x, pk, pv, pages = heads[0], prefix_k.pool_NPKd, prefix_v.pool_NPKd, prefix_k.pages
    if not has_tile(d, x.dtype, x.device) or not are_of(x.dtype, (pk, pv, *heads)):
        return None
    (B, T, width), K = x.shape, pk.shape[2]
    q, k, v = x.new_empty(B, T, width // d, d), x.new_empty(B, T, K, d), x.new_empty(B, T, K, d)
    out, lse = x.new_empty(B, T, width), x.new_empty(B, T, width // d, dtype=torch.float32)
    _launch_heads(heads, (q, k, v), None, q_weight, k_weight, cos, sin, eps, norm, norms_values)
    fill_forward(q, (pk, pv, k, v), bounds_BT4, scale, 0, pages.columns, pages.table_BM, out, lse)
    return out, k, v


def residual_norms(
    x: Tensor, y: Tensor, weight: Tensor, weights: Sequence[Tensor | None], eps: float
) -> tuple[Tensor, ...]:
    """`x + rms_norm(y)`, and its norms under up to three weights."""
    return tuple(_residual_norms(x, y, weight, *weights, *(None,) * (3 - len(weights)), len(weights), eps))


def layer_end(
    x: Tensor, dense: Tensor, routed: Slots | Tensor, weights: tuple[Tensor, Tensor, Tensor], eps: float,
    scalar: Tensor | None,
) -> Tensor:  # fmt: skip
    """The branches' norms, their sum's norm, the residual and the layer scalar."""
    if isinstance(routed, Slots):
        return _layer_end(x, dense, routed.values_NkD, routed.index_Nk, *weights, scalar, routed.experts, eps)
    return _layer_end(x, dense, routed, None, *weights, scalar, 0, eps)


def routed_tokens(
    x: Tensor, scale_D: Tensor, root: float, weight_ED: Tensor, expert_scale_E: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The k best experts of every token and their weights."""
    check_dtypes("routed_tokens", x, weight_ED)
    return _routed_tokens(x, scale_D, root, weight_ED, expert_scale_E, k)


def gated_product(x: Tensor, gate_FD: Tensor | Fp8, up_FD: Tensor | Fp8, activation: str) -> Tensor:
    """The gated half of a dense MLP, whose weights may be in fp8."""
    if isinstance(gate_FD, Fp8) or isinstance(up_FD, Fp8):
        (gate, gate_scale), (up, up_scale) = parts_of(gate_FD), parts_of(up_FD)
        check_dtypes("gated_product", *((x, gate, up) if gate_scale is None else (x,)))
        return _gated_product(x, gate, up, gate_scale, up_scale, activation)
    check_dtypes("gated_product", x, gate_FD, up_FD)
    return _gated_product(x, gate_FD, up_FD, None, None, activation)
