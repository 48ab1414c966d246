"""The rule of who may call an engine: one thread at a time, and nobody after its end."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from blockdiff.errors import EngineError

if TYPE_CHECKING:
    from blockdiff.sampling.engine import Engine

P = ParamSpec("P")
T = TypeVar("T")


def one_caller(call: Callable[Concatenate[Engine, P], T]) -> Callable[Concatenate[Engine, P], T]:
    """A method of an engine that raises EngineError, and changes nothing, while another thread is in one of them."""

    @functools.wraps(call)
    def checked(engine: Engine, /, *args: P.args, **options: P.kwargs) -> T:
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
