"""Activation checkpointing: layers that keep their inputs alone for the backward, which computes the rest again.

What torch.utils.checkpoint does without reentering autograd, in fewer steps of the host: what a layer's backward reads
is counted in the forward and made in one go when the first of it is asked for. Autograd sees the same graph as without,
so hooks of DDP and FSDP2 run as ever, and gathers, exchanges of tokens and random draws of the forward are repeated.
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
    """Keep only the inputs of each of `model.layers` for the backward, which computes the rest again.

    Losses and gradients stay the same to the bit; parameter names too. A pass without gradients pays nothing. Keys and
    values that a layer returns may be used by later passes.
    """
    for layer in model.layers:  # type: ignore[union-attr]
        if not isinstance(layer.forward, partial):
            layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args)
    call = _Call(forward, args)
    with saved_tensors_hooks(call.keep_place, call.tensor_of):
        return forward(*args)


class _Place:
    """The place of a tensor that a backward reads; it lives as long as its node of the graph."""

    __slots__ = ("__weakref__", "tensor")
    tensor: Tensor | None


class _AllMade(Exception):
    """The end of a recomputation: all tensors that the backward reads are there."""


class _Call:
    """A call of a layer, which can be made again: the same inputs, random numbers and autocast."""

    def __init__(self, forward: Callable[..., Any], args: tuple[Any, ...]):
        self.forward, self.args = forward, args
        self.places: list[weakref.ref[_Place]] = []
        self.devices = {"cuda"} if any(isinstance(x, Tensor) and x.is_cuda for x in args) else set[str]()
        self.generators, self.autocasts = _generators(self.devices), _autocasts(self.devices)

    def keep_place(self, tensor: Tensor) -> _Place:
        """In the forward: a place instead of the tensor."""
        place = _Place()
        place.tensor = None
        self.places.append(weakref.ref(place))
        return place

    def tensor_of(self, place: _Place) -> Tensor:
        """In the backward: the tensor of a place."""
        if place.tensor is None:
            self._make()
        if place.tensor is None:
            raise RunError("a layer that was run again kept other tensors for its backward than the first time")
        return place.tensor

    def _make(self) -> None:
        """Run the layer again until every place has its tensor."""
        places = iter(self.places)
        left = len(self.places)

        def fill(tensor: Tensor) -> None:
            nonlocal left
            place = next(places)()
            if place is not None:
                place.tensor = tensor.detach()
            left -= 1
            if not left:
                raise _AllMade

        with ExitStack() as surrounding:
            surrounding.enter_context(torch.enable_grad())
            surrounding.enter_context(_drawing_from(self.generators))
            for (kind, state), (_, now) in zip(self.autocasts, _autocasts(self.devices), strict=True):
                if state != now:
                    enabled, dtype = state
                    surrounding.enter_context(torch.autocast(kind, dtype, enabled))
            surrounding.enter_context(saved_tensors_hooks(fill, _unread))
            with suppress(_AllMade):
                self.forward(*self.args)


def _unread(_: Any) -> Tensor:
    raise AssertionError("the graph of a recomputation has no backward of its own")


def _autocasts(devices: set[str]) -> list[tuple[str, tuple[bool, torch.dtype]]]:
    """The state of autocast, on or off and its dtype, on the CPU and these kinds of devices."""
    return [(kind, (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))) for kind in ("cpu", *devices)]


def _generators(devices: set[str]) -> tuple[Tensor, Tensor | None]:
    """The states of torch's generators, of the CPU and of the current GPU."""
    return torch.get_rng_state(), torch.cuda.get_rng_state() if devices else None


@contextmanager
def _drawing_from(states: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """Surrounds draws from these states of torch's generators, which afterwards are as they were."""
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
