"""Memory that ops need while they run, shared by those of a call that follow one another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

R = TypeVar("R")


class _Scratch(threading.local):
    held: dict[Any, Any] | None = None


_SCRATCH = _Scratch()


@contextmanager
def shared_scratch() -> Iterator[None]:
    """Within it ops of this thread may share the memory that they need while they run, those of equal sizes.

    It is for calls without gradients whose ops follow one another, as the layers of a step do, and nothing of it
    outlives the call, so that it belongs to the CUDA graph that captures the call. One inside another has its own.
    """
    before, _SCRATCH.held = _SCRATCH.held, {}
    try:
        yield
    finally:
        _SCRATCH.held = before


def scratch(make: Callable[..., R], like: Tensor, *sizes: Any) -> R:
    """The result of `make` for these arguments: memory whose content no one needs before or after the op that asks."""
    held = _SCRATCH.held
    if held is None:
        return make(like, *sizes)
    key = make, sizes, like.dtype, like.device
    found = held.get(key)
    if found is None:
        found = held[key] = make(like, *sizes)
    made: R = found
    return made
