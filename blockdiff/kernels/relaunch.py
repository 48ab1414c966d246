"""Launching what Triton has compiled without Triton's own search for it, which is most of what a launch costs.

A kernel's first launch of a kind goes through Triton, which gives back what it compiled; later ones of the same kind
call that. Launches are of a kind where Triton cannot tell them apart when it compiles: on the same device and with the
same constants, tensors of the same dtypes, whose addresses are alike multiples of 16 or not, and equal whole numbers,
or any of 31 bits where the kernel is not compiled for them (`do_not_specialize`).
What Triton is told to do otherwise between two launches (`triton.knobs`) counts for what was not launched before.
With BLOCKDIFF_RELAUNCH=0 in the environment every launch goes through Triton, and so it does, with one warning, where a
compiled kernel cannot be called as the Triton versions are that this was written for.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

__all__ = ["OutOfResources", "Relaunch", "launch_kind", "starter"]

IS_ON = os.environ.get("BLOCKDIFF_RELAUNCH", "1") != "0"
MOST_KINDS = 64  # of launches of a kernel with a grid and constants; those after them go through Triton
_is_said = False  # that something of Triton's cannot be called


def starter(kernel: Any, grid: tuple[int, ...], constants: dict[str, Any]) -> Callable[..., Any]:
    """A function that launches a kernel with a grid and the values of its constants, given the arguments."""
    is_known = IS_ON and type(kernel) is JITFunction and not kernel.pre_run_hooks
    return Relaunch(kernel, grid, constants) if is_known else functools.partial(kernel[grid], **constants)


class Relaunch:
    """A kernel of Triton's with a grid and the values of its constants: called with its arguments, it is launched."""

    def __init__(self, kernel: JITFunction[Any], grid: tuple[int, ...], constants: dict[str, Any]):
        self.kernel, self.grid, self.constants = kernel, grid, constants
        self.through_triton = functools.partial(kernel[grid], **constants)
        self.free = frozenset(n for n, parameter in enumerate(kernel.params) if parameter.do_not_specialize)
        self.compiled: dict[Any, Callable[..., Any]] = {}
        self.is_new = True

    def __call__(self, *arguments: Any) -> None:
        if self.is_new:  # many are launched only once
            self.is_new = False
            self.through_triton(*arguments)
            return
        kind = driver.active.get_current_device(), launch_kind(arguments, self.free)
        run = self.compiled.get(kind)
        try:
            if run is not None:
                run(*arguments)
                return
        except Exception as error:
            self.compiled[kind] = self.through_triton
            self.through_triton(*arguments)  # raises what is not our fault
            _say(error)
            return
        compiled = self.through_triton(*arguments)
        names = self.kernel.arg_names[len(arguments) :]
        is_whole = type(compiled) is CompiledKernel and all(name in self.constants for name in names)
        if is_whole and len(self.compiled) < MOST_KINDS:
            self.compiled[kind] = self._run_of(compiled, [self.constants[name] for name in names])

    def _run_of(self, compiled: CompiledKernel, constants: list[Any]) -> Callable[..., Any]:
        """The launcher of a compiled kernel: it takes all parameters in their order, and skips the constants itself."""
        try:
            run = compiled[(*self.grid, 1, 1)[:3]]
        except Exception as error:
            _say(error)
            return self.through_triton
        return lambda *arguments: run(*arguments, *constants)


def _say(error: Exception) -> None:
    """Warn, once, that a kernel is launched through Triton because of an error."""
    global _is_said
    if not _is_said:
        _is_said = True
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        warnings.warn(
            f"this Triton's kernels cannot be launched past its own search, which costs the host time ({reason}); "
            "BLOCKDIFF_RELAUNCH=0 says that none shall be",
            stacklevel=2,
        )


def launch_kind(arguments: tuple[Any, ...], free: frozenset[int] = frozenset()) -> tuple[Any, ...]:
    """All that Triton asks of arguments when it looks for what it has compiled for such, and more.

    free: the places of those for whose values it does not compile.
    """
    kind: list[Any] = [type(arguments)]  # the names of a NamedTuple count
    for n, x in enumerate(arguments):
        if isinstance(x, Tensor):
            kind.append(x.dtype)
            kind.append(x.data_ptr() % 16)
        elif type(x) is int or x is None:
            kind.append(x >> 31 if x is not None and n in free else x)
        elif isinstance(x, tuple):
            kind.append(launch_kind(x))
        else:
            kind.append(float if type(x) is float else (type(x), x))
    return tuple(kind)
