"""Activation checkpointing: layers keep only their inputs for the backward, which recomputes the rest.

It works like the non-reentrant torch.utils.checkpoint, with less work for the host: the forward counts the tensors that
a layer's backward reads, and the first read recomputes them all. Autograd has the same graph as without checkpointing,
so hooks of DDP and FSDP2 run as usual. Gathers, token exchanges and random draws of the forward are repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from blockdiff.errors import RunError


def checkpoint_activations(model: nn.Module) -> None:
    """Make each of `model.layers` keep only its inputs for the backward, which recomputes the rest.

    Losses and gradients stay the same to the bit, and so do parameter names. A pass without gradients costs nothing
    more. Later passes may use the keys and values that a layer returns.
    """
    for layer in model.layers:  # type: ignore[union-attr]
        if not isinstance(layer.forward, partial):
            layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args)
    call = _Call(forward, args)
    with saved_tensors_hooks(call.pack, call.unpack):
        return forward(*args)


class _Slot:
    """A slot for a tensor that the backward reads; it lives as long as its node of the graph."""

    __slots__ = ("__weakref__", "tensor")
    tensor: Tensor | None


class _AllRecomputed(Exception):
    """Ends a recomputation as soon as all tensors that the backward reads are computed."""


class _Call:
    """A call of a layer that can be repeated with the same inputs, random numbers and autocast."""

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...]):
        self.forward, self.args = forward, args
        self.slots: list[weakref.ref[_Slot]] = []
        self.devices = {"cuda"} if any(isinstance(x, Tensor) and x.is_cuda for x in args) else set[str]()
        self.generators, self.autocasts = _generators(self.devices), _autocasts(self.devices)

    def pack(self, tensor: Tensor) -> _Slot:
        """Save an empty slot instead of the tensor, in the forward."""
        slot = _Slot()
        slot.tensor = None
        self.slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        """Return the tensor of a slot, in the backward."""
        if slot.tensor is None:
            self._recompute()
        if slot.tensor is None:
            raise RunError("a layer that was run again kept other tensors for its backward than the first time")
        return slot.tensor

    def _recompute(self) -> None:
        """Run the layer again until every slot has its tensor."""
        slots = iter(self.slots)
        missing = len(self.slots)

        def fill(tensor: Tensor) -> None:
            nonlocal missing
            slot = next(slots)()
            if slot is not None:
                slot.tensor = tensor.detach()
            missing -= 1
            if not missing:
                raise _AllRecomputed

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_drawing_from(self.generators))
            for (kind, state), (_, now) in zip(self.autocasts, _autocasts(self.devices), strict=True):
                if state != now:
                    enabled, dtype = state
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            stack.enter_context(saved_tensors_hooks(fill, _unread))
            with suppress(_AllRecomputed):
                self.forward(*self.args)


def _unread(_: Any) -> Tensor:
    raise AssertionError("the graph of a recomputation has no backward of its own")


def _autocasts(devices: set[str]) -> list[tuple[str, tuple[bool, torch.dtype]]]:
    """The state of autocast (enabled, dtype) of the CPU and these device types."""
    return [(kind, (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))) for kind in ("cpu", *devices)]


def _generators(devices: set[str]) -> tuple[Tensor, Tensor | None]:
    """Return the states of torch's generators: the CPU's and, if there are `devices`, the current GPU's."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if devices else None


@contextmanager
def _drawing_from(states: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Set the states of torch's generators around a block, and restore them afterwards."""
    before = _generators({"cuda"} if states[1] is not None else set())
    _set_generators(states)
    try:
        yield
    finally:
        _set_generators(before)


def _set_generators(states: tuple[Tensor, Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1])
