"""`Fp8`: a matrix of e4m3 numbers with a scale for each output channel."""

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
    """A stored matrix [..., out, in] (`kernels.stored.StoredMatrix`): e4m3 numbers times the scale of their channel.

    codes: bytes of float8_e4m3fn as uint8, a dtype that casting a model does not change and that every device and
    process group can copy. scale: fp32 [..., out, 1], one for each output channel.
    """

    __slots__ = ()
    SUFFIXES: ClassVar[tuple[str, ...]] = ("", "_scale")
    BITS: ClassVar[int] = 8
    BLOCK: ClassVar[int] = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded matrix."""
        return tuple(self.codes.shape)

    @classmethod
    def empty_like(cls, weight: Tensor) -> Fp8:
        """Allocate a matrix of a weight's shape on its device, unfilled."""
        scale = weight.new_empty((*weight.shape[:-1], 1), dtype=torch.float32)
        return cls(weight.new_empty(weight.shape, dtype=torch.uint8), scale)

    @classmethod
    def nearest(cls, weight: Tensor) -> Fp8:
        """Round a weight [..., out, in] to fp8, one expert at a time.

        The scale of an output channel maps its largest magnitude to 448, the largest e4m3 number. If the channel is not
        finite, its scale is not either.
        """
        if weight.dim() > 2:
            matrix = cls.empty_like(weight)
            for n, each in enumerate(weight):
                matrix.codes[n], matrix.scale[n] = cls.nearest(each)
            return matrix
        wide = weight.float()
        scale = wide.abs().amax(-1, keepdim=True) / LARGEST
        scale = torch.where(scale == 0, 1.0, scale)
        return cls((wide / scale).to(E4M3).view(torch.uint8), scale)

    def part(self, index: int | slice) -> Fp8:
        """Index the first axis: the matrix of one expert, or some rows of a matrix."""
        return Fp8(self.codes[index], self.scale[index])

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Decode to a dtype: codes times scale in at least fp32, rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        return (self.codes.view(E4M3).to(wide) * self.scale).to(dtype)

    def product(self, ops: Ops, x: Tensor) -> Tensor:
        """Compute `x W^T`, with a gradient for x alone."""
        return ops.fp8_linear(x, self)
