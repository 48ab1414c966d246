"""Working memory of ops, reused by consecutive ops of one call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

R = TypeVar("R")


class _Scratch(threading.local):
    buffers: dict[Any, Any] | None = None  # None outside of `shared_scratch`


_SCRATCH = _Scratch()


@contextmanager
def shared_scratch() -> Iterator[None]:
    """Let ops of this thread reuse each other's working memory of equal size inside the `with` block.

    Only for calls without gradients whose ops run one after the other, such as the layers of a step. The memory is
    freed at the end of the block, so it belongs to the CUDA graph that captures the call. Nested blocks share nothing.
    """
    outer, _SCRATCH.buffers = _SCRATCH.buffers, {}
    try:
        yield
    finally:
        _SCRATCH.buffers = outer


def scratch(make: Callable[..., R], like: Tensor, *sizes: Any) -> R:
    """Return `make(like, *sizes)`, or inside `shared_scratch` an earlier result for the same sizes, dtype and device.

    The content is undefined before the calling op and free to be overwritten after it.
    """
    buffers = _SCRATCH.buffers
    if buffers is None:
        return make(like, *sizes)
    key = make, sizes, like.dtype, like.device
    buffer = buffers.get(key)
    if buffer is None:
        buffer = buffers[key] = make(like, *sizes)
    memory: R = buffer
    return memory
