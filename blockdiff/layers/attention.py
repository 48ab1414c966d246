"""Grouped-query attention with RoPE; what families differ in are the norms, the scale and where values come from."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.span_attention.paged import PagedTensor, PrefixTensor, written
from blockdiff.layers.linear import product, weight_of
from blockdiff.layers.members import submodule
from blockdiff.layers.norm import RMSNorm, norm_form_of
from blockdiff.layers.rope import turned
from blockdiff.spans import Spans, Sweep

KV = tuple[Tensor, ...]
Past = tuple[PrefixTensor, ...]  # what stands for the kv of tokens before the call


class Attention(nn.Module):
    """One attention layer: returns the keys and values of this call's tokens beside its output.

    It is pure, but where `past` is pages with places for these tokens: it writes them there, and returns none.
    has_value: whether values have a projection of their own, else they are the raw keys; qk_norm: the norm of every
    query and key before RoPE (None: none); norms_values: whether values are normed, without weight; scale: of scores.
    """

    q_proj: nn.Linear = submodule()
    k_proj: nn.Linear = submodule()
    v_proj: nn.Linear | None = submodule()
    o_proj: nn.Linear = submodule()
    q_norm: RMSNorm | None = submodule()
    k_norm: RMSNorm | None = submodule()

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        has_value: bool,
        eps: float,
        kernels: Kernels,
        qk_norm: type[RMSNorm] | None = RMSNorm,
        norms_values: bool = True,
        scale: float = 1.0,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.eps, self.kernels, self.norms_values, self.scale = eps, kernels, norms_values, scale
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False) if has_value else None
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = None if qk_norm is None else qk_norm(head_dim, eps, kernels)
        self.k_norm = None if qk_norm is None else qk_norm(head_dim, eps, kernels)

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], spans: Spans | Sweep, past: Past | None
    ) -> tuple[Tensor, KV]:
        into = written(past)
        first = spans.clean_tokens if isinstance(spans, Sweep) and not spans.wants_clean else 0
        made = self._products(x_BTD, first)
        whole = self._attended(made, rope, spans, past) if into is None and past is not None else None
        if whole is not None:
            out, k, v = whole
        else:
            q, k, v = self._heads(made, rope, into)
            out = attend(self.kernels, q, k, v, spans, past, self.scale).flatten(2)
        return product(self.o_proj, out, self.kernels), (k, v) if into is None else ()

    def _attended(
        self, made: tuple[Tensor, ...], rope: tuple[Tensor, Tensor], spans: Spans | Sweep, past: Past
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """What every query gathers [B, T, h * d], and keys and values, without what stands between these launches."""
        q_norm, k_norm = self.q_norm, self.k_norm
        form = norm_form_of(q_norm)
        if form is None or type(q_norm) is not type(k_norm) or isinstance(spans, Sweep):
            return None
        weights = (None, None) if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight)
        forms = *rope, self.eps, form, self.norms_values
        return self.kernels.attended(made, self.head_dim, *weights, *forms, past=past, spans=spans, scale=self.scale)

    def heads_of(
        self,
        x_BTD: Tensor,
        rope: tuple[Tensor, Tensor],
        into: tuple[PagedTensor, ...] | None = None,
        first: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T - first, h, d], keys and values [B, T, K, d] of tokens, normed and turned.

        into: pages that keys and values are written into; then none are returned, [B, 0, K, d]; first: the first token
        whose queries are wanted.
        """
        return self._heads(self._products(x_BTD, first), rope, into)

    def _products(self, x_BTD: Tensor, first: int) -> tuple[Tensor, ...]:
        """What the projections give: queries, keys and, if they have one, values, [B, T, heads * d]."""
        v_proj = self.v_proj
        projections = (self.q_proj, self.k_proj) if v_proj is None else (self.q_proj, self.k_proj, v_proj)
        if first:
            return tuple(
                product(each, x_BTD[:, first:] if n == 0 else x_BTD, self.kernels) for n, each in enumerate(projections)
            )
        matrices = [matrix for each in projections if (matrix := weight_of(each)) is not None]
        if len(matrices) == len(projections):
            return self.kernels.products(x_BTD, matrices)
        return tuple(projection(x_BTD) for projection in projections)

    def _heads(
        self, made: tuple[Tensor, ...], rope: tuple[Tensor, Tensor], into: tuple[PagedTensor, ...] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`heads_of` the products."""
        q, raw_k = (x.view(*x.shape[:2], -1, self.head_dim) for x in made[:2])
        v = raw_k if len(made) == 2 else made[2].view(raw_k.shape)
        norms, norms_values = (self.q_norm, self.k_norm), self.norms_values
        q, k, values = heads(self.kernels, q, raw_k, v, norms, rope, self.eps, norms_values, into)
        assert values is not None
        return q, k, values


def heads(
    kernels: Kernels, q_BThd: Tensor, k: Tensor, v: Tensor | None, norms: tuple[RMSNorm | None, RMSNorm | None],
    rope: tuple[Tensor, Tensor], eps: float, norms_values: bool = False, into: tuple[PagedTensor, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Queries and keys after their norms and RoPE, values as they are or normed without weight; in one op where it is
    there.

    k, v: [B, T, K, d] (v None: there are none), of whose tokens the queries' are the last ones or all; into: pages for
    keys and values, which are written there; then none are returned, [B, 0, K, d].
    """
    form, first = norm_form_of(norms[0]), k.shape[1] - q_BThd.shape[1]
    if form is not None and form == norm_form_of(norms[1]) and not first:
        weights = [None if norm is None else norm.weight for norm in norms]
        made = kernels.attention_heads(q_BThd, k, v, *weights, *rope, eps, form, norms_values, into=into)
        if made is not None:
            return made
    if norms_values and v is not None:
        (v,) = kernels.rms_norms(v, (None,), eps)
    q = _normed_and_turned(q_BThd, norms[0], (rope[0][:, first:], rope[1][:, first:]) if first else rope)
    k = _normed_and_turned(k, norms[1], rope)
    if into is None:
        return q, k, v
    return q, into[0].write(k), None if v is None else into[1].write(v)


def _normed_and_turned(x_BThd: Tensor, norm: RMSNorm | None, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Heads after their norm and RoPE, in one op where that is there."""
    if norm is not None and norm_form_of(norm) == "plain":
        return norm.kernels.norm_rope(x_BThd, norm.weight, *rope, norm.eps)
    return turned(x_BThd if norm is None else norm(x_BThd), *rope)


def attend(
    kernels: Kernels, q_BThd: Tensor, k: Tensor, v: Tensor, spans: Spans | Sweep, past: Past | None, scale: float
) -> Tensor:
    """What every query of a call gathers [B, T, h, d] over the tokens before the call and its own ones.

    k, v: [B, T, K, d] of this call, without tokens where these were written into the pages of `past`. In a sweep the
    clean tokens see one another, and the canvases see them as a prefix; queries are those of the wanted tokens.
    """
    if not isinstance(spans, Sweep):
        prefix_k, prefix_v = past if past is not None else (None, None)
        spans = spans if written(past) is None else spans.in_one_run
        return kernels.span_attention(q_BThd, prefix_k, prefix_v, k, v, spans, scale)
    if kernels.sweep_attention is not None:
        out = kernels.sweep_attention(q_BThd, k, v, spans, scale)
        if out is not None:
            return out
    (clean_k, noisy_k), (clean_v, noisy_v) = (
        x.split([spans.clean_tokens, x.shape[1] - spans.clean_tokens], 1) for x in (k, v)
    )
    prefix_k, prefix_v = ((x.detach() if spans.stop_gradient else x)[:, : spans.columns] for x in (clean_k, clean_v))
    clean_q, noisy_q = q_BThd[:, : -noisy_k.shape[1]], q_BThd[:, -noisy_k.shape[1] :]
    noisy = kernels.span_attention(noisy_q, prefix_k, prefix_v, noisy_k, noisy_v, spans.noisy, scale)
    if not spans.wants_clean:
        return noisy
    clean = kernels.span_attention(clean_q, None, None, clean_k, clean_v, spans.clean, scale)
    return torch.cat([clean, noisy], 1)
