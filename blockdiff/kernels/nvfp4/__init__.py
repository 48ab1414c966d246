"""Weights in NVFP4: the matrix `Nvfp4`, and the op nvfp4_linear, a product with one."""

from blockdiff.kernels.nvfp4.matrix import Nvfp4

__all__ = ["Nvfp4"]
