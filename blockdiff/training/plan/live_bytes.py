"""Bytes of tensors that live at once while a model runs on shapes, without numbers and without memory.

Weights and everything computed from them are torch's fake tensors: they have a shape, a dtype and a device (a CPU), and
no memory. Token ids, positions and masks are real, because the code reads them. All of this applies to the thread that
enters the mode.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_impls import has_meta
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from blockdiff.kernels.launch import RUNS

MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")
CHUNK = "vocabulary chunk"
_CPU = torch.device("cpu")


class LiveBytes(TorchDispatchMode):
    """A mode in which operations on fake tensors run without memory; `peak` is the most bytes that lived at once.

    vocabulary: V, which tells the logits of a chunk from other tensors. live: bytes that live now. parts: bytes at the
    peak, by their name. recent: the most bytes since `begin_interval`, in all and by name.
    """

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.live = self.peak = 0
        self.parts: Counter[str] = Counter()
        self.recent: tuple[int, Counter[str]] = 0, Counter()
        self._vocabulary = vocabulary
        self._by_part: Counter[str] = Counter()
        self._known: dict[int, Any] = {}  # counted storages, and those that are never counted
        self._begun = 0  # number of calls of start_again; older tensors do not count

    def fill(self, module: nn.Module) -> None:
        """Replace the weights of a module by fake tensors, which are not counted."""
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                for name, x in tensors.items():
                    if x is not None:
                        fake: Any = self.empty(x.shape, x.dtype)
                        is_parameter = isinstance(x, nn.Parameter)
                        tensors[name] = nn.Parameter(fake, x.requires_grad) if is_parameter else fake

    def empty(self, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """Return a fake tensor that is not counted."""
        with self.fakes:
            x = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        storage = x.untyped_storage()
        self._known[storage._cdata] = storage
        return x

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # torch asks for it more often than it computes
        named = kwargs or {}
        name = function._schema.name.partition("::")[2]
        tensors = _tensors((*args, *named.values()))
        if function.namespace == "blockdiff":
            args = tree_map(self._without_numbers, args)
            with self:  # count temporaries of the op, too, not only its output
                return RUNS[name](*args, **named)
        if not any(isinstance(x, FakeTensor) for x in tensors):
            out = function(*args, **named)
            if "empty" in name:  # kernels will not fill it, and the code may read it
                out.zero_()
            if not tensors and isinstance(out, Tensor) and out.is_floating_point() and out.numel() > 1:
                with self.fakes:
                    out = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype)
        elif name == "_local_scalar_dense":
            return 1.0
        elif name in _STAND_INS:
            out = _STAND_INS[name](*args, **named)
        else:
            if name in MASKED:
                args = args[0], _places(args[1]), *args[2:]
            out = self._on_shapes(function, args, named)
            if name == "topk":  # the chosen experts: real numbers, evenly spread, because the code sorts by them
                out = out[0], (torch.arange(out[1].numel()) % tensors[0].shape[-1]).view(out[1].shape)
        for x in _tensors((out,)):
            self._count(x)
        return out

    def _on_shapes(self, function: Any, args: Any, named: dict[str, Any]) -> Any:
        """Run an operation on fake tensors by torch's kernel for shapes, in half the time of the mode for fake tensors.

        That mode runs it if it has no such kernel, or names a device.
        """
        if named.get("device") is not None or not _has_kernel_for_shapes(function):
            return function(*args, **named)
        args, named = [_shape_of(x) for x in args], {key: _shape_of(x) for key, x in named.items()}
        with in_kernel_invocation_manager(self.fakes):
            out = function(*args, **named)
        if isinstance(out, list | tuple):
            return type(out)(self._fake(x) for x in out)
        return self._fake(out)

    def _fake(self, x: Any) -> Any:
        """Return the output of a kernel for shapes as a fake tensor on a CPU."""
        is_new = isinstance(x, Tensor) and not isinstance(x, FakeTensor)
        return FakeTensor(self.fakes, x, _CPU) if is_new else x

    def start_again(self) -> None:
        """Reset the peak, and stop counting tensors that live now."""
        self.live = self.peak = 0
        self._by_part.clear()
        self._begun += 1

    def hold(self, size: int, part: str) -> None:
        """Count bytes without a tensor; a negative `size` releases them."""
        self.live += size
        self._by_part[part] += size
        self._note(self.live, self._by_part)

    def begin_interval(self) -> None:
        """Begin a new interval: `recent` is what lives now."""
        self.recent = self.live, self._by_part.copy()

    def note_recent(self, more: int, part: str, less: int, other: str) -> None:
        """Raise the peak to the interval's, plus `more` bytes of `part` and minus `less` of `other`, if higher."""
        live, parts = self.recent
        parts = parts.copy()
        parts[part] += more
        parts[other] -= less
        if live + more - less > self.peak:
            self.peak, self.parts = live + more - less, parts

    def _without_numbers(self, x: Any) -> Any:
        """Return an uncounted fake tensor in place of a real one; anything else unchanged."""
        return self.empty(x.shape, x.dtype) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        part = CHUNK if x.dim() and x.shape[-1] == self._vocabulary else "activations"
        begun = self._begun
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size, part, begun))
        self.live += size
        self._by_part[part] += size
        self._note(self.live, self._by_part)

    def _note(self, live: int, parts: Counter[str]) -> None:
        if live > self.recent[0]:
            self.recent = live, parts.copy()
        if live > self.peak:
            self.peak, self.parts = live, parts.copy()

    def _forget(self, key: int, size: int, part: str, begun: int) -> None:
        if self._known.pop(key, None) is not None and begun == self._begun:
            self.live -= size
            self._by_part[part] -= size


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among values and nested lists of them."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += _tensors(value)
    return tensors


@functools.cache
def _has_kernel_for_shapes(function: Any) -> bool:
    name = function._schema.name.partition("::")[2]
    reads_numbers = torch.Tag.dynamic_output_shape in function.tags and name not in MASKED
    return not reads_numbers and has_meta(function)


def _shape_of(x: Any) -> Any:
    """Replace a tensor, also in a list, by one on the meta device; fake tensors and other values stay."""
    if isinstance(x, list | tuple):
        return type(x)(_shape_of(each) for each in x)
    if not isinstance(x, Tensor) or isinstance(x, FakeTensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _places(indices: Any) -> list[Any]:
    """Return indices with masks replaced by the positions that they mark, so that the length of a result is known."""
    places: list[Any] = []
    for index in indices:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor)
        places += index.nonzero().unbind(1) if is_mask else [index]
    return places


def _grouped(left: Tensor, right: Tensor, offs: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the result of a grouped product; torch's kernel for shapes takes bf16 only."""
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])


def _scaled(left: Tensor, right: Tensor, *_: Any, out: Tensor, **__: Any) -> Tensor:
    """Return `out`, the result of an fp8 product, which has no kernel for shapes."""
    return out


_STAND_INS = {"_grouped_mm": _grouped, "_scaled_mm": _scaled}
