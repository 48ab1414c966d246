"""Running a training step without its numbers: every tensor has a shape and no content, and what lives is counted.

Weights and everything computed from them lie on torch's meta device, which has no memory. Token ids, positions and
masks are real, for the code reads them. What is counted is what the code itself allocates, on the path it would take on
the device that is planned for; no formula has to follow it.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from blockdiff.kernels.launch import RUNS
from blockdiff.training.plan.on_device import OnDevice
from blockdiff.training.plan.work import Work

MASKED = ("index", "index_put", "index_put_", "_index_put_impl_")
# What must run every time: its result depends on numbers, or shares the memory of an argument without saying so.
NEVER_KEPT = {*MASKED, "_local_scalar_dense", "topk", "_unsafe_view", "nonzero", "detach", "lift_fresh"}
NUMBERS = (bool, int, float)


class LiveBytes(TorchDispatchMode):
    """Within it, operations on meta tensors run without memory, and `peak` is the most bytes that lived at once.

    before: tensors that do not count (the weights); vocabulary: V, by which the logits of a chunk are known. held:
    bytes that live now; parts: bytes of the peak by what they hold; work: operations and bytes moved so far.
    """

    def __init__(self, before: Iterable[Tensor] = (), vocabulary: int | None = None) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.work = Work()
        self.parts: Counter[str] = Counter()
        self._vocabulary = vocabulary
        self._by_part: Counter[str] = Counter()
        self._sizes: dict[int, tuple[int, str, Any]] = {}
        self._before = [x.untyped_storage() for x in before]
        self._sizes |= {storage._cdata: (0, "", None) for storage in self._before}
        self._is_functional: dict[Any, bool] = {}
        self._results: dict[Any, Any] = {}  # what an operation gave for arguments of these shapes

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        key = self._key(function, args, named)
        if key is not None and (known := self._results.get(key)) is not None:
            shapes, work = known
            self.work.add(*work)
            return self._made_again(shapes)
        tensors = _tensors(args) + _tensors(tuple(named.values()))
        name, is_meta = function._schema.name.partition("::")[2], any(x.is_meta for x in tensors)
        given = args
        if is_meta and not all(x.is_meta for x in tensors):
            if name in MASKED:
                args = args[0], _places(args[1]), *args[2:]
            args, named = tree_map(_without_memory, args), tree_map(_without_memory, named)
        if name == "_local_scalar_dense" and is_meta:
            return 1.0
        if function.namespace == "blockdiff" and is_meta:
            with self, self.work.of_one(name, given):  # not only what an op gives back, but what it needs meanwhile
                return RUNS[name](*args, **named)
        stand_in = _STAND_INS.get(name) if args and isinstance(args[0], Tensor) and args[0].is_meta else None
        out = (stand_in or function)(*args, **named)
        if name == "topk" and out[0].is_meta:
            # which experts: real numbers, evenly spread, for the code sorts by them
            shape = out[1].shape
            out = out[0], (torch.arange(out[1].numel()) % tensors[0].shape[-1]).view(shape)
        outs = _tensors((out,))
        shares = {x.untyped_storage()._cdata for x in tensors}
        is_new = not any(x.untyped_storage()._cdata in shares for x in outs)
        work = self.work.add(*Work.of(name, tensors, outs, is_new))
        if key is not None and is_new and all(x.is_meta for x in outs):
            self._results[key] = tree_map(_shape_of, out), work
        for x in outs:
            self._count(x)
        return out

    def start_again(self) -> None:
        """Forget the peak, and count from what lives now."""
        self.held = self.peak = 0
        self._by_part.clear()
        self._sizes = {key: (0, "", reference) for key, (_, _, reference) in self._sizes.items()}

    def hold(self, size: int, part: str) -> None:
        """Count bytes that no tensor stands for; a negative size gives them back."""
        self.held += size
        self._by_part[part] += size
        self._note_peak()

    def call(self, tensors: Iterable[Tensor], part: str) -> None:
        """Say what tensors hold that have been counted."""
        for key in {x.untyped_storage()._cdata for x in tensors}:
            if key in self._sizes:
                size, before, reference = self._sizes[key]
                if size:
                    self._sizes[key] = size, part, reference
                    self._by_part[before] -= size
                    self._by_part[part] += size

    def _key(self, function: Any, args: Any, named: Any) -> Any:
        """What the shapes of an operation's results depend on; None where they depend on more, or memory is shared."""
        is_functional = self._is_functional.get(function)
        if is_functional is None:
            schema = function._schema
            aliases = [each.alias_info for each in (*schema.arguments, *schema.returns)]
            name = schema.name.partition("::")[2]
            is_functional = function.namespace == "aten" and name not in NEVER_KEPT and not any(aliases)
            self._is_functional[function] = is_functional
        if not is_functional:
            return None
        has_meta = [False]
        key = function, _signature(args, has_meta), _signature(tuple(named.items()), has_meta)
        return key if has_meta[0] else None

    def _made_again(self, shapes: Any) -> Any:
        if isinstance(shapes, _Shape):
            x = torch.empty_strided(shapes.size, shapes.stride, dtype=shapes.dtype, device="meta")
            self._count(x)
            return x
        return type(shapes)(self._made_again(each) for each in shapes) if shapes else shapes

    def _count(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        size = storage.nbytes()
        part = "vocabulary chunk" if x.dim() and x.shape[-1] == self._vocabulary else "activations"
        self._sizes[key] = size, part, weakref.ref(storage, lambda _: self._forget(key))
        self.held += size
        self._by_part[part] += size
        self._note_peak()

    def _note_peak(self) -> None:
        if self.held > self.peak:
            self.peak = self.held
            self.parts = self._by_part.copy()

    def _forget(self, key: int) -> None:
        size, part, _ = self._sizes.pop(key, (0, "", None))
        self.held -= size
        self._by_part[part] -= size


class _Shape:
    """What a tensor without memory is made of."""

    __slots__ = ("dtype", "size", "stride")

    def __init__(self, x: Tensor) -> None:
        self.size, self.stride, self.dtype = x.shape, x.stride(), x.dtype


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among values and lists of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _shape_of(x: Any) -> Any:
    return _Shape(x) if isinstance(x, Tensor) else x


def _signature(value: Any, has_meta: list[bool]) -> Any:
    """Arguments of an operation as something to look up by: tensors by shape, numbers by type and value."""
    if isinstance(value, Tensor):
        if value.is_meta:
            has_meta[0] = True
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple([_signature(each, has_meta) for each in value])
    return (type(value), value) if isinstance(value, NUMBERS) else value


def _grouped(left: Tensor, right: Tensor, offs: Tensor, *rest: Any, **named: Any) -> Tensor:
    """The result of a grouped product, whose form for the meta device takes bf16 only."""
    if right.dim() == 3:
        return left.new_empty(left.shape[0], right.shape[2])
    return left.new_empty(offs.shape[0], left.shape[0], right.shape[1])


def _scaled(left: Tensor, right: Tensor, *scales: Any, out: Tensor, **named: Any) -> Tensor:
    """A product of fp8 into a given tensor, which has no form for the meta device."""
    return out


_STAND_INS = {"_grouped_mm": _grouped, "_scaled_mm": _scaled}


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
def planned_for(
    device: str,
    before: Iterable[Tensor] = (),
    vocabulary: int | None = None,
    autocast: torch.dtype | None = None,
) -> Iterator[LiveBytes]:
    """Count what lives within beside what there was `before`, as if the model lay on that device: "cpu" or "cuda".

    autocast: what `torch.autocast` computes in on that device within (None: there is none for tensors without memory).
    """
    is_cpu = property(lambda self: device == "cpu" or (self.device.type == "cpu" and not self.is_floating_point()))
    is_cuda = property(lambda self: device == "cuda" and self.is_meta)
    asked, real = torch.is_autocast_enabled, torch.autocast
    with ExitStack() as stack:
        stack.enter_context(patch.object(Tensor, "is_cpu", is_cpu, create=True))
        stack.enter_context(patch.object(Tensor, "is_cuda", is_cuda, create=True))
        names: dict[str, Any] = {
            "is_autocast_enabled": lambda kind: kind != "meta" and asked(kind),
            "autocast": lambda kind, **k: nullcontext() if kind == "meta" else real(kind, **k),
        }
        if device == "cpu" or autocast is not None:
            there = stack.enter_context(OnDevice(device, autocast))
            stack.enter_context(patch.object(torch.amp, "autocast", there.autocast))  # for layers that are run again
        if autocast is not None:
            names = {
                "is_autocast_enabled": lambda *_: there.is_narrow,
                "get_autocast_dtype": lambda *_: autocast,
                "autocast": there.autocast,
            }
        for name, stand_in in names.items():
            stack.enter_context(patch.object(torch, name, stand_in))
        yield stack.enter_context(LiveBytes(before, vocabulary))
