"""Matrices in fp8 (e4m3): `Fp8`, and fp8_linear, the product with one."""

from blockdiff.kernels.fp8.matrix import Fp8

__all__ = ["Fp8"]
