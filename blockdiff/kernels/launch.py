"""Launch Triton kernels and register them with torch as custom ops; shared by all ops."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, is_grad_enabled
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

from blockdiff.errors import BlockdiffError
from blockdiff.kernels.autocast import is_on
from blockdiff.kernels.once_differentiable import once_differentiable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of tensors that the kernels read

RUNS: dict[str, Callable[..., Any]] = {}  # name of a registered op -> the function that runs it
P = ParamSpec("P")
R = TypeVar("R")
_modes = torch._C._len_torch_dispatch_stack
_CACHED: list[Any] = []  # the functions that `cached_by_sizes` has wrapped


class Unserved(BlockdiffError):
    """A backend of an op cannot compute a call. With most backends the op then runs in torch instead."""

    @property
    def reason(self) -> str:
        """The message without the advice that `str` adds."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f'{self.reason}; kernels="torch" has no such limit'


class TooLarge(Unserved):
    """A launch exceeds the device's limits, such as its shared memory. Falling back to torch is reported then."""


def cached_by_sizes(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a function's results by its arguments, which must be sizes, dtypes and devices, never tensors.

    Launchers use it for tiles, grids and constants, which every layer needs again in every step. Callers share the
    results and must not change them.
    """
    remembered = functools.lru_cache(4096)(function)
    _CACHED.append(remembered)
    return remembered  # type: ignore[return-value]


def forget_sizes() -> None:
    """Clear all caches of `cached_by_sizes`, after a change of the table of tiles or of a device's properties."""
    for remembered in _CACHED:
        remembered.cache_clear()


class Launch:
    """A Triton kernel with a fixed grid and fixed constants; calling it with the other arguments launches it.

    It runs on the device of its first tensor, not on the current device. Nothing is launched if the grid is empty or
    that tensor is a meta or fake tensor. A launch that exceeds the device's limits raises TooLarge, and so does every
    later call.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **constants: Any):
        self.kernel, self.grid, self.constants = kernel, grid, constants
        from blockdiff.kernels import relaunch  # here because it imports triton

        self._start, self._errors = relaunch.starter(kernel, grid, constants), relaunch.OutOfResources
        self._is_empty = 0 in grid

    def __call__(self, *arguments: Any) -> None:
        x = arguments[0]
        if type(x) is tuple:
            x = x[0]
        if not isinstance(x, Tensor):
            x = _first_tensor(arguments)
        if self._is_empty or x.is_meta or isinstance(x, FakeTensor):
            return
        try:
            if x.is_cuda and x.get_device() != torch.cuda.current_device():
                with torch.cuda.device(x.device):
                    self._start(*arguments)
            else:
                self._start(*arguments)
        except self._errors as error:
            needed, limit = error.required, error.limit
            self._refusal = f"{self.kernel.__name__} needs {needed:,} of {error.name}, and the device has {limit:,}"
            self._start = self._refuse
            self._refuse()

    def _refuse(self, *_: Any) -> None:
        raise TooLarge(self._refusal)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel. Calls with equal grids and constants share a `Launch`."""
    _launch_of(kernel, grid, tuple(constants.items()))(*arguments)


@cached_by_sizes
def _launch_of(kernel: Any, grid: tuple[int, ...], constants: tuple[tuple[str, Any], ...]) -> Launch:
    return Launch(kernel, grid, **dict(constants))


def _first_tensor(arguments: tuple[Any, ...]) -> Tensor:
    """Return the first tensor among arguments or inside tuples among them; raise TypeError if there is none."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument
        if isinstance(argument, tuple) and any(isinstance(x, Tensor) for x in argument):
            return _first_tensor(argument)
    raise TypeError("a kernel was launched without a tensor")


def registered(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Iterator[Any]]], Any]:
    """Return a decorator that registers a function as torch op `blockdiff::name`, one operation for torch.compile.

    The decorated function is a generator: it yields its outputs unfilled, then launches the kernels that fill them.
    With fake tensors torch stops it at the yield, so the same lines serve as shape function. mutates: names of the
    parameters whose tensors it changes in place.
    """

    def register(make: Callable[..., Iterator[Any]]) -> Any:
        def run(*inputs: Any) -> Any:
            return _filled(make(*inputs))

        RUNS[name] = run
        types = typing.get_type_hints(make)
        parameters = [p.replace(annotation=types[p.name]) for p in inspect.signature(make).parameters.values()]
        (outputs,) = typing.get_args(types["return"])
        run.__signature__ = inspect.Signature(parameters, return_annotation=outputs)  # type: ignore[attr-defined]
        schema = torch.library.infer_schema(run, mutates_args=mutates)
        custom = torch.library.custom_op(f"blockdiff::{name}", run, mutates_args=mutates, schema=schema)
        custom.register_fake(lambda *inputs: next(make(*inputs)))
        return Registered(custom, make, typing.get_origin(outputs) is list)

    return register


class Registered:
    """A registered op. Eager calls bypass torch's dispatcher, which cuts their cost on the host to a third.

    Eagerly the gradient is a `torch.autograd.Function` around the same body, at half the host cost of torch's autograd
    for custom ops. Under torch.compile or a dispatch mode torch's op is called.
    """

    def __init__(self, custom: Any, make: Callable[..., Iterator[Any]], returns_list: bool):
        self.custom, self.make, self.returns_list = custom, make, returns_list
        self.recorded: Callable[..., Any] = custom  # called if gradients are recorded

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Set the op's gradient, with the arguments of torch's function of this name; no second derivative."""
        backward, body, returns_list = once_differentiable(backward), self._call, self.returns_list
        self.custom.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = body(*inputs)
            setup_context(ctx, inputs, output)
            return tuple(output) if returns_list else output

        def backward_of_outputs(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, list(grads)) if returns_list else backward(ctx, *grads)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward_of_outputs)}
        self.recorded = type("Recorded", (torch.autograd.Function,), methods).apply  # type: ignore[attr-defined]

    def __call__(self, *inputs: Any) -> Any:
        if torch_must_see_op():
            return self.custom(*inputs)
        return (self.recorded if is_grad_enabled() else self._call)(*inputs)

    def _call(self, *inputs: Any) -> Any:
        steps = self.make(*inputs)
        outputs = next(steps)
        next(steps, None)
        return outputs


def _filled(steps: Iterator[Any]) -> Any:
    """Run an op's generator to its end and return the outputs that it yielded first."""
    outputs = next(steps)
    for _ in steps:
        pass
    return outputs


def torch_must_see_op() -> bool:
    """Whether ops must go through torch's dispatcher: under torch.compile or a dispatch mode such as fake tensors."""
    return is_compiling() or _modes() > 0


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return an unfilled contiguous tensor on `like`'s device, by default with its shape and dtype."""
    # Separate sizes, and a dtype only if there is one: parsing a tuple or None costs torch half a microsecond.
    if dtype is not None:
        return like.new_empty(*(shape or like.shape), dtype=dtype)
    if shape:
        return like.new_empty(*shape)
    return torch.empty_like(like) if like.is_contiguous() else like.new_empty(*like.shape)


def empty_gradients(tensors: Iterable[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Return an unfilled gradient for each needed tensor, and a tensor without elements for the others.

    Custom ops cannot return None.
    """
    return [empty(x, *(x.shape if need else (0,))) for x, need in zip(tensors, needs, strict=True)]


def only_needed(grads: Iterable[Tensor], needs: Sequence[bool]) -> list[Any]:
    """Replace the gradients that are not needed by None."""
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


def have_dtype(dtype: torch.dtype, tensors: Iterable[Tensor]) -> bool:
    """Whether every tensor has the dtype `dtype`."""
    for x in tensors:  # noqa: SIM110 (twice as fast as `all`, and runs in every launch)
        if x.dtype is not dtype:
            return False
    return True


def check_dtypes(op: str, *tensors: Tensor) -> None:
    """Raise Unserved unless all tensors have one dtype and it is among DTYPES."""
    if (dtype := tensors[0].dtype) not in DTYPES or not have_dtype(dtype, tensors):
        names = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in tensors}))
        raise Unserved(f"{op} in Triton takes tensors of one dtype, float32, bfloat16 or float16, not {names}")


def check_without_gradient(op: str, x: Tensor) -> None:
    """Raise Unserved if gradients are recorded, autocast is enabled or x's dtype is not among DTYPES.

    Fused kernels call this: they have no backward and do not cast.
    """
    if is_grad_enabled() or x.dtype not in DTYPES or is_on(x):
        raise Unserved(f"{op} in Triton has no gradient and no autocast, and takes float32, bfloat16 or float16")
