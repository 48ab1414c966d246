"""The oracle of NVFP4: the number of every code and of every block scale."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.kernels.nvfp4 import Nvfp4
from tests.oracles import fp8

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def value(code: int) -> float:
    """The number of a half byte of e2m1."""
    return -MAGNITUDES[code - 8] if code > 7 else MAGNITUDES[code]


def decoded(weight: Nvfp4, dtype: torch.dtype) -> Tensor:
    """The matrix, from tables of all codes."""
    numbers = torch.tensor([value(code) for code in range(16)], dtype=torch.float64)
    scales = torch.tensor([fp8.value(code) for code in range(256)], dtype=torch.float64)
    pairs = torch.stack([weight.codes & 15, weight.codes >> 4], -1).flatten(-2)
    blocks = numbers[pairs.long()].unflatten(-1, (-1, 16)) * scales[weight.block_scale.long()][..., None]
    return (blocks.flatten(-2) * weight.scale.double()).to(dtype)
