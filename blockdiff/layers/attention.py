"""Grouped-query attention with RoPE. Families differ in its norms, its scale and the source of values."""

from __future__ import annotations

from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.heads import HeadNorms
from blockdiff.kernels.span_attention.paged import PrefixTensor, written
from blockdiff.layers.linear import Linear, outputs
from blockdiff.layers.norm import RMSNorm
from blockdiff.spans import Spans, Sweep

KV = tuple[Tensor, ...]
Rope = tuple[Tensor, ...]  # cos and sin, and the scale of queries if they have one
Past = tuple[PrefixTensor, ...]  # the kv of tokens before the call, as tensors or in pages


class Attention(nn.Module):
    """One attention layer, which returns its output and the keys and values of this call's tokens.

    If `past` is pages that assign a slot to each of these tokens, keys and values are written there instead, and the
    returned tuple is empty.

    has_value: whether values have their own projection; else they are the unnormed keys. qk_norm: the norm of each
    query and key head before RoPE (None: none). norms_values: whether values are normed, without weight. scale: factor
    of the scores. is_fused: one projection `qkv_proj` with one adapter, whose rows are queries, keys and values in that
    order, in place of three.
    """

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
        is_fused: bool = False,
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.eps, self.kernels, self.norms_values, self.scale = eps, kernels, norms_values, scale
        self.qkv_proj = Linear(hidden, (heads + 2 * kv_heads) * head_dim, bias=False) if is_fused else None
        if not is_fused:
            self.q_proj = Linear(hidden, heads * head_dim, bias=False)
            self.k_proj = Linear(hidden, kv_heads * head_dim, bias=False)
            self.v_proj = Linear(hidden, kv_heads * head_dim, bias=False) if has_value else None
        self.o_proj = Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = None if qk_norm is None else qk_norm(head_dim, eps, kernels)
        self.k_norm = None if qk_norm is None else qk_norm(head_dim, eps, kernels)

    def forward(
        self, x_BTD: Tensor, rope: Rope, spans: Spans | Sweep, past: Past | None, is_noisy: bool | Tensor = False
    ) -> tuple[Tensor, KV]:
        projected = self.projected(x_BTD, is_noisy, spans.first_query)
        q, k, v = (x.view(*x.shape[:2], x.shape[2] // self.head_dim, self.head_dim) for x in projected)
        norms, into = HeadNorms(self.head_dim, self.q_norm, self.k_norm, self.norms_values, self.eps), written(past)
        cos, sin, *query_scale = rope
        q, own_k, own_v = self.kernels.attention_heads(q, k, v, norms, (cos, sin), into)
        assert own_v is not None, "attention_heads returns values if it gets some"
        for scale_BT1 in query_scale:
            q = q * scale_BT1[:, -q.shape[1] :, :, None]
        if into is not None and isinstance(spans, Spans):
            spans = spans.in_one_run
        prefix_k, prefix_v = (None, None) if past is None else past
        out = self.kernels.span_attention(q, prefix_k, prefix_v, own_k, own_v, spans, self.scale)
        out = self.o_proj(out.flatten(2), of_last(is_noisy, out.shape[1]))
        return out, (own_k, own_v) if into is None else ()

    def keys(self, x_BTD: Tensor, rope: Rope, past: Past | None) -> KV:
        """Compute the keys and values of tokens without queries; return or write them as `forward` does."""
        assert self.v_proj is not None
        k, v = (each(x_BTD).view(*x_BTD.shape[:2], -1, self.head_dim) for each in (self.k_proj, self.v_proj))
        norms, into = HeadNorms(self.head_dim, self.k_norm, self.k_norm, self.norms_values, self.eps), written(past)
        # the op needs queries: keys are passed for them and the result is dropped
        _, own_k, own_v = self.kernels.attention_heads(k, k, v, norms, rope[:2], into)
        assert own_v is not None
        return (own_k, own_v) if into is None else ()

    def projected(self, x_BTD: Tensor, is_noisy: bool | Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries [B, T - first, h * d], from token `first` on, and keys and values [B, T, K * d]."""
        if self.qkv_proj is not None:
            widths = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
            q, k, v = self.qkv_proj(self.qkv_proj.entering(x_BTD), is_noisy).split(widths, -1)
            return q[:, first:], k, v
        q_proj, v_proj = self.q_proj, self.v_proj
        x_BTD = q_proj.entering(x_BTD)
        kv_proj = (self.k_proj,) if v_proj is None else (self.k_proj, v_proj)
        if first:
            asking_BTD = x_BTD[:, first:]
            q = q_proj(asking_BTD, of_last(is_noisy, asking_BTD.shape[1]))
            k, *v = outputs(kv_proj, x_BTD, is_noisy)
        else:
            q, k, *v = outputs((q_proj, *kv_proj), x_BTD, is_noisy)
        return q, k, v[0] if v else k


def of_last(is_noisy: bool | Tensor, tokens: int) -> bool | Tensor:
    """Return the `is_noisy` argument for the last `tokens` tokens of a call."""
    return is_noisy[:, -tokens:] if isinstance(is_noisy, Tensor) else is_noisy
