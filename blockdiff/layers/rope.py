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


def angles(positions_BT: Tensor, frequencies_f: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, d] for `norm_rope`: angles, cos and sin in fp32, then cast to the model's dtype.

    Both halves of cos are the same; the first half of sin is negated.
    """
    angle = positions_BT[..., None].float() * frequencies_f
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
