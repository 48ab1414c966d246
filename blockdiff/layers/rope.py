"""Rotary position embedding: frequencies, and their angles at given positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def default_frequencies(head_dim: int, theta: float) -> Tensor:
    """`theta^(-2i/d)` for i < d/2, fp32 [d/2]."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)


def proportional_frequencies(head_dim: int, theta: float, partial: float) -> Tensor:
    """The first `int(partial * d // 2)` frequencies of the full head (d in the exponent), then zeros; fp32 [d/2]."""
    rotated = int(partial * head_dim // 2)
    frequencies = default_frequencies(head_dim, theta)
    frequencies[rotated:] = 0.0
    return frequencies


def llama3_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """The default frequencies, of which the slow ones are divided by `factor`; fp32 [d/2].

    scaling: factor, low_freq_factor, high_freq_factor and original_max_position_embeddings of `rope_parameters`. A
    frequency that turns at least high_freq_factor times over the original positions stays, one that turns less than
    low_freq_factor times is divided, and those between go over from one to the other in proportion to their turns.
    Source: transformers, `ROPE_INIT_FUNCTIONS["llama3"]`.
    """
    frequencies, factor = default_frequencies(head_dim, theta), scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / frequencies)
    kept = (turns - low) / (high - low)
    between = (1 - kept) * frequencies / factor + kept * frequencies
    return torch.where(turns < low, frequencies / factor, torch.where(turns > high, frequencies, between))


def yarn_frequencies(head_dim: int, theta: float, scaling: Mapping[str, Any]) -> Tensor:
    """The default frequencies, of which the slow ones are divided by `factor`; fp32 [d/2].

    scaling: factor (below 1 it makes them faster) and original_max_position_embeddings of `rope_parameters`, perhaps
    with beta_fast, beta_slow and truncate. A frequency that turns at least beta_fast times over the original positions
    stays, one that turns at most beta_slow times is divided, and those between go over by their index, on a ramp whose
    ends are whole numbers unless `truncate` is false. Source: YaRN (arXiv 2309.00071), and transformers,
    `ROPE_INIT_FUNCTIONS["yarn"]`.
    """
    waves = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    turns = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
    positions = scaling["original_max_position_embeddings"]
    low, high = (head_dim * math.log(positions / (n * 2 * math.pi)) / (2 * math.log(theta)) for n in turns)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high += 0.001 if low == high else 0
    stays = 1 - ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling["factor"] * waves) * (1 - stays) + 1.0 / waves * stays


def yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """The number that YaRN multiplies cos and sin by."""

    def growth(mscale: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * mscale * math.log(scaling["factor"]) + 1.0

    if (said := scaling.get("attention_factor")) is not None:
        return float(said)
    own, of_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return growth(own) / growth(of_all) if own and of_all else growth(1.0)


def query_scale(positions_BT: Tensor, beta: float, original: int, dtype: torch.dtype) -> Tensor:
    """The factors [B, T, 1] of queries at far positions, `1 + beta log(1 + floor(position / original))`.

    It is 1 before position `original`. Made in fp32 at least, then cast to a dtype. Source: transformers, `ministral3`.
    """
    positions_BT = positions_BT.to(torch.promote_types(dtype, torch.float32))
    return (1 + beta * torch.log(1 + torch.floor(positions_BT / original)))[..., None].to(dtype)


def angles(positions_BT: Tensor, frequencies_f: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, d] for `norm_rope`: angles, cos and sin in fp32, then cast to the model's dtype.

    Both halves of cos are the same; the first half of sin is negated.
    """
    angle = positions_BT[..., None].float() * frequencies_f
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
