"""Canvases as strategies see them, made of given logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary.torch import token_stats
from blockdiff.sampling.strategy import Canvases


def canvases_of(logits_BLV: Tensor, temperature: float = 1.0, **given: Any) -> Canvases:
    """The canvases that a strategy sees in a first step with these logits; arguments given replace parts of them.

    uniform_BL picks the samples and second_BL is what `uniform_BL` of the canvases gives.
    """
    B, L, V = logits_BLV.shape
    generator = torch.Generator().manual_seed(0)
    uniform_BL = given.pop("uniform_BL", torch.rand(B, L, generator=generator))
    second_BL = given.pop("second_BL", torch.rand(B, L, generator=generator))
    stats = token_stats(logits_BLV.reshape(-1, V), torch.eye(V), None, temperature, uniform_BL.reshape(-1))
    values = {
        "ids": list(range(B)),
        "step_B": torch.zeros(B, dtype=torch.int64),
        "steps_B": torch.full((B,), 48),
        "temperature_B": torch.full((B,), temperature),
        "tokens_BL": torch.zeros(B, L, dtype=torch.int64),
        "stats": type(stats)(*(column.view(B, L, *column.shape[1:]) for column in stats)),
        "previous_BL": torch.full((B, L), -1),
        "unchanged_B": torch.zeros(B, dtype=torch.int64),
        "kept_BL": torch.zeros(B, L, dtype=torch.bool),
        "is_pinned_BL": torch.zeros(B, L, dtype=torch.bool),
        "is_masked_BL": torch.zeros(B, L, dtype=torch.bool),
        "whole_B": torch.zeros(B, dtype=torch.int64),
        "end_ids": (),
        "noise_probability": 1 / V,
        "draw": lambda: second_BL,
    }
    return Canvases(**(values | given))
