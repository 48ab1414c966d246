"""fp8_linear in plain torch."""

from __future__ import annotations

from torch import Tensor

from blockdiff.kernels.fp8.matrix import Fp8
from blockdiff.kernels.stored import decoded_linear


def fp8_linear(x: Tensor, weight: Fp8) -> Tensor:
    """Compute `x weight^T` of x [..., in] in x's dtype; weight [out, in]. A gradient flows to x alone."""
    return decoded_linear(x, weight)
