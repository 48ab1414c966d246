"""The oracle of fp8: the number of every code."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.kernels.fp8 import Fp8


def value(code: int) -> float:
    """The number of a byte of e4m3: a sign, four bits of exponent (bias 7), three of mantissa; no infinity."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, (code >> 3) & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return float("nan")
    return sign * (2.0**-9 * mantissa if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


def decoded(weight: Fp8, dtype: torch.dtype) -> Tensor:
    """The matrix, from a table of all codes."""
    table = torch.tensor([value(code) for code in range(256)], dtype=torch.float64, device=weight.codes.device)
    return (table[weight.codes.long()] * weight.scale.double()).to(dtype)
