"""Weights as kernels take them: tensors, or matrices that are stored in fewer bits and are frozen."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.kernels.op import Ops


class StoredMatrix(Protocol):
    """A matrix [..., out, in], or one for each expert, in a form of fewer bits: a named tuple of its tensors.

    SUFFIXES: what follows the name of a weight in the names of these tensors, all of which keep their dtype when a
    model is cast. BITS: of the code of a number. BLOCK: the numbers along the input that are stored together. A tensor
    is cut along outputs or inputs together with the matrix if it has more than one number there.
    """

    SUFFIXES: ClassVar[tuple[str, ...]]
    BITS: ClassVar[int]
    BLOCK: ClassVar[int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""

    @classmethod
    def empty_like(cls, weight: Tensor) -> Self:
        """Room for a matrix of a weight's shape, on its device."""

    @classmethod
    def nearest(cls, weight: Tensor) -> Self:
        """The matrix that a weight is rounded to."""

    def part(self, index: Any) -> Self:
        """The matrix of one expert, or some rows of a matrix."""

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """The matrix as a tensor of a dtype."""

    def product(self, ops: Ops, x: Tensor) -> Tensor:
        """`x W^T` of x [..., in], with a gradient for x."""


class Decoded:
    """The matrices of all experts in a stored form, each of which is decoded when it is asked for."""

    def __init__(self, weight: StoredMatrix, dtype: torch.dtype, is_transposed: bool = False):
        self.weight, self.dtype, self.is_transposed = weight, dtype, is_transposed
        E, rows, columns = weight.shape
        self.shape = (E, columns, rows) if is_transposed else (E, rows, columns)

    def __getitem__(self, expert: int) -> Tensor:
        matrix = self.weight.part(expert).decoded(self.dtype)
        return matrix.t() if self.is_transposed else matrix

    def transpose(self, first: int, second: int) -> Decoded:
        """The transposed matrices; only the last two dimensions can change places."""
        assert {first, second} == {1, 2}
        return Decoded(self.weight, self.dtype, not self.is_transposed)


def linear(ops: Ops, x: Tensor, weight: Tensor | StoredMatrix) -> Tensor:
    """`x W^T`: x [..., in], weight [out, in]."""
    return F.linear(x, weight) if isinstance(weight, Tensor) else weight.product(ops, x)


def decoded_linear(x: Tensor, weight: StoredMatrix) -> Tensor:
    """`x W^T` in x's dtype in plain torch: W is decoded where it is used, and not kept; a gradient for x alone."""
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
