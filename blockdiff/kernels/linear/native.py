"""linears in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def linears(x: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`x weight^T` for every weight: x [..., in], weights [out, in]; as exact as a product in x's dtype is."""
    return tuple([F.linear(x, weight) for weight in weights])
