"""The dtypes that ops compute in: what autocast asks for (torch casts no given buffers), and fp32 at least."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def is_on(x: Tensor) -> bool:
    """True where autocast is on for a tensor's device; torch's meta device has none."""
    device = "cuda" if x.is_cuda else "cpu" if x.is_cpu else _device_of(x)
    return device != "meta" and torch.is_autocast_enabled(device)


def _device_of(x: Tensor) -> str:
    """The kind of device that a tensor says it is on: one without memory may stand for one of another (`plan`)."""
    return "cuda" if x.is_cuda else "cpu" if x.is_cpu else x.device.type


def upcast(x: Tensor) -> Tensor:
    """x in fp32 at least: half precision is cast, fp32 and fp64 stay."""
    return x if x.dtype.itemsize > 2 else x.float()


def in_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype in which autocast, if it is on for their device, computes products; fp64 stays."""
    if not is_on(tensors[0]) or tensors[0].dtype is torch.float64:  # which torch's autocast leaves alone, too
        return tensors
    dtype = torch.get_autocast_dtype(_device_of(tensors[0]))
    return tuple(x.to(dtype) for x in tensors)


def without_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A context in which products on a tensor's device are computed in the dtypes of their inputs."""
    return torch.autocast(_device_of(x), enabled=False) if is_on(x) else nullcontext()
