"""Weights as kernels accept them: tensors, or frozen matrices stored in fewer bits (`StoredMatrix`)."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.kernels.op import Ops


class StoredMatrix(Protocol):
    """A matrix [..., out, in], or one for each expert, stored in fewer bits as a named tuple of tensors.

    SUFFIXES: one for each tensor; a weight's name plus the suffix is the tensor's name in a model and in files. These
    tensors keep their dtype when a model is cast. BITS: the bits of one number's code. BLOCK: how many numbers along
    the input are stored together. If the matrix is sliced along an axis, its tensors of size above 1 there are sliced,
    too.
    """

    SUFFIXES: ClassVar[tuple[str, ...]]
    BITS: ClassVar[int]
    BLOCK: ClassVar[int]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded matrix."""

    @classmethod
    def empty_like(cls, weight: Tensor) -> Self:
        """Allocate a matrix of a weight's shape on its device, unfilled."""

    @classmethod
    def nearest(cls, weight: Tensor) -> Self:
        """Round a weight to this form."""

    def part(self, index: Any) -> Self:
        """Index the first axis: the matrix of one expert, or some rows of a matrix."""

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Decode the matrix to a tensor of a dtype."""

    def product(self, ops: Ops, x: Tensor) -> Tensor:
        """Compute `x W^T` of x [..., in], with a gradient for x alone."""


class Decoded:
    """The stored matrices of all experts as a sequence of tensors; indexing decodes one."""

    def __init__(self, weight: StoredMatrix, dtype: torch.dtype, is_transposed: bool = False):
        self.weight, self.dtype, self.is_transposed = weight, dtype, is_transposed
        E, rows, columns = weight.shape
        self.shape = (E, columns, rows) if is_transposed else (E, rows, columns)

    def __getitem__(self, expert: int) -> Tensor:
        matrix = self.weight.part(expert).decoded(self.dtype)
        return matrix.t() if self.is_transposed else matrix

    def transpose(self, first: int, second: int) -> Decoded:
        """Swap dimensions 1 and 2; others cannot be swapped."""
        assert {first, second} == {1, 2}
        return Decoded(self.weight, self.dtype, not self.is_transposed)


def linear(ops: Ops, x: Tensor, weight: Tensor | StoredMatrix) -> Tensor:
    """Compute `x W^T` of x [..., in] and a weight [out, in], stored or not."""
    return F.linear(x, weight) if isinstance(weight, Tensor) else weight.product(ops, x)


def decoded_linear(x: Tensor, weight: StoredMatrix) -> Tensor:
    """Compute `x W^T` in x's dtype in plain torch, with a gradient for x alone.

    W is decoded in the forward and again in the backward, never kept.
    """
    (x,) = in_autocast(x)
    out: Tensor = _DecodedLinear.apply(x, type(weight), *weight)  # type: ignore[misc]
    return out


class _DecodedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, form: Any, *tensors: Tensor) -> Tensor:
        ctx.form = form
        ctx.save_for_backward(*tensors)
        return F.linear(x, form(*tensors).decoded(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.form(*ctx.saved_tensors)
        return grad @ weight.decoded(grad.dtype), None, *(None for _ in weight)
