"""Running a training step without its numbers: every tensor has a shape and no content, and what lives is counted.

Weights and everything computed from them lie on torch's meta device, which has no memory. Token ids, positions and
masks are real, for the code reads them. What is counted is what the code itself allocates, on the path it would take on
the device that is planned for; no formula has to follow it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from blockdiff.kernels.launch import RUNS

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_grouped_mm")

MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")


class LiveBytes(TorchDispatchMode):
    """Within it, operations on meta tensors run without memory, and `peak` is the most bytes that lived at once.

    before: tensors that do not count (the weights); held: bytes that live now; flops: of matrix products so far.
    """

    def __init__(self, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.flops = 0.0
        self._sizes: dict[int, tuple[int, Any]] = {}
        self._before = [x.untyped_storage() for x in before]
        self._sizes |= {storage._cdata: (0, None) for storage in self._before}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        tensors = [x for x in tree_leaves((args, named)) if isinstance(x, Tensor)]
        name = function._schema.name.partition("::")[2]
        if any(x.is_meta for x in tensors):
            if name in MASKED:
                args = args[0], _places(args[1]), *args[2:]
            args, named = tree_map(_without_memory, args), tree_map(_without_memory, named)
        if name == "_local_scalar_dense" and any(x.is_meta for x in tensors):
            return 1.0
        if function.namespace == "blockdiff" and any(x.is_meta for x in tensors):
            with self:  # not only what an op gives back, but what it needs meanwhile
                return RUNS[name](*args, **named)
        out = _grouped(*args, **named) if name == "_grouped_mm" and args[0].is_meta else function(*args, **named)
        if name == "topk" and out[0].is_meta:
            # which experts: real numbers, evenly spread, for the code sorts by them
            shape = out[1].shape
            out = out[0], (torch.arange(out[1].numel()) % tensors[0].shape[-1]).view(shape)
        if name in PRODUCTS:
            left, right = [x for x in args if isinstance(x, Tensor) and x.dim() > 1][-2:]
            self.flops += 2.0 * left.numel() * right.shape[-1]
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._count(x)
        return out

    def start_again(self) -> None:
        """Forget the peak, and count from what lives now."""
        self.held = self.peak = 0
        self._sizes = {key: (0, reference) for key, (_, reference) in self._sizes.items()}

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = storage.nbytes()
        self._sizes[key] = size, weakref.ref(storage, lambda _: self._forget(key))
        self.held += size
        self.peak = max(self.peak, self.held)

    def _forget(self, key: int) -> None:
        size, _ = self._sizes.pop(key, (0, None))
        self.held -= size


def _grouped(left: Tensor, right: Tensor, offs: Tensor, *rest: Any, **named: Any) -> Tensor:
    """The result of a grouped product, whose form for the meta device takes bf16 only."""
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])


def _places(indices: Any) -> list[Any]:
    """Indices in which masks, whose number of marks is read, have become places."""
    places: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and not index.is_meta
        places += index.nonzero().unbind(1) if is_mask else [index]
    return places


def _without_memory(x: Any) -> Any:
    """A real tensor as one without memory, for an operation that has such ones too."""
    return x.to("meta") if isinstance(x, Tensor) and not x.is_meta else x


@contextmanager
def planned_for(device: str, before: Iterable[Tensor] = ()) -> Iterator[LiveBytes]:
    """Count what lives within beside what there was `before`, as if the model lay on that device: "cpu" or "cuda"."""
    is_cpu = property(lambda self: device == "cpu" or (self.device.type == "cpu" and not self.is_floating_point()))
    is_cuda = property(lambda self: device == "cuda" and self.is_meta)
    asked, autocast = torch.is_autocast_enabled, torch.autocast
    with (
        patch.object(Tensor, "is_cpu", is_cpu, create=True),
        patch.object(Tensor, "is_cuda", is_cuda, create=True),
        # the meta device has no autocast
        patch.object(torch, "is_autocast_enabled", lambda kind: kind != "meta" and asked(kind)),
        patch.object(torch, "autocast", lambda kind, **k: nullcontext() if kind == "meta" else autocast(kind, **k)),
        LiveBytes(before) as counted,
    ):
        yield counted
