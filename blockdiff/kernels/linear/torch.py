"""Products with weights: torch's, and `fp8_linears` with those in fp8."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.fp8 import Fp8

if TYPE_CHECKING:
    from blockdiff.kernels import Kernels


def linear(ops: Kernels, x: Tensor, weight: Tensor | Fp8) -> Tensor:
    """`x weight^T`: x [..., in], weight [out, in]."""
    return ops.fp8_linears(x, (weight,))[0] if isinstance(weight, Fp8) else F.linear(x, weight)


def linears(ops: Kernels, x: Tensor, weights: Sequence[Tensor | Fp8]) -> tuple[Tensor, ...]:
    """`linear` with every weight; what rounds its input to fp8 rounds it once for all, where all are in fp8."""
    in_fp8 = [weight for weight in weights if isinstance(weight, Fp8)]
    if len(in_fp8) == len(weights):
        return ops.fp8_linears(x, in_fp8)
    return tuple([linear(ops, x, weight) for weight in weights])
