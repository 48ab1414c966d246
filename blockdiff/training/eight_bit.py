"""AdamW with 8-bit moments (arXiv 2110.02861) from a library, and its state as tensors that a file can hold.

bitsandbytes has kernels of its own. torchao compiles its step, which takes a while for every new shape and on the CPU
needs a C++ compiler; its state is made of tensor subclasses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from blockdiff.checkpoint.files import first_line
from blockdiff.errors import RunError

LIBRARIES = ("bitsandbytes", "torchao")  # in this order
_TABLES = ("qmap1", "qmap2")  # of bitsandbytes: one tensor for all parameters
_PART = "|"  # parts a state's key from the name of one of its plain tensors


def adamw_8bit(
    groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """AdamW whose moments are 8-bit in blocks, from the first of bitsandbytes and torchao that is installed.

    Moments of fewer than 4,096 numbers stay as they are in both. Raises RunError when neither is there.
    """
    found = next((library for library in LIBRARIES if find_spec(library)), None)
    if found is None:
        raise RunError(
            "optim.name: adamw_8bit needs bitsandbytes or torchao, and neither is installed; "
            "`pip install bitsandbytes` or choose adamw"
        )
    logging.getLogger(found).setLevel(logging.ERROR)  # on a CPU they miss kernels that no optimiser needs
    try:
        kind = import_module(f"{found}.optim").AdamW8bit  # the same name and arguments in both
    except Exception as error:  # a library built for another torch fails in its own ways
        raise RunError(
            f"optim.name: adamw_8bit: {found} cannot be imported ({first_line(error)}); mend it or choose adamw"
        ) from error
    optimiser: torch.optim.Optimizer = kind(groups, lr=lr, betas=betas, eps=eps)
    return optimiser


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's optimiser state as plain tensors that share no memory: a quantised one becomes its parts.

    The part `x` of a state `key` gets the name `key|x`; `key|` holds what is needed to put it together (JSON values).
    """
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if type(value) is Tensor or not isinstance(value, Tensor):
            flat[key] = value.clone() if key in _TABLES else value
            continue
        names, (is_signed, dtype) = value.__tensor_flatten__()  # type: ignore[attr-defined]
        flat |= {f"{key}{_PART}{name}": getattr(value, name) for name in names}
        flat[f"{key}{_PART}"] = [type(value).__name__, is_signed, str(dtype).removeprefix("torch.")]
    return flat


def unflattened(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flattened`. Raises RunError when the library that made the state is missing."""
    state = {key: value for key, value in flat.items() if _PART not in key}
    for key in (full.removesuffix(_PART) for full in flat if full.endswith(_PART)):
        kind, is_signed, dtype = flat[f"{key}{_PART}"]
        parts = {
            name.partition(_PART)[2]: value
            for name, value in flat.items()
            if name.startswith(f"{key}{_PART}") and not name.endswith(_PART)
        }
        state[key] = _class(kind).__tensor_unflatten__(parts, (is_signed, getattr(torch, dtype)))
    return state


def _class(kind: str) -> Any:
    if kind != "OptimState8bit":
        raise RunError(f"the optimiser's state holds a {kind}, which is not known here")
    try:
        from torchao.optim.subclass_8bit import OptimState8bit
    except ImportError:
        raise RunError(
            "the optimiser's state was made by torchao, which is missing; `pip install torchao` to go on"
        ) from None
    return OptimState8bit
