"""A CUDA graph without CUDA: work is recorded operation by operation, and only these operations run again.

It is as strict as a graph. A replay runs on the memory and with the numbers of the host that the recording saw, so work
that depends on anything but what stands in buffers gives other results. Recording changes nothing. After a replay what
was computed on the way is made unusable, since the next graph may use its memory. What waits for the device is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Work = Callable[[], None]
Call = tuple[Any, Any, Any, list[Tensor]]  # a function, its arguments, and the tensors that it gave

# Operations whose result, or the size of it, the host has to read, and `torch.tensor` of numbers of the host.
REFUSED = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "bincount", "_unique2", "unique_dim",
    "unique_consecutive", "repeat_interleave", "lift_fresh",
}  # fmt: skip


class Refused(Exception):
    """An operation that a CUDA graph cannot hold."""


def refuse_waiting(func: Any, args: Any) -> None:
    """Raise Refused for an operation, with its arguments, that a graph cannot hold."""
    if func.overloadpacket.__name__ in REFUSED or (
        func.overloadpacket.__name__ in ("index", "index_put", "index_put_")
        and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    ):
        raise Refused(f"{func} while steps are recorded")


class _Looking(TorchDispatchMode):
    """Lets operations run, but for those that a graph cannot hold."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_waiting(func, args)
        return func(*args, **(kwargs or {}))


class Looker:
    """`Capture` that replays nothing: where a graph would be replayed it runs the work, in which nothing may wait.

    So it can be used where ranks exchange something, whose end a recording does not see. captures: how often it was
    asked to capture.
    """

    captures = 0

    def warm_up(self, work: Work) -> None:
        """Run work."""
        work()

    def capture(self, work: Work) -> Work:
        """The work, which fails where a graph could not hold it."""
        self.captures += 1

        def looked_at() -> None:
            with _Looking():
                work()

        return looked_at


class _Recording(TorchDispatchMode):
    """The operations that run under it, in order, with their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []  # function, arguments, result
        self.made: set[int] = set()  # memory that came with the recording
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # memory that was there and is written to, as it was

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse_waiting(func, args)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._keep(value)
        for name in ("out", "values", "indices"):
            if isinstance(kwargs.get(name), Tensor):
                self._keep(kwargs[name])
        out = func(*args, **kwargs)
        given = {_memory(x) for x in _tensors((args, kwargs))}
        self.made |= {_memory(x) for x in _tensors(out)} - given
        self.calls.append((func, args, kwargs, out))
        return out

    def _keep(self, x: Tensor) -> None:
        if _memory(x) not in self.made and _memory(x) not in self.before:
            whole = _bytes(x)
            self.before[_memory(x)] = whole, whole.clone()

    def again(self) -> list[Call]:
        """The calls that a replay makes: all but those that make a view, which is there."""
        return [
            (func, args, kwargs, _tensors(out))
            for func, args, kwargs, out in self.calls
            if all(each.alias_info is None or each.alias_info.is_write for each in func._schema.returns)
        ]

    def made_memory(self) -> list[Tensor]:
        """The bytes that came with the recording, each once."""
        outs = {_memory(x): x for call in self.calls for x in _tensors(call[-1])}
        return [_bytes(x) for memory, x in outs.items() if memory in self.made]


class Recorder:
    """`Capture` on a CPU. runs, captures, replays: how often each was done."""

    def __init__(self) -> None:
        self.runs = self.captures = self.replays = 0

    def warm_up(self, work: Work) -> None:
        """Run work."""
        self.runs += 1
        work()

    def capture(self, work: Work) -> Work:
        """Record work."""
        self.captures += 1
        recording = _Recording()
        try:
            with recording:
                work()
        finally:
            for whole, was in recording.before.values():
                whole.copy_(was)
        assert recording.calls
        calls, made = recording.again(), recording.made_memory()
        _spoil(made)
        return lambda: self._replay(calls, made)

    @torch.no_grad()
    def _replay(self, calls: list[Call], made: list[Tensor]) -> None:
        self.replays += 1
        for func, args, kwargs, outs in calls:
            for old, new in zip(outs, _tensors(func(*args, **kwargs)), strict=True):
                if old is not new:
                    old.copy_(new)
        _spoil(made)


def _spoil(made: list[Tensor]) -> None:
    """Make what was computed on the way unusable."""
    for memory in made:
        memory.fill_(0xFF)  # NaN, -1, and no boolean


def _bytes(x: Tensor) -> Tensor:
    """All the memory of which a tensor has a part."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]
