"""AdamW with 8-bit moments (arXiv 2110.02861) from a library, and its state as tensors that a file can hold.

torchao works on CPU and CUDA and compiles its step; bitsandbytes has kernels of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from blockdiff.errors import RunError

LIBRARIES = ("torchao", "bitsandbytes")
_PART = "|"  # parts a state's key from the name of one of its plain tensors


def adamw_8bit(
    groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """AdamW whose moments are 8-bit in blocks, from the first of torchao and bitsandbytes that is installed.

    Moments of fewer than 4,096 numbers stay as they are in both. Raises RunError when neither is there.
    """
    found = next((library for library in LIBRARIES if find_spec(library)), None)
    if found is None:
        raise RunError(
            "optim.name: adamw_8bit needs torchao or bitsandbytes, and neither is installed; "
            "`pip install torchao`, or choose adamw"
        )
    try:
        if found == "torchao":
            from torchao.optim import AdamW8bit
        else:
            from bitsandbytes.optim import AdamW8bit
    except Exception as error:  # a library built for another torch fails in its own ways
        raise RunError(
            f"optim.name: adamw_8bit: {found} is installed and cannot be imported "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}); choose adamw"
        ) from error
    optimiser: torch.optim.Optimizer = AdamW8bit(groups, lr=lr, betas=betas, eps=eps)
    return optimiser


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's optimiser state with plain tensors only: a quantised one becomes its parts.

    The part `x` of a state `key` gets the name `key|x`; `key|` holds what is needed to put it together (JSON values).
    """
    flat: dict[str, Any] = {}
    for key, value in state.items():
        if type(value) is Tensor or not isinstance(value, Tensor):
            flat[key] = value
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
