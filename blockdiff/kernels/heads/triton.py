"""attention_heads in Triton, as registered ops without gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from blockdiff.kernels.heads import HeadNorms, kernels
from blockdiff.kernels.launch import (
    Launch,
    Unserved,
    cached_by_sizes,
    check_without_gradient,
    empty,
    registered,
)
from blockdiff.kernels.span_attention.paged import PagedTensor
from blockdiff.kernels.tiles import elementwise, power_of_2

FORMS = ("direct", "cast", "centred")  # of norms that the kernel implements

# -- launchers -------------------------------------------------------------------------------------------------


@registered("attention_heads")
def _attention_heads(
    q: Tensor, k: Tensor, v: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float, norm: str, norms_values: bool,
) -> Iterator[list[Tensor]]:  # fmt: skip
    """Return queries [B, T, h, d], keys and values [B, T, K, d], contiguous; norm: its form or "none"."""
    heads = [x for x in (q, k, v) if x is not None]
    outs = [empty(x) for x in heads]
    yield outs
    _launch_heads(heads, outs, None, q_weight, k_weight, cos, sin, eps, norm, norms_values)


@registered("attention_heads_into", mutates=("k_pages", "v_pages"))
def _attention_heads_into(
    q: Tensor, k: Tensor, v: Tensor | None, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    eps: float, norm: str, norms_values: bool, k_pages: Tensor, v_pages: Tensor | None, places: Tensor,
) -> Iterator[Tensor]:  # fmt: skip
    """Return the queries; write keys and values to pools [pages, P, K, d], at token slots `places`, int64 [B * T]."""
    heads, pages = ([x for x in both if x is not None] for both in ((q, k, v), (k_pages, v_pages)))
    out = empty(q)
    yield out
    _launch_heads(heads, [out, *pages], places, q_weight, k_weight, cos, sin, eps, norm, norms_values)


def _launch_heads(
    heads: Sequence[Tensor], outs: Sequence[Tensor], places: Tensor | None, q_weight: Tensor | None,
    k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, norm: str, norms_values: bool,
) -> None:  # fmt: skip
    """Launch the kernel that fills `outs`; the heads of a token may share one axis."""
    (B, T, h, d), K, turned = outs[0].shape, outs[1].shape[2], cos.shape[-1]
    # a projection's output, whole or sliced, has a token's heads side by side: rows and tokens can be one axis
    tensors, strides = zip(*[_of_tokens(x, d) for x in heads], strict=True)
    arguments = tensors, strides, tuple(outs), places, q_weight, k_weight, cos.contiguous(), sin.contiguous()
    _attention_heads_of(B * T, h, K * (len(heads) - 1), K, d, turned, norm, norms_values)(*arguments, B * T, eps)


@cached_by_sizes
def _attention_heads_of(
    N: int, h: int, others: int, K: int, d: int, turned: int, norm: str, norms_values: bool
) -> Launch:
    rest = power_of_2(d - turned) if d > turned else 0
    tile = replace(elementwise(max(turned // 2, rest)), columns=power_of_2(turned // 2))
    constants = dict(QUERIES=h, KEYS=K, D=d, TURNED=turned, NORM=norm, NORMS_VALUES=norms_values, REST=rest)
    return Launch(kernels.attention_heads, (tile.grid(N)[0], h + others), **constants, **tile.options)


def _of_tokens(x: Tensor, d: int) -> tuple[Tensor, tuple[int, int]]:
    """Merge rows and tokens of [B, T, heads, d] or [B, T, heads * d] to one axis, copying if necessary.

    Also returns the strides over tokens and over heads.
    """
    of_row, of_token, *of_heads, of_number = x.stride()
    if of_number == 1 and of_row == x.shape[1] * of_token:
        return x, (of_token, of_heads[0] if of_heads else d)
    return x.contiguous(), (math.prod(x.shape[2:]), d)


# -- the public functions: signature and meaning as in torch.py ------------------------------------------------


def _weights_and_form(norms: HeadNorms) -> tuple[Tensor | None, Tensor | None, str]:
    """Return the weights of the norms of queries and keys, and the form of both ("none": no norms)."""
    of_q, of_k = norms.q_norm, norms.k_norm
    if of_q is None and of_k is None:
        return None, None, "none"
    if of_q is None or of_k is None or of_q.form != of_k.form or of_q.form not in FORMS:
        raise Unserved(f"attention_heads in Triton takes norms of queries and keys of one form of {', '.join(FORMS)}")
    return of_q.gain, of_k.gain, of_q.form


def attention_heads(
    q_BThd: Tensor, k: Tensor, v: Tensor | None, norms: HeadNorms, rope: tuple[Tensor, ...],
    into: tuple[PagedTensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return queries and keys after their norms and RoPE, and values, normed or unchanged; arguments as in torch.py.

    Unserved if a gradient is needed, for custom norms and for fewer queries than keys.
    """
    check_without_gradient("attention_heads", q_BThd)
    if q_BThd.shape[1] != k.shape[1]:
        raise Unserved("attention_heads in Triton takes queries of all tokens")
    q_weight, k_weight, form = _weights_and_form(norms)
    inputs = q_BThd, k, v, q_weight, k_weight, *rope, norms.eps, form, norms.norms_values
    if into is None:
        q, k, *of_values = _attention_heads(*inputs)
        return q, k, of_values[0] if of_values else None
    k_pages, v_pages = into[0].pool_NPKd, None if v is None else into[1].pool_NPKd
    q = _attention_heads_into(*inputs, k_pages, v_pages, into[0].pages.own_N)
    return q, k[:, :0], None if v is None else v[:, :0]
