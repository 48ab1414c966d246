"""An op: one computation with one signature, the forms that compute it, and the choice among them.

The native form says what the op computes. The others, in C and in Triton, take the same arguments and give the same
results up to rounding. A form that cannot serve a call raises `Unserved`, and the native one answers.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch

from blockdiff.kernels.launch import Unserved

if TYPE_CHECKING:
    from blockdiff.kernels import Kernels

P = ParamSpec("P")
R = TypeVar("R")
MODULES = {"c": "cpu", "triton": "triton"}  # of an op's folder, where a function of its name is that form


class Op(Generic[P, R]):
    """One computation: its native form, and the names of the others that it has, "c" and "triton".

    As an attribute of `Kernels` it is the function that these have chosen.
    """

    def __init__(self, native: Callable[P, R], *others: str):
        self.native, self.others = native, others
        self.name, self.folder = native.__name__, native.__module__.rpartition(".")[0]

    @overload
    def __get__(self, kernels: None, owner: Any) -> Op[P, R]: ...

    @overload
    def __get__(self, kernels: Kernels, owner: Any) -> Callable[P, R]: ...

    def __get__(self, kernels: Kernels | None, owner: Any) -> Any:
        return self if kernels is None else kernels.__dict__[self.name]  # where it is found without coming here

    def form(self, name: str) -> Callable[P, R]:
        """The form "c" or "triton"; it is imported here (ImportError where the triton package is missing)."""
        function: Callable[P, R] = getattr(importlib.import_module(f"{self.folder}.{MODULES[name]}"), self.name)
        return function

    def bound(self, kernels: Kernels, choice: str) -> Callable[P, R]:
        """The function for a choice, as `Kernels` explains them."""
        native = self._native_in(kernels)
        if choice == "auto":
            on_cpu, on_gpu = self._first("c", native), self._first("triton", native, self._warning)
            return native if on_cpu is on_gpu else _by_device(on_gpu, on_cpu, native)
        if choice == "triton" and "triton" in self.others:
            return self._strictly_triton(native)
        form = {"c": "c", "shapes": "triton"}.get(choice)
        return native if form is None else self._first(form, native)

    _warning: str | None = 'kernels="auto": {name} runs natively: {reason}'

    def _native_in(self, kernels: Kernels) -> Callable[P, R]:
        return self.native

    def _strictly_triton(self, native: Callable[P, R]) -> Callable[P, R]:
        return self.form("triton")

    def _first(self, form: str, native: Callable[P, R], warning: str | None = None) -> Callable[P, R]:
        """A function that asks a form, if any, and the native one after `Unserved`; each reason is told once."""
        if form not in self.others:
            return native
        function, told = self.form(form), set[str]()

        @functools.wraps(function)
        def first(*args: P.args, **named: P.kwargs) -> R:
            try:
                return function(*args, **named)
            except Unserved as obstacle:
                if warning is not None and obstacle.reason not in told:
                    told.add(obstacle.reason)
                    warnings.warn(warning.format(name=self.name, reason=obstacle.reason), stacklevel=2)
            return native(*args, **named)

        return first


class Composition(Op[P, R]):
    """An op whose native form is composed of others: a function of `Kernels` and its own arguments.

    Where its Triton form does not serve a call, those ops do that it is composed of, so nothing is refused or told.
    """

    native: Callable[..., R]

    def __init__(self, native: Callable[Concatenate[Kernels, P], R], *others: str):
        super().__init__(native, *others)  # type: ignore[arg-type]

    _warning = None

    def _native_in(self, kernels: Kernels) -> Callable[P, R]:
        return functools.partial(self.native, kernels)

    def _strictly_triton(self, native: Callable[P, R]) -> Callable[P, R]:
        return self._first("triton", native)


def _by_device(on_gpu: Callable[P, R], on_cpu: Callable[P, R], native: Callable[P, R]) -> Callable[P, R]:
    """The first for a CUDA tensor, the second for one of the CPU, by the first argument; natively for all of fp64."""

    @functools.wraps(on_gpu)
    def by_device(*args: P.args, **named: P.kwargs) -> R:
        x: Any = args[0]
        if x.dtype is torch.float64:
            return native(*args, **named)
        return (on_gpu if x.is_cuda else on_cpu)(*args, **named)

    return by_device
