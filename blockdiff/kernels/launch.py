"""How the Triton ops are launched and made known to torch: the same few lines for every op."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from blockdiff.errors import BlockdiffError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what the kernels compute with

RUNS: dict[str, Callable[..., Any]] = {}  # what every op does, by its name


class Unserved(BlockdiffError):
    """A call that an op has no Triton kernel for, and why; with kernels="auto" it runs natively."""

    def __init__(self, reason: str):
        super().__init__(f'{reason}; kernels="torch" has no such limit')
        self.reason = reason


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a Triton kernel on the device of its first tensor, whatever device is current; nothing for an empty grid.

    Tensors without memory (torch's meta device) are left as they are.
    """
    device = _device_of(arguments)
    if 0 in grid or (device is not None and device.type == "meta"):
        return
    if device is None or device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **constants)
    else:
        with torch.cuda.device(device):
            kernel[grid](*arguments, **constants)


def _device_of(arguments: tuple[Any, ...]) -> torch.device | None:
    """The device of the first tensor among arguments and tuples of them."""
    for argument in arguments:
        device = _device_of(argument) if isinstance(argument, tuple) else getattr(argument, "device", None)
        if device is not None:
            return device
    return None


def op(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Iterator[Any]]], Any]:
    """Register `blockdiff::name` with torch, so that torch.compile and checkpointing see one op.

    The decorated function is a generator: it yields its outputs while they are still empty, and then launches what
    fills them. With fake tensors torch stops it at the outputs, so their shapes are written once. mutates: the
    parameters whose tensors it writes to.
    """

    def register(make: Callable[..., Iterator[Any]]) -> Any:
        def run(*inputs: Any) -> Any:
            making = make(*inputs)
            outputs = next(making)
            for _ in making:
                pass
            return outputs

        RUNS[name] = run
        types = typing.get_type_hints(make)
        parameters = [p.replace(annotation=types[p.name]) for p in inspect.signature(make).parameters.values()]
        (outputs,) = typing.get_args(types["return"])
        run.__signature__ = inspect.Signature(parameters, return_annotation=outputs)  # type: ignore[attr-defined]
        schema = torch.library.infer_schema(run, mutates_args=mutates)
        registered = torch.library.custom_op(f"blockdiff::{name}", run, mutates_args=mutates, schema=schema)
        registered.register_fake(lambda *inputs: next(make(*inputs)))
        return Op(registered, run)

    return register


class Op:
    """An op that torch knows, called past torch where nothing asks for it: on the host that costs a third."""

    def __init__(self, registered: Any, run: Callable[..., Any]):
        self.registered, self.run = registered, run
        self.register_autograd = registered.register_autograd

    def __call__(self, *inputs: Any) -> Any:
        return self.registered(*inputs) if asks_torch() else self.run(*inputs)


def asks_torch() -> bool:
    """Whether torch has to see each op: it compiles, records gradients, or a mode (fake tensors, say) looks on."""
    return torch.compiler.is_compiling() or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of that shape, by default of `like`'s, on its device and in its dtype or another; dense, not filled."""
    return like.new_empty(shape or like.shape, dtype=dtype)


def wanted(tensors: Iterable[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Empty tensors for the gradients that are needed, without elements for the others: an op gives no None."""
    return [empty(x, *(x.shape if need else (0,))) for x, need in zip(tensors, needs, strict=True)]


def needed(grads: Iterable[Tensor], needs: Sequence[bool]) -> list[Any]:
    """The gradients that are needed, None for the others."""
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)]


def check_dtypes(op: str, *tensors: Tensor) -> None:
    """Raise Unserved unless all tensors have the same one of DTYPES."""
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise Unserved(f"{op} in Triton takes tensors of one dtype, float32, bfloat16 or float16, not {names}")
