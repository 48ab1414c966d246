"""The oracle of span_attention: plain torch, one dense mask, scores in the widest type given."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.spans import Spans


def span_attention(
    q_BThd: Tensor, prefix_k: Tensor, prefix_v: Tensor, own_k: Tensor, own_v: Tensor, spans: Spans, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B,T,h,d] and log-sum-exp [B,T,h] of every query over its two spans; empty rows give 0 and -inf."""
    group = q_BThd.shape[2] // own_k.shape[2]
    k = torch.cat([prefix_k, own_k], 1).repeat_interleave(group, 2)
    v = torch.cat([prefix_v, own_v], 1).repeat_interleave(group, 2)
    is_seen = spans.dense(prefix_k.shape[1], own_k.shape[1])[:, :, None]
    scores = torch.einsum("bthd,bshd->bths", q_BThd, k) * scale
    scores = scores.masked_fill(~is_seen, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.where(is_seen, (scores - lse[..., None].clamp(min=-1e30)).exp(), 0.0)
    return torch.einsum("bths,bshd->bthd", weights, v), lse
