"""What a step computes and moves: operations of matrix products and bytes read and written, and a roofline of both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

ATTENTION = "_scaled_dot_product_flash_attention"
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm")
BY_PARTS = ("cross_entropy", "cross_entropy_backward", "soft_embedding", "soft_embedding_backward", "token_stats")
PICKS = ("embedding", "index", "index_select", "gather", "index_put_", "_index_put_impl_", "index_add_", "slice_copy")


class Work:
    """Counts of a step. flops: operations of matrix products; moved: bytes that operations read and write;
    exchanged: bytes that this rank receives from others."""

    def __init__(self) -> None:
        self.flops = self.moved = self.exchanged = 0.0
        self._operations: Counter[tuple[float, float]] = Counter()
        self._is_inside = False

    def add(self, flops: float, moved: float) -> tuple[float, float]:
        """Count an operation, unless it is a part of one that is counted as a whole."""
        if not self._is_inside and (flops or moved):
            self.flops += flops
            self.moved += moved
            self._operations[flops, moved] += 1
        return flops, moved

    def seconds(self, rates: Rates) -> float:
        """At least how long the operations take one after the other, each bound by its products or by its bytes."""
        return sum(n * max(flops / rates.flops, moved / rates.memory) for (flops, moved), n in self._operations.items())

    @contextmanager
    def of_one(self, name: str, args: Sequence[Any]) -> Iterator[None]:
        """Surrounds what one of our own operations does: it is counted by what it takes, and not by its parts."""
        if self._is_inside or name in BY_PARTS:
            yield
            return
        tensors = [x for each in args for x in (each if isinstance(each, list | tuple) else [each])]
        moved = sum(x.numel() * x.element_size() for x in tensors if isinstance(x, Tensor))
        self.add(flops_of(name, args), moved)
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    @staticmethod
    def of(name: str, tensors: Sequence[Tensor], outs: Sequence[Tensor], is_new: bool) -> tuple[float, float]:
        """Operations and bytes of one of torch's operations; what only looks at memory in another way moves nothing."""
        if name.startswith(("empty", "new_empty")) or not (is_new or name.endswith("_") or name in PRODUCTS):
            return 0.0, 0.0
        flops = 0.0
        if name in PRODUCTS:
            left, right = tensors[name in ("addmm", "baddbmm") :][:2]
            flops = 2.0 * left.numel() * right.shape[-1]
        elif name.startswith(ATTENTION):
            is_backward = name.endswith("backward")
            q, k = tensors[is_backward : is_backward + 2]
            flops = (10.0 if is_backward else 4.0) * q.numel() * k.shape[-2]
        written = sum(_bytes(x) for x in outs)
        read = written if name in PICKS else sum(_bytes(x) for x in tensors)
        return flops, float(written + read)


@dataclass(frozen=True)
class Rates:
    """What a device reaches. flops: operations of products per second; memory: bytes per second that it reads and
    writes; network: bytes per second that it receives from the others."""

    flops: float = 400e12
    memory: float = 3e12
    network: float = 100e9


def _bytes(x: Tensor) -> int:
    """Bytes of a tensor as they lie in memory: what is expanded is there once."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * x.element_size()


def flops_of(name: str, args: Sequence[Any]) -> float:
    """Operations of the matrix products of one of our Triton ops, from its arguments."""
    if name.startswith("expert_mlp"):
        return _experts(args, is_backward=name.endswith("backward"))
    if name.startswith("fp8_linear"):
        return 2.0 * args[0].numel() * args[1].numel() / max(1, args[0].shape[-1])
    if name.startswith("span_attention"):
        q, bounds = args[0], next(x for x in args if isinstance(x, Tensor) and x.shape[-1] == 4 and x.dim() == 3)
        pairs = _pairs(bounds, q)
        return (10.0 if name.endswith("backward") else 4.0) * pairs * q.shape[2] * q.shape[3]
    return 0.0


def _experts(args: Sequence[Any], is_backward: bool) -> float:
    """Products of the experts: three matrices of a row, twice in a backward, and again where they train."""
    index = next(x for x in args if isinstance(x, Tensor) and x.dim() == 2 and not x.is_floating_point())
    weights = [x for x in args if isinstance(x, Tensor) and x.dim() == 3]
    slots = index.numel() if index.is_meta else int((index < weights[0].shape[0]).sum())  # the others have no expert
    per_row = sum(2.0 * math.prod(x.shape[1:]) for x in weights)  # adapters among them
    trained = [x for each in args if isinstance(each, list | tuple) for x in each][1:3] if is_backward else []
    times = 1.0 + is_backward + (1.0 if any(trained) else 0.0)
    return times * slots * per_row


def _pairs(bounds: Tensor, q: Tensor) -> float:
    """How many pairs of query and key there are: both runs of every query (all of them where that is not known)."""
    if bounds.is_meta:
        return float(q.shape[0] * q.shape[1] * q.shape[1])
    first, second = bounds[..., 1] - bounds[..., 0], bounds[..., 3] - bounds[..., 2]
    return float(first.clamp(min=0).sum() + second.clamp(min=0).sum())
