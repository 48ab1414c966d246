"""Matrices in fp8 (e4m3)."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from blockdiff.kernels.op import Ops

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max  # 448


class _Tensors(NamedTuple):
    codes: Tensor
    scale: Tensor


class Fp8(_Tensors):
    """A matrix [..., out, in], or one for each expert, whose numbers are those of `codes` times `scale`.

    codes: the bytes of float8_e4m3fn, uint8: casting a model leaves them as they are, and every device and process
    group can move them. scale: fp32 [..., out, 1], one for each output channel. It is a form in which a weight is
    stored, see `kernels.stored.StoredMatrix`.
    """

    __slots__ = ()
    SUFFIXES: ClassVar[tuple[str, ...]] = ("", "_scale")
    BITS: ClassVar[int] = 8
    BLOCK: ClassVar[int] = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return tuple(self.codes.shape)

    @classmethod
    def empty_like(cls, weight: Tensor) -> Fp8:
        """Room for a matrix of a weight's shape, on its device."""
        scale = weight.new_empty((*weight.shape[:-1], 1), dtype=torch.float32)
        return cls(weight.new_empty(weight.shape, dtype=torch.uint8), scale)

    @classmethod
    def nearest(cls, weight: Tensor) -> Fp8:
        """Return the nearest matrix in fp8 whose largest number of every output channel is 448 times the scale.

        weight: [..., out, in]; experts are rounded one after the other. A channel that is not finite gets a scale that
        is not.
        """
        if weight.dim() > 2:
            made = cls.empty_like(weight)
            for n, each in enumerate(weight):
                made.codes[n], made.scale[n] = cls.nearest(each)
            return made
        wide = weight.float()
        scale = wide.abs().amax(-1, keepdim=True) / LARGEST
        scale = torch.where(scale == 0, 1.0, scale)
        return cls((wide / scale).to(E4M3).view(torch.uint8), scale)

    def part(self, index: int | slice) -> Fp8:
        """The matrix of one expert, or some rows of a matrix."""
        return Fp8(self.codes[index], self.scale[index])

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The matrix in another dtype: codes times scale in fp32 at least, rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.codes.view(E4M3).to(wide) * self.scale).to(dtype)

    def product(self, ops: Ops, x: Tensor) -> Tensor:
        """`x W^T`, with a gradient for x."""
        return ops.fp8_linear(x, self)
