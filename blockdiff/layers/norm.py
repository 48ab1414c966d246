"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels


class RMSNorm(nn.Module):
    """RMSNorm over the last axis in fp32; the weight multiplies directly (no +1)."""

    def __init__(self, dim: int, eps: float, kernels: Kernels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps, self.kernels = eps, kernels

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norms(x, (self.weight,), self.eps)[0]

    def added_to(self, x: Tensor, branch: Tensor, scalar: Tensor | None = None) -> Tensor:
        """The end of a residual branch in one op: `(x + norm(branch)) * scalar`."""
        return self.kernels.add_rms_norm(x, branch, self.weight, self.eps, scalar)
