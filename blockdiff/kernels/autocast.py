"""The dtypes that ops compute in: autocast's (torch does not cast inside custom ops), and at least fp32."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def is_on(x: Tensor) -> bool:
    """Whether autocast is enabled for a tensor's device; torch's meta device has no autocast."""
    device = "cuda" if x.is_cuda else "cpu" if x.is_cpu else _device_of(x)
    return device != "meta" and torch.is_autocast_enabled(device)


def _device_of(x: Tensor) -> str:
    """Return the device type of a tensor. A tensor without memory reports the type it stands in for (`plan`)."""
    return "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type


def upcast(x: Tensor) -> Tensor:
    """Cast half precision to fp32; return fp32 and fp64 unchanged."""
    return x if x.dtype.itemsize > 2 else x.float()


def in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to the dtype in which autocast computes products, if it is enabled for their device.

    If the first tensor is fp64, all are returned unchanged.
    """
    if not is_on(tensors[0]) or tensors[0].dtype is torch.float64:  # torch's autocast skips fp64, too
        return tensors
    dtype = torch.get_autocast_dtype(_device_of(tensors[0]))
    return tuple(x.to(dtype) for x in tensors)


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """Disable autocast on a tensor's device for the duration of a `with` block."""
    return torch.autocast(_device_of(x), enabled=False) if is_on(x) else nullcontext()
