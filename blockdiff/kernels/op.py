"""`Op`: one computation with one signature, the backends that implement it, and the choice among them.

The function in torch defines the op. The functions in C and Triton take the same arguments and return the same results
up to rounding. A backend that cannot compute a call raises `Unserved`, and the op falls back to torch.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, overload

import torch

from blockdiff.kernels.launch import TooLarge, Unserved

P = ParamSpec("P")
R = TypeVar("R")
Ops: TypeAlias = Any  # `Kernels` of `ops.py`, which cannot be imported here: it imports the compositions
_TOO_LARGE = "{name} runs in other kernels or torch from now on, which is slower: {reason}"


class Op(Generic[P, R]):
    """One computation: its function in torch and the names of its other backends, "c" and "triton".

    A backend is the module of that name in the same folder, where the function has the same name. As an attribute of a
    `Kernels` object an op is the function of the chosen backend.
    """

    def __init__(self, in_torch: Callable[P, R], *backends: str):
        self.in_torch, self.backends = in_torch, backends
        self.name, self.folder = in_torch.__name__, in_torch.__module__.rpartition(".")[0]

    @overload
    def __get__(self, kernels: None, owner: Any) -> Op[P, R]: ...

    @overload
    def __get__(self, kernels: Ops, owner: Any) -> Callable[P, R]: ...

    def __get__(self, kernels: Ops | None, owner: Any) -> Any:
        return self if kernels is None else kernels.__dict__[self.name]  # for typing: attribute access skips __get__

    def on(self, backend: str) -> Callable[P, R]:
        """Import and return the function of backend "c" or "triton"; ImportError without the triton package."""
        function: Callable[P, R] = getattr(importlib.import_module(f"{self.folder}.{backend}"), self.name)
        return function

    def bound(self, kernels: Ops, backend: str) -> Callable[P, R]:
        """Return the function of this op in `Kernels(backend)`; the class `Kernels` lists the backends."""
        in_torch = self._torch_of(kernels)
        if backend == "auto":
            on_cpu, on_gpu = self._first("c", in_torch), self._first("triton", in_torch, self._warning)
            return in_torch if on_cpu is on_gpu else _by_device(on_gpu, on_cpu, in_torch)
        if backend == "triton" and "triton" in self.backends:
            return self._strictly_triton(in_torch)
        first = {"c": "c", "shapes": "triton"}.get(backend)
        return in_torch if first is None else self._first(first, in_torch)

    _warning: str | None = 'kernels="auto": {name} runs in torch: {reason}'

    def _torch_of(self, kernels: Ops) -> Callable[P, R]:
        return self.in_torch

    def _strictly_triton(self, in_torch: Callable[P, R]) -> Callable[P, R]:
        return self.on("triton")

    def _first(self, backend: str, in_torch: Callable[P, R], warning: str | None = None) -> Callable[P, R]:
        """Return a function that tries a backend and falls back to torch after `Unserved`, warning once per reason.

        It is the function in torch if the op lacks that backend. warning: its text; None: warn only about TooLarge.
        """
        if backend not in self.backends:
            return in_torch
        function, reported = self.on(backend), set[str]()

        @functools.wraps(function)
        def first(*args: P.args, **named: P.kwargs) -> R:
            try:
                return function(*args, **named)
            except Unserved as obstacle:
                text = _TOO_LARGE if isinstance(obstacle, TooLarge) else warning
                if text is not None and obstacle.reason not in reported:
                    reported.add(obstacle.reason)
                    warnings.warn(text.format(name=self.name, reason=obstacle.reason), stacklevel=2)
            return in_torch(*args, **named)

        return first


class Composition(Op[P, R]):
    """An op composed of other ops: its function in torch takes the `Kernels` to call them from as first argument.

    If the fused Triton kernel cannot compute a call, the component ops run instead. Only a launch that exceeds the
    device's limits is reported.
    """

    in_torch: Callable[..., R]

    def __init__(self, in_torch: Callable[Concatenate[Ops, P], R], *backends: str):
        super().__init__(in_torch, *backends)  # type: ignore[arg-type]

    _warning = None

    def _torch_of(self, kernels: Ops) -> Callable[P, R]:
        return functools.partial(self.in_torch, kernels)

    def _strictly_triton(self, in_torch: Callable[P, R]) -> Callable[P, R]:
        return self._first("triton", in_torch)


def _by_device(on_gpu: Callable[P, R], on_cpu: Callable[P, R], in_torch: Callable[P, R]) -> Callable[P, R]:
    """Return a function that dispatches on the device of its first argument; fp64 always runs in torch."""

    @functools.wraps(on_gpu)
    def by_device(*args: P.args, **named: P.kwargs) -> R:
        x: Any = args[0]
        if x.dtype is torch.float64:
            return in_torch(*args, **named)
        return (on_gpu if x.is_cuda else on_cpu)(*args, **named)

    return by_device
