"""linears in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`x weight^T` for every weight: x [..., in], weights [out, in]; as exact as a product in x's dtype is."""
    return tuple([F.linear(x, weight) for weight in weights])


def mm(left_MK: Tensor, right_KN: Tensor, out: Tensor | None = None, beta: int = 0) -> Tensor:
    """`left right + beta out` in `out` (None: in new memory), beta 0 or 1."""
    return torch.mm(left_MK, right_KN, out=out) if beta == 0 or out is None else out.addmm_(left_MK, right_KN)
