"""fp8_linear in plain torch."""

from __future__ import annotations

from torch import Tensor

from blockdiff.kernels.fp8.matrix import Fp8
from blockdiff.kernels.stored import decoded_linear


def fp8_linear(x: Tensor, weight: Fp8) -> Tensor:
    """`x weight^T` in x's dtype: x [..., in], weight [out, in]; a gradient for x alone."""
    return decoded_linear(x, weight)
