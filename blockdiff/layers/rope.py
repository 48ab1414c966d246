"""Rotary position embedding: the frequencies of its variants, and their cos and sin at positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def default_frequencies(head_dim: int, theta: float) -> Tensor:
    """Return `theta^(-2i/d)` for i < d/2, fp32 [d/2]."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)


def proportional_frequencies(head_dim: int, theta: float, partial: float) -> Tensor:
    """Return the first `int(partial * d // 2)` default frequencies of the full head, then zeros; fp32 [d/2]."""
    rotated = int(partial * head_dim // 2)
    frequencies = default_frequencies(head_dim, theta)
    frequencies[rotated:] = 0.0
    return frequencies


def llama3_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Return the default frequencies with the slow ones divided by `factor`; fp32 [d/2].

    scaling: factor, low_freq_factor, high_freq_factor and original_max_position_embeddings of `rope_parameters`. A
    frequency that turns at least high_freq_factor times over the original positions is unchanged, one that turns less
    than low_freq_factor times is divided, and in between the two are interpolated linearly in the number of turns.
    Source: transformers, `ROPE_INIT_FUNCTIONS["llama3"]`.
    """
    frequencies, factor = default_frequencies(head_dim, theta), scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    ramp = (turns - low) / (high - low)
    between = (1 - ramp) * frequencies / factor + ramp * frequencies
    return torch.where(turns < low, frequencies / factor, torch.where(turns > high, frequencies, between))


def yarn_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """Return the default frequencies with the slow ones divided by `factor`; fp32 [d/2].

    scaling: factor (below 1 it makes them faster) and original_max_position_embeddings of `rope_parameters`, optionally
    beta_fast (default 32), beta_slow (1) and truncate (true). A frequency that turns at least beta_fast times over the
    original positions is unchanged, one that turns at most beta_slow times is divided, and in between the two are
    interpolated linearly in the index. `truncate` rounds the ends of that ramp to whole indices. Source: YaRN (arXiv
    2309.00071), and transformers, `ROPE_INIT_FUNCTIONS["yarn"]`.
    """
    waves = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    turns = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
    positions = scaling["original_max_position_embeddings"]
    low, high = (head_dim * math.log(positions / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in turns)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    ramp = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling["factor"] * waves) * (1 - ramp) + 1.0 / waves * ramp


def yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """Return YaRN's factor of cos and sin. scaling: the model's `rope_parameters`."""

    def growth(mscale: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * mscale * math.log(scaling["factor"]) + 1.0

    if (factor := scaling.get("attention_factor")) is not None:
        return float(factor)
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return growth(mscale) / growth(mscale_all_dim) if mscale and mscale_all_dim else growth(1.0)


def query_scale(positions_BT: Tensor, beta: float, original: int, dtype: torch.dtype) -> Tensor:
    """Return the factor of each query, `1 + beta log(1 + floor(position / original))`, [B, T, 1].

    It is 1 before position `original`. Computed in at least fp32, then cast. Source: transformers, `ministral3`.
    """
    positions_BT = positions_BT.to(torch.promote_types(dtype, torch.float32))
    return (1 + beta * torch.log(1 + torch.floor(positions_BT / original)))[..., None].to(dtype)


def angles(positions_BT: Tensor, frequencies_f: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin [B, T, d] for `norm_rope`, computed in fp32, then cast.

    Both halves of cos are equal; the first half of sin is negated.
    """
    angle = positions_BT[..., None].float() * frequencies_f
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
