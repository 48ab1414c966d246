"""Several ops of a layer in one launch, as ops for torch without gradient: launchers and the public functions.

What each computes is said by the method of `Kernels` of the same name, which composes it of single ops wherever this
does not serve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
from torch import Tensor

from blockdiff.kernels.autocast import is_on
from blockdiff.kernels.expert_mlp import Slots
from blockdiff.kernels.expert_mlp.activations import activation_of
from blockdiff.kernels.expert_mlp.triton import _precision, expert_slots
from blockdiff.kernels.fp8 import Fp8
from blockdiff.kernels.fp8.triton import parts_of
from blockdiff.kernels.fused import triton_kernels as kernels
from blockdiff.kernels.launch import DTYPES, check_dtypes, empty, launch, op
from blockdiff.kernels.norm_rope.triton import _row_scalars
from blockdiff.kernels.span_attention.paged import PagedTensor
from blockdiff.kernels.tiles import LEAST, Tile, decodes_fp8, elementwise, power_of_2, tile_of

FEW_ROWS = 1024  # for more, torch's product is faster than a product here saves launches
__all__ = ["attention_heads", "expert_slots", "gated_product", "layer_end", "residual_norms", "routed_tokens", "serves"]

ROUTER = Tile(16, LEAST, 128, 4, 3)  # few tokens a program: there are never many of them


def serves(x: Tensor) -> bool:
    """Whether a call on x can be fused: no gradient, a device and a dtype for Triton, and no autocast."""
    if torch.is_grad_enabled() or x.dtype not in DTYPES:
        return False
    is_here = x.is_cuda or triton.knobs.runtime.interpret
    return is_here and not is_on(x)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


# -- launchers -------------------------------------------------------------------------------------------------


@op("attention_heads")
def _attention_heads(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Queries [B, T, h, d], keys and values [B, T, K, d], dense."""
    outs = empty(q), empty(k), empty(v)
    yield outs
    _launch_heads((q, k, v), outs, None, q_weight, k_weight, cos, sin, eps)


@op("attention_heads_into", mutates=("k_pages", "v_pages"))
def _attention_heads_into(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
    k_pages: Tensor, v_pages: Tensor, places: Tensor,
) -> Iterator[Tensor]:  # fmt: skip
    """Queries alone; keys and values go into pools [pages, P, K, d], to `places` int64 [B * T], counted in tokens."""
    out = empty(q)
    yield out
    _launch_heads((q, k, v), (out, k_pages, v_pages), places, q_weight, k_weight, cos, sin, eps)


def _launch_heads(
    heads: tuple[Tensor, Tensor, Tensor], outs: tuple[Tensor, Tensor, Tensor], places: Tensor | None, q_weight: Tensor,
    k_weight: Tensor, cos: Tensor, sin: Tensor, eps: float,
) -> None:  # fmt: skip
    """Fill what queries, keys and values are written to."""
    (B, T, h, d), K = heads[0].shape, heads[1].shape[2]
    # a token's heads are neighbours in what a product gives, whole or sliced: rows and tokens are then one axis
    tensors = [x if x.stride(-1) == 1 and x.stride(0) == T * x.stride(1) else x.contiguous() for x in heads]
    strides, tile = tuple((x.stride(1), x.stride(2)) for x in tensors), elementwise(d // 2)
    arguments = tuple(tensors), strides, outs, places, q_weight, k_weight, cos.contiguous(), sin.contiguous()
    grid = tile.grid(B * T)[0], h + 2 * K
    launch(kernels.attention_heads, grid, *arguments, B * T, eps, QUERIES=h, KEYS=K, D=d, **tile.options)


@op("residual_norms")
def _residual_norms(
    x: Tensor, y: Tensor, weight: Tensor, w0: Tensor | None, w1: Tensor | None, w2: Tensor | None, count: int,
    eps: float,
) -> Iterator[list[Tensor]]:  # fmt: skip
    """The sum, and its norms under the first `count` weights."""
    outs = [empty(x) for _ in range(count + 1)]
    yield outs
    rows, tile, D = _flat(x), elementwise(x.shape[-1]), x.shape[-1]
    arguments = rows, _flat(y), weight, (w0, w1, w2)[:count], outs[0], tuple(outs[1:]), rows.shape[0], eps
    launch(kernels.residual_norms, tile.grid(rows.shape[0]), *arguments, D=D, **tile.options)


@op("layer_end")
def _layer_end(
    x: Tensor, dense: Tensor, slots: Tensor, index: Tensor | None, dense_weight: Tensor, slots_weight: Tensor,
    weight: Tensor, scalar: Tensor | None, E: int, eps: float,
) -> Iterator[Tensor]:  # fmt: skip
    """The end of a layer; slots: [N, k, D] with their experts `index` [N, k], or [N, D] without."""
    out = empty(x)
    yield out
    rows, tile, D = _flat(x), elementwise(x.shape[-1]), x.shape[-1]
    tensors = rows, _flat(dense), slots.contiguous(), index, dense_weight, slots_weight, weight
    arguments = *tensors, *_row_scalars(scalar, x), out, rows.shape[0], E, eps
    constants = dict(TOP_K=slots.shape[1] if slots.dim() == 3 else 1, D=D, **tile.options)
    launch(kernels.layer_end, tile.grid(rows.shape[0]), *arguments, **constants)


@op("routed_tokens")
def _routed_tokens(
    x: Tensor, scale: Tensor, root: float, weight: Tensor, expert_scale: Tensor, k: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Experts int64 [N, k] and their fp32 weights of tokens [N, D]."""
    (N, D), E = x.shape, weight.shape[0]
    index, of_expert = empty(x, N, k, dtype=torch.int64), empty(x, N, k, dtype=torch.float32)
    yield index, of_expert
    tile = Tile(ROUTER.rows, max(LEAST, power_of_2(E)), ROUTER.inner, ROUTER.warps, ROUTER.stages).fitted(inner=D)
    arguments = x.contiguous(), scale, root, weight.contiguous(), expert_scale, index, of_expert, N
    constants = dict(E=E, D=D, TOP_K=k, CHOICES=power_of_2(k), PRECISION=_precision(x), **tile.options)
    launch(kernels.routed_tokens, tile.grid(N)[:1], *arguments, **constants)


@op("gated_product")
def _gated_product(
    x: Tensor, gate: Tensor, up: Tensor, gate_scale: Tensor | None, up_scale: Tensor | None, activation: str
) -> Iterator[Tensor]:
    """f(x gate^T) * g(x up^T) [N, F] of tokens [N, D]."""
    (N, D), F = x.shape, gate.shape[0]
    out = empty(x, N, F)
    yield out
    tile = tile_of("expert_mlp_gate_up", x, N / 4).fitted(rows=N, columns=F, inner=D)
    arguments = x.contiguous(), gate.contiguous(), up.contiguous(), gate_scale, up_scale, out, N
    hardware = gate_scale is not None and decodes_fp8(x)
    constants = dict(D=D, F=F, ACTIVATION=activation, HARDWARE=hardware, PRECISION=_precision(x), **tile.options)
    launch(kernels.gated_product, tile.grid(N, F), *arguments, **constants)


# -- the public functions: meaning as in `Kernels` ---------------------------------------------------------------


def attention_heads(
    q_BThd: Tensor, k_BTKd: Tensor, v_BTKd: Tensor, q_weight: Tensor, k_weight: Tensor, cos_BTd: Tensor,
    sin_BTd: Tensor, eps: float, into: tuple[PagedTensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Queries and keys normed and turned, values normed; keys and values into their pages, where these are given."""
    inputs = q_BThd, k_BTKd, v_BTKd, q_weight, k_weight, cos_BTd, sin_BTd, eps
    if into is None:
        return _attention_heads(*inputs)
    k_pages, v_pages, places = into[0].pool_NPKd, into[1].pool_NPKd, into[0].pages.own_N
    return _attention_heads_into(*inputs, k_pages, v_pages, places), k_BTKd[:, :0], v_BTKd[:, :0]


def residual_norms(
    x: Tensor, y: Tensor, weight: Tensor, weights: Sequence[Tensor | None], eps: float
) -> tuple[Tensor, ...]:
    """`x + rms_norm(y)`, and its norms under up to three weights."""
    return tuple(_residual_norms(x, y, weight, *weights, *[None] * (3 - len(weights)), len(weights), eps))


def layer_end(
    x: Tensor, dense: Tensor, routed: Slots | Tensor, weights: tuple[Tensor, Tensor, Tensor], eps: float,
    scalar: Tensor | None,
) -> Tensor:  # fmt: skip
    """The branches' norms, their sum's norm, the residual and the layer scalar."""
    if isinstance(routed, Slots):
        return _layer_end(x, dense, routed.values_NkD, routed.index_Nk, *weights, scalar, routed.experts, eps)
    return _layer_end(x, dense, _flat(routed), None, *weights, scalar, 0, eps)


def routed_tokens(
    x_ND: Tensor, scale_D: Tensor, root: float, weight_ED: Tensor, expert_scale_E: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """The k best experts of every token and their weights."""
    check_dtypes("routed_tokens", x_ND, weight_ED)
    return _routed_tokens(x_ND, scale_D, root, weight_ED, expert_scale_E, k)


def gated_product(x_ND: Tensor, gate_FD: Tensor | Fp8, up_FD: Tensor | Fp8, activation: str) -> Tensor:
    """The gated half of a dense MLP, whose weights may be in fp8."""
    activation_of(activation)
    (gate, gate_scale), (up, up_scale) = parts_of(gate_FD), parts_of(up_FD)
    check_dtypes("gated_product", x_ND, *((gate, up) if gate_scale is None else ()))
    return _gated_product(x_ND, gate, up, gate_scale, up_scale, activation)
