"""Launching Triton kernels and making them known to torch: the same few lines for every op."""

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

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels compute with

RUNS: dict[str, Callable[..., Any]] = {}  # the registered functions by their names
P = ParamSpec("P")
R = TypeVar("R")
_modes = torch._C._len_torch_dispatch_stack
_CACHED: list[Any] = []  # the functions that `cached_by_sizes` remembers the results of


class Unserved(BlockdiffError):
    """A call that a backend of an op cannot serve: `Unserved("the reason")`; torch answers, where it may."""

    @property
    def reason(self) -> str:
        """The reason alone."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f'{self.reason}; kernels="torch" has no such limit'


class TooLarge(Unserved):
    """A launch that asks for more shared memory, say, than the device has; that torch answers is told then."""


def cached_by_sizes(function: Callable[P, R]) -> Callable[P, R]:
    """Call a function once for the same arguments: sizes, dtypes and devices, and never tensors.

    What follows from these of a launch (tile, grid, the kernel's constants) is most of what a launcher works out, and
    the layers of a model ask for the same again in every step. The results are shared: nobody may change them.
    """
    remembered = functools.lru_cache(4096)(function)
    _CACHED.append(remembered)
    return remembered  # type: ignore[return-value]


def forget_sizes() -> None:
    """Forget all launch sizes; call it after a change of the table of tiles, or of what a device reports."""
    for remembered in _CACHED:
        remembered.cache_clear()


class Launch:
    """A Triton kernel with a grid and the values of its constants: called with its arguments, it is launched.

    It runs on the device of its first tensor, whatever device is current; for an empty grid nothing is launched.
    Tensors without numbers, those of torch's meta device and its fake ones, are left as they are. A launch that is too
    large for the device raises TooLarge, and from then on without asking Triton.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **constants: Any):
        self.kernel, self.grid, self.constants = kernel, grid, constants
        from blockdiff.kernels import relaunch  # needs Triton, which is there where something is launched

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
            asked, there = error.required, error.limit
            self._refusal = f"{self.kernel.__name__} asks for {asked:,} of {error.name}, and the device has {there:,}"
            self._start = self._refuse
            self._refuse()

    def _refuse(self, *_: Any) -> None:
        raise TooLarge(self._refusal)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel at once; equal grids and constants share a `Launch`."""
    _launch_of(kernel, grid, tuple(constants.items()))(*arguments)


@cached_by_sizes
def _launch_of(kernel: Any, grid: tuple[int, ...], constants: tuple[tuple[str, Any], ...]) -> Launch:
    return Launch(kernel, grid, **dict(constants))


def _first_tensor(arguments: tuple[Any, ...]) -> Tensor:
    """The first tensor among arguments and tuples of them."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument
        if isinstance(argument, tuple) and any(isinstance(x, Tensor) for x in argument):
            return _first_tensor(argument)
    raise TypeError("a kernel was launched without a tensor")


def registered(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Iterator[Any]]], Any]:
    """Register `blockdiff::name` with torch, so that torch.compile and recomputation see one operation.

    The decorated function is a generator: it yields its outputs while they are still empty, and then launches what
    fills them. With fake tensors torch stops it at the outputs, so their shapes are written once. mutates: the
    parameters whose tensors it writes to.
    """

    def register(make: Callable[..., Iterator[Any]]) -> Any:
        def run(*inputs: Any) -> Any:
            return _made(make(*inputs))

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
    """A function that torch knows, called past torch if nothing asks for it: on the host that costs a third.

    Its gradient is one pair of functions. Eagerly they are a `torch.autograd.Function` around the same body, which
    costs the host half of what torch's own autograd of a registered op does; a compiler or a mode sees the op whole.
    """

    def __init__(self, custom: Any, make: Callable[..., Iterator[Any]], gives_list: bool):
        self.custom, self.make, self.gives_list = custom, make, gives_list
        self.recorded: Callable[..., Any] = custom  # called if gradients are recorded

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """Give the op its gradient, as torch's function of this name does; it has no second derivative."""
        backward, body, gives_list = once_differentiable(backward), self._call, self.gives_list
        self.custom.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = body(*inputs)
            setup_context(ctx, inputs, output)
            return tuple(output) if gives_list else output

        def of_outputs(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, list(grads)) if gives_list else backward(ctx, *grads)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(of_outputs)}
        self.recorded = type("Recorded", (torch.autograd.Function,), methods).apply  # type: ignore[attr-defined]

    def __call__(self, *inputs: Any) -> Any:
        if asks_torch():
            return self.custom(*inputs)
        return (self.recorded if is_grad_enabled() else self._call)(*inputs)

    def _call(self, *inputs: Any) -> Any:
        making = self.make(*inputs)
        outputs = next(making)
        next(making, None)
        return outputs


def _made(making: Iterator[Any]) -> Any:
    """The outputs of an op, filled."""
    outputs = next(making)
    for _ in making:
        pass
    return outputs


def asks_torch() -> bool:
    """True if torch has to see each op: it compiles, or a mode (fake tensors, say) looks on."""
    return is_compiling() or _modes() > 0


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of that shape, by default of `like`'s, on its device and in its dtype or another; dense, not filled."""
    # sizes one by one, and a dtype only if there is one: torch reads a tuple of them, or None, for half a microsecond
    if dtype is not None:
        return like.new_empty(*(shape or like.shape), dtype=dtype)
    if shape:
        return like.new_empty(*shape)
    return torch.empty_like(like) if like.is_contiguous() else like.new_empty(*like.shape)


def empty_gradients(tensors: Iterable[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Empty tensors for the gradients that are needed, without elements for the others: an op gives no None."""
    return [empty(x, *(x.shape if need else (0,))) for x, need in zip(tensors, needs, strict=True)]


def only_needed(grads: Iterable[Tensor], needs: Sequence[bool]) -> list[Any]:
    """The gradients that are needed, None for the others."""
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


def have_dtype(dtype: torch.dtype, tensors: Iterable[Tensor]) -> bool:
    """True where all tensors have that dtype."""
    for x in tensors:  # noqa: SIM110 (twice as fast as `all`, and every launch asks)
        if x.dtype is not dtype:
            return False
    return True


def check_dtypes(op: str, *tensors: Tensor) -> None:
    """Raise Unserved unless all tensors have the same one of DTYPES."""
    if (dtype := tensors[0].dtype) not in DTYPES or not have_dtype(dtype, tensors):
        names = ", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in tensors}))
        raise Unserved(f"{op} in Triton takes tensors of one dtype, float32, bfloat16 or float16, not {names}")


def check_without_gradient(op: str, x: Tensor) -> None:
    """Raise Unserved where gradients are recorded or autocast is on, and for dtypes that the kernels do not have.

    Kernels that do the work of several ops have no backward and cast nothing.
    """
    if is_grad_enabled() or x.dtype not in DTYPES or is_on(x):
        raise Unserved(f"{op} in Triton has no gradient and no autocast, and takes float32, bfloat16 or float16")
