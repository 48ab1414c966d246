"""Values that processes tell one another as JSON in tensors of bytes, so nobody unpickles what another one sent."""

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
    for length, sent in zip(lengths, _gathered(padded, group, device), strict=True):
        received = bytearray(length)
        torch.frombuffer(received, dtype=torch.uint8).copy_(sent[:length])
        values.append(json.loads(received))
    return values


def _gathered(own: Tensor, group: Any, device: torch.device | str) -> list[Tensor]:
    """A tensor of every process, of equal shapes."""
    own = own.to(device)
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, own, group=group)
    return everyone
