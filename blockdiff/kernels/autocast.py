"""Casting the inputs of an op once to what autocast computes in: products into given buffers are not cast by torch."""

from __future__ import annotations

import torch
from torch import Tensor


def in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype that autocast, where it is on for their device, computes products in."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(device)) for x in tensors)
