"""Grouped-query attention with QK-norm, RoPE and scale 1; full layers take their values from the raw keys."""

from __future__ import annotations

from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.span_attention.paged import PrefixTensor
from blockdiff.layers.norm import RMSNorm
from blockdiff.spans import Spans

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
        self, x_BTD: Tensor, rope: tuple[Tensor, Tensor], spans: Spans, past: Past | None
    ) -> tuple[Tensor, KV]:
        B, T, _ = x_BTD.shape
        cos, sin = rope
        q = self.q_proj(x_BTD).view(B, T, self.heads, self.head_dim)
        raw_k = self.k_proj(x_BTD).view(B, T, self.kv_heads, self.head_dim)
        raw_v = raw_k if self.v_proj is None else self.v_proj(x_BTD).view(B, T, self.kv_heads, self.head_dim)
        q = self.kernels.norm_rope(q, self.q_norm.weight, cos, sin, self.eps)
        k = self.kernels.norm_rope(raw_k, self.k_norm.weight, cos, sin, self.eps)
        (v,) = self.kernels.rms_norms(raw_v, (None,), self.eps)
        prefix_k, prefix_v = past if past is not None else (None, None)
        out = self.kernels.span_attention(q, prefix_k, prefix_v, k, v, spans, 1.0)
        assert isinstance(out, Tensor)
        return self.o_proj(out.reshape(B, T, self.heads * self.head_dim)), (k, v)
