"""Weights in fp8 (e4m3): the matrix `Fp8`, and the op fp8_linear, a product with one."""

from blockdiff.kernels.fp8.matrix import Fp8

__all__ = ["Fp8"]
