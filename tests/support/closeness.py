"""The relative error, by which the tests of numbers compare results with the truth."""

from __future__ import annotations

import torch
from torch import Tensor


def relative_error(found: Tensor, truth: Tensor, floor: float = 1e-12) -> float:
    """The norm of the difference as a share of that of the truth, which counts as `floor` at least, in fp64."""
    assert found.shape == truth.shape
    found, truth = (x.detach().cpu().double() for x in (found, truth))
    return float((found - truth).norm() / truth.norm().clamp(min=floor))


def require_close(found: Tensor, truth: Tensor, tolerance: float) -> None:
    """Fail unless the relative error is at most `tolerance`; nothing is close to a truth of zeros."""
    error = relative_error(found, truth, floor=0.0)
    assert error <= tolerance, f"relative error {error:.2e}"


def copies(tensors: list[Tensor | None], dtype: torch.dtype, needs: list[bool]) -> list[Tensor | None]:
    """The same values in another dtype, as leaves; a dense layout is kept."""
    return [
        None if x is None else x.detach().to(dtype).requires_grad_(need) for x, need in zip(tensors, needs, strict=True)
    ]


def compare_gradients(got: list[Tensor | None], truth: list[Tensor | None], tolerance: float) -> None:
    for x, y in zip(got, truth, strict=True):
        if x is not None and y is not None and x.requires_grad:
            assert relative_error(x.grad, y.grad) < tolerance
        else:
            assert x is None or x.grad is None
