"""Exchange of values between processes as JSON in tensors of bytes, without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def from_all(value: Any, group: Any = None, device: torch.device | str = "cpu") -> list[Any]:
    """Return the `value` of every process of a group, in the order of their ranks. All of them must call it.

    value: JSON. Tuples become lists and keys strings; floats stay the same to the bit.
    group: None is the group of all processes. device: the device on which the group's backend exchanges, "cpu" for
    gloo.

    Raises TypeError for a value that is no JSON.
    """
    text = bytearray(json.dumps(value).encode())
    lengths = [int(length) for length in _gathered(torch.tensor([len(text)]), group, device)]
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)
    values = []
    for length, data in zip(lengths, _gathered(padded, group, device), strict=True):
        received = bytearray(length)
        torch.frombuffer(received, dtype=torch.uint8).copy_(data[:length])
        values.append(json.loads(received))
    return values


def _gathered(local: Tensor, group: Any, device: torch.device | str) -> list[Tensor]:
    """Gather a tensor of the same shape from every process."""
    local = local.to(device)
    everyone = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, local, group=group)
    return everyone
