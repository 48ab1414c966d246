"""Matrices in NVFP4: `Nvfp4`, and nvfp4_linear, the product with one."""

from blockdiff.kernels.nvfp4.matrix import Nvfp4

__all__ = ["Nvfp4"]
