"""Objects that one thread at a time may call, and nobody once they are closed."""

from __future__ import annotations

import functools
import threading
from collections import abc
from typing import Concatenate, ParamSpec, TypeVar

from blockdiff.errors import EngineError

C = TypeVar("C", bound="OneCaller")
P = ParamSpec("P")
T = TypeVar("T")


class OneCaller:
    """An object whose `one_caller` methods may be called by one thread at a time, and not after it is closed."""

    def __init__(self) -> None:
        self.caller, self.is_closed = threading.RLock(), False


def one_caller(call: abc.Callable[Concatenate[C, P], T]) -> abc.Callable[Concatenate[C, P], T]:
    """Let only one thread at a time call a method of an object, and none after it is closed.

    Any other call raises EngineError and changes nothing.
    """

    @functools.wraps(call)
    def checked(engine: C, /, *args: P.args, **options: P.kwargs) -> T:
        if not engine.caller.acquire(blocking=False):
            raise EngineError(
                f"{call.__name__}: another thread is in a call of this engine; call it from one thread, or use "
                "blockdiff.serving.AsyncEngine, which has a thread of its own"
            )
        try:
            if engine.is_closed:
                raise EngineError(f"{call.__name__}: this engine is closed; make another one")
            return call(engine, *args, **options)
        finally:
            engine.caller.release()

    return checked
