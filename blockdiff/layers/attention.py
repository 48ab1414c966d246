"""Grouped-query attention with QK-norm, RoPE and scale 1; full layers take their values from the raw keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.span_attention.paged import PrefixTensor
from blockdiff.layers.norm import RMSNorm
from blockdiff.spans import Spans, Sweep

KV = tuple[Tensor, ...]
Past = tuple[PrefixTensor, ...]  # what stands for the kv of tokens before the call


class Attention(nn.Module):
    """One attention layer: pure, returns the keys and values of this call's tokens beside its output."""

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, has_value: bool, eps: float, kernels: Kernels
    ):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.eps, self.kernels = eps, kernels
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False) if has_value else None
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, eps, kernels)
        self.k_norm = RMSNorm(head_dim, eps, kernels)

    def forward(
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], spans: Spans | Sweep, past: Past | None
    ) -> tuple[Tensor, KV]:
        B, T, _ = x_BTD.shape
        cos, sin = rope
        q = self.q_proj(x_BTD).view(B, T, self.heads, self.head_dim)
        raw_k = self.k_proj(x_BTD).view(B, T, self.kv_heads, self.head_dim)
        raw_v = raw_k if self.v_proj is None else self.v_proj(x_BTD).view(B, T, self.kv_heads, self.head_dim)
        q = self.kernels.norm_rope(q, self.q_norm.weight, cos, sin, self.eps)
        k = self.kernels.norm_rope(raw_k, self.k_norm.weight, cos, sin, self.eps)
        (v,) = self.kernels.rms_norms(raw_v, (None,), self.eps)
        out = attend(self.kernels, q, k, v, spans, past, 1.0)
        return self.o_proj(out.reshape(B, T, self.heads * self.head_dim)), (k, v)


def attend(
    kernels: Kernels, q_BThd: Tensor, k: Tensor, v: Tensor, spans: Spans | Sweep, past: Past | None, scale: float
) -> Tensor:
    """What every query of a call gathers [B, T, h, d] over the tokens before the call and its own ones.

    k, v: [B, T, K, d] of this call. In a sweep the clean tokens see one another, and the canvases see them as a prefix.
    """
    if not isinstance(spans, Sweep):
        prefix_k, prefix_v = past if past is not None else (None, None)
        return kernels.span_attention(q_BThd, prefix_k, prefix_v, k, v, spans, scale)
    (clean_q, noisy_q), (clean_k, noisy_k), (clean_v, noisy_v) = (
        x.split([spans.clean_tokens, x.shape[1] - spans.clean_tokens], 1) for x in (q_BThd, k, v)
    )
    prefix_k, prefix_v = (
        (x.detach() if spans.stop_gradient else x)[:, : spans.columns] for x in (clean_k, clean_v)
    )
    clean = kernels.span_attention(clean_q, None, None, clean_k, clean_v, spans.clean, scale)
    noisy = kernels.span_attention(noisy_q, prefix_k, prefix_v, noisy_k, noisy_v, spans.noisy, scale)
    return torch.cat([clean, noisy], 1)
