"""nvfp4_linear in plain torch."""

from __future__ import annotations

from torch import Tensor

from blockdiff.kernels.nvfp4.matrix import Nvfp4
from blockdiff.kernels.stored import decoded_linear


def nvfp4_linear(x: Tensor, weight: Nvfp4) -> Tensor:
    """Compute `x weight^T` of x [..., in] in x's dtype; weight [out, in]. A gradient flows to x alone."""
    return decoded_linear(x, weight)
