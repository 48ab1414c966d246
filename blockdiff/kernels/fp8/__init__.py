"""Matrices in fp8 (e4m3): `Fp8`, and fp8_linears, products with them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Fp8(NamedTuple):
    """A matrix [..., out, in], or one for each expert, whose numbers are those of `codes` times `scale`.

    codes: the bytes of float8_e4m3fn, uint8: casting a model leaves them as they are, and every device and process
    group can move them. scale: fp32 [..., out, 1], one for each output channel.
    """

    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return tuple(self.codes.shape)
