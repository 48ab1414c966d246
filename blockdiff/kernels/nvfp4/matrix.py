"""`Nvfp4`: a matrix of e2m1 numbers with an e4m3 scale per 16 numbers along the input and a scale of the tensor."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.fp8.matrix import E4M3, LARGEST
from blockdiff.kernels.op import Ops

BLOCK = 16  # numbers along the input that share a scale
LARGEST_CODE = 6.0
LARGEST_SCALE = 126  # the byte of 448; 127 is NaN
# A block whose largest number is amax gets a scale between amax / 7.2 and amax / 3.6, which is at most nine bytes.
LEAST_SCALE, TRIED = 7.2, 9


class _Tensors(NamedTuple):
    codes: Tensor
    block_scale: Tensor
    scale: Tensor


class Nvfp4(_Tensors):
    """A stored matrix [..., out, in] (`kernels.stored.StoredMatrix`): e2m1 numbers times block scale times `scale`.

    codes: uint8 [..., out, in / 2]. A byte has two numbers, the first in its low half; bit 3 of a half is the sign, and
    the codes 0 to 7 mean 0, 0.5, 1, 1.5, 2, 3, 4, 6. block_scale: bytes of e4m3, uint8 [..., out, in / 16], 0 to 126.
    scale: fp32 [..., out, 1], the tensor's scale repeated for each output channel, so that the gate and up projections
    in one matrix may differ and kernels can use it like fp8's. Numbers times block scales are exact in bf16 and fp16.
    """

    __slots__ = ()
    SUFFIXES: ClassVar[tuple[str, ...]] = ("", "_scale", "_scale_2")
    BITS: ClassVar[int] = 4
    BLOCK: ClassVar[int] = BLOCK

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded matrix."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])

    @classmethod
    def empty_like(cls, weight: Tensor) -> Nvfp4:
        """Allocate a matrix of a weight's shape on its device, unfilled."""
        *rows, columns = weight.shape
        assert columns % BLOCK == 0
        codes = weight.new_empty((*rows, columns // 2), dtype=torch.uint8)
        block_scale = weight.new_empty((*rows, columns // BLOCK), dtype=torch.uint8)
        return cls(codes, block_scale, weight.new_empty((*rows, 1), dtype=torch.float32))

    @classmethod
    def nearest(cls, weight: Tensor) -> Nvfp4:
        """Round a weight [..., out, in] to NVFP4 with the block scales of least squared error, one expert at a time.

        The scale of a matrix is a power of two, so that the result is exact in bf16. If the matrix is not finite, its
        scale is not either.
        """
        if weight.dim() > 2:
            matrix = cls.empty_like(weight)
            for n, each in enumerate(weight):
                for tensor, values in zip(matrix, cls.nearest(each), strict=True):
                    tensor[n] = values
            return matrix
        wide = weight.float()
        amax = wide.abs().max() if wide.numel() else wide.new_zeros(())
        _, exponent = torch.frexp(amax / (LARGEST_CODE * LARGEST))
        scale = torch.ldexp(torch.ones_like(amax), exponent)
        scale = torch.where(amax.isfinite(), scale, float("nan"))
        blocks = (wide / scale).nan_to_num().unflatten(-1, (-1, BLOCK))
        block_scale = _block_scales(blocks)
        codes = _codes(blocks / _numbers(block_scale)[..., None])
        pairs = codes.flatten(-2).unflatten(-1, (-1, 2))
        return cls(pairs[..., 0] | pairs[..., 1] << 4, block_scale, scale.expand(len(weight), 1).clone())

    def part(self, index: int | slice) -> Nvfp4:
        """Index the first axis: the matrix of one expert, or some rows of a matrix."""
        return Nvfp4(*(tensor[index] for tensor in self))

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Decode to a dtype: numbers times block scales times scale in at least fp32, rounded once."""
        wide = torch.promote_types(dtype, torch.float32)
        numbers = F.embedding(self.codes.int(), _pairs(self.codes.device, wide)).flatten(-2)
        numbers.unflatten(-1, (-1, BLOCK)).mul_(_numbers(self.block_scale)[..., None])
        return numbers.mul_(self.scale).to(dtype)

    def product(self, ops: Ops, x: Tensor) -> Tensor:
        """Compute `x W^T`, with a gradient for x alone."""
        return ops.nvfp4_linear(x, self)


def tables(dtype: torch.dtype) -> Tensor:
    """Return the lookup tables of decoding: the two numbers of each byte of codes, the number of each scale byte."""
    return torch.cat([_pairs(torch.device("cpu"), dtype).flatten(), _numbers(torch.arange(256).to(torch.uint8))])


def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the two numbers of every byte of codes, [256, 2].

    The bits of e2m1 are shifted to fp16's exponent and mantissa, which gives the number times 2^-14 exactly.
    """
    byte = torch.arange(256, device=device, dtype=torch.int16)
    halves = torch.stack([byte, byte >> 4], -1)
    return ((halves & 7) << 9 | (halves & 8) << 12).view(torch.float16).to(dtype) * 2.0**14


def _numbers(block_scale: Tensor) -> Tensor:
    """Decode bytes of e4m3 to fp32."""
    return block_scale.view(E4M3).float()


def _rounded(magnitudes: Tensor) -> Tensor:
    """Round magnitudes to e2m1, ties to the even code."""
    step = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    return (magnitudes / step).round_().mul_(step).clamp_(max=LARGEST_CODE)


def _codes(numbers: Tensor) -> Tensor:
    """Round numbers to e2m1 and return their codes, uint8."""
    values = _rounded(numbers.abs())
    codes = torch.where(values <= 2, 2 * values, torch.where(values <= 4, values + 2, 7))
    return codes.to(torch.uint8) | numbers.signbit().to(torch.uint8) << 3


def _block_scales(blocks: Tensor) -> Tensor:
    """Return the e4m3 scales, as bytes, with the least squared error for blocks [..., 16]."""
    magnitudes = blocks.abs()
    amax = magnitudes.amax(-1)
    first = (amax / LEAST_SCALE).to(E4M3).view(torch.uint8).clamp_(min=1)
    best, least = first, torch.full_like(amax, float("inf"))
    for n in range(TRIED):
        tried = (first + n).clamp_(max=LARGEST_SCALE)
        scale = _numbers(tried)[..., None]
        error = (_rounded(magnitudes / scale).mul_(scale) - magnitudes).square_().sum(-1)
        is_better = error < least
        best, least = torch.where(is_better, tried, best), torch.where(is_better, error, least)
    return best
