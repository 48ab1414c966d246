"""Relaunch compiled Triton kernels without Triton's lookup of them, which is most of the cost of a launch.

The first launches of a kernel go through Triton, and the compiled kernel that it returns is stored by signature. Later
launches of the same signature call it directly. A signature is everything that Triton compiles for: the device,
the constants, the dtypes of tensors and whether their addresses are multiples of 16, and the values of integers
(of `do_not_specialize` integers only whether they fit in 31 bits).
Changes of `triton.knobs` do not affect signatures that were launched before.
With BLOCKDIFF_RELAUNCH=0 in the environment every launch goes through Triton. The same happens, with one warning, if
this version of Triton does not let compiled kernels be called so.
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

__all__ = ["OutOfResources", "Relaunch", "launch_signature", "starter"]

IS_ON = os.environ.get("BLOCKDIFF_RELAUNCH", "1") != "0"
MOST_SIGNATURES = 64  # stored for a kernel with a grid and constants; launches of others go through Triton
_has_warned = False  # that compiled kernels cannot be called directly


def starter(kernel: Any, grid: tuple[int, ...], constants: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that launches a kernel with this grid and these constants on the arguments it is called with.

    Kernels with hooks, and the interpreter's, always go through Triton.
    """
    is_plain = IS_ON and type(kernel) is JITFunction and not kernel.pre_run_hooks
    return Relaunch(kernel, grid, constants) if is_plain else functools.partial(kernel[grid], **constants)


class Relaunch:
    """A Triton kernel with a fixed grid and fixed constants; calling it with the other arguments launches it."""

    def __init__(self, kernel: JITFunction[Any], grid: tuple[int, ...], constants: dict[str, Any]):
        self.kernel, self.grid, self.constants = kernel, grid, constants
        self.through_triton = functools.partial(kernel[grid], **constants)
        self.free = frozenset(n for n, parameter in enumerate(kernel.params) if parameter.do_not_specialize)
        self.compiled: dict[Any, Callable[..., Any]] = {}
        self.is_new = True

    def __call__(self, *arguments: Any) -> None:
        if self.is_new:  # many are launched only once, so nothing is stored yet
            self.is_new = False
            self.through_triton(*arguments)
            return
        signature = driver.active.get_current_device(), launch_signature(arguments, self.free)
        run = self.compiled.get(signature)
        try:
            if run is not None:
                run(*arguments)
                return
        except Exception as error:
            self.compiled[signature] = self.through_triton
            self.through_triton(*arguments)  # raises again if the error has nothing to do with relaunching
            _warn(error)
            return
        compiled = self.through_triton(*arguments)
        names = self.kernel.arg_names[len(arguments) :]
        is_whole = type(compiled) is CompiledKernel and all(name in self.constants for name in names)
        if is_whole and len(self.compiled) < MOST_SIGNATURES:
            self.compiled[signature] = self._run_of(compiled, [self.constants[name] for name in names])

    def _run_of(self, compiled: CompiledKernel, constants: list[Any]) -> Callable[..., Any]:
        """Return a function that launches a compiled kernel, which takes its constants after the other arguments."""
        try:
            run = compiled[(*self.grid, 1, 1)[:3]]
        except Exception as error:
            _warn(error)
            return self.through_triton
        return lambda *arguments: run(*arguments, *constants)


def _warn(error: Exception) -> None:
    """Warn, once in a process, that kernels are launched through Triton because of an error."""
    global _has_warned
    if not _has_warned:
        _has_warned = True
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        warnings.warn(
            f"compiled kernels of this version of Triton cannot be called directly, so launches take more host time "
            f"({reason}); BLOCKDIFF_RELAUNCH=0 turns direct launches, and this warning, off",
            stacklevel=2,
        )


def launch_signature(arguments: tuple[Any, ...], free: frozenset[int] = frozenset()) -> tuple[Any, ...]:
    """Return a key for arguments: calls with equal keys run the same compiled kernel.

    free: indices of the integers that Triton does not specialise on.
    """
    key: list[Any] = [type(arguments)]  # the field names of a NamedTuple are part of the signature
    for n, x in enumerate(arguments):
        if isinstance(x, Tensor):
            key.append(x.dtype)
            key.append(x.data_ptr() % 16)
        elif type(x) is int or x is None:
            key.append(x >> 31 if x is not None and n in free else x)
        elif isinstance(x, tuple):
            key.append(launch_signature(x))
        else:
            key.append(float if type(x) is float else (type(x), x))
    return tuple(key)
