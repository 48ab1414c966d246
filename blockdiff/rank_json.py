"""Exchange of values between processes as JSON in tensors of bytes, without pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def from_all(value: Any, group: Any = None, device: torch.device | str = "cpu") -> list[Any]:
    """The `value` of every process of a group, by its rank there; all of them call this.

    value: what JSON can say, in which tuples are lists and the keys of dicts strings; floats stay the same to the bit.
    group: None is that of all processes. device: where the group's backend exchanges, "cpu" for gloo. Raises TypeError
    for any other value.
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
    """Gather a tensor of every process, of equal shapes."""
    local = local.to(device)
    everyone = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, local, group=group)
    return everyone
