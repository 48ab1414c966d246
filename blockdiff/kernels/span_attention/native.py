"""span_attention in plain torch: a batched product for small calls, SDPA with the dense mask for large ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.spans import Spans

SMALL_SCORES = 1 << 22  # elements of [B, h, T, keys] up to which materialised scores beat SDPA on a CPU


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
    B, T, h, d = q_BThd.shape
    prefix_tokens = 0
    k, v = own_k, own_v
    if prefix_k is not None and prefix_v is not None and prefix_k.shape[1]:
        prefix_tokens = prefix_k.shape[1]
        k, v = torch.cat([prefix_k, own_k], 1), torch.cat([prefix_v, own_v], 1)
    is_seen = None if spans.sees_all else spans.dense(prefix_tokens, own_k.shape[1])
    is_small = not q_BThd.is_cuda and B * h * T * k.shape[1] <= SMALL_SCORES
    if return_lse or is_small:
        return _materialised(q_BThd, k, v, is_seen, scale, return_lse)
    out = F.scaled_dot_product_attention(
        q_BThd.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if is_seen is None else is_seen[:, None],
        scale=scale,
        enable_gqa=h != k.shape[2],
    ).transpose(1, 2)
    if is_seen is None:
        return out
    return out.masked_fill(~is_seen.any(-1)[:, :, None, None], 0.0)


def _materialised(
    q_BThd: Tensor, k: Tensor, v: Tensor, is_seen: Tensor | None, scale: float, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Scores as one [B*K, g*T, keys] batched product: queries of a group share their key head without repeats."""
    B, T, h, d = q_BThd.shape
    keys, K = k.shape[1], k.shape[2]
    g = h // K
    q_rows = q_BThd.view(B, T, K, g, d).permute(0, 2, 3, 1, 4).reshape(B * K, g * T, d)
    k_rows = k.permute(0, 2, 3, 1).reshape(B * K, d, keys)
    v_rows = v.transpose(1, 2).reshape(B * K, keys, d)
    scores = torch.bmm(q_rows, k_rows).view(B, K, g, T, keys)
    if scale != 1.0:
        scores = scores * scale
    wide = torch.promote_types(scores.dtype, torch.float32)
    if is_seen is not None:
        scores = scores.masked_fill(~is_seen[:, None, None], -1e30 if scores.dtype != torch.float16 else -6e4)
    weights = scores.softmax(-1, dtype=wide)
    out = torch.bmm(weights.to(v.dtype).view(B * K, g * T, keys), v_rows)
    out = out.view(B, K, g, T, d).permute(0, 3, 1, 2, 4).reshape(B, T, h, d)
    is_empty = None if is_seen is None else ~is_seen.any(-1)
    if is_empty is not None:
        out = out.masked_fill(is_empty[:, :, None, None], 0.0)
    if not return_lse:
        return out
    lse = scores.to(wide).logsumexp(-1).permute(0, 3, 1, 2).reshape(B, T, h)
    if is_empty is not None:
        lse = lse.masked_fill(is_empty[:, :, None], float("-inf"))
    return out, lse
