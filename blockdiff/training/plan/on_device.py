"""What torch does on a device and not for tensors without memory: autocast's casts, and a CPU's flash attention.

What autocast casts is listed in torch's documentation ("Autocast Op Reference"); the ops that the models call are here.
Ops of this package cast their own inputs (`kernels/autocast.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

ATTENTION = "scaled_dot_product_attention"
PRODUCTS = {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", ATTENTION}
# Computed in fp32 on CUDA only.
WIDE = {
    *("exp", "expm1", "log", "log1p", "pow", "__pow__", "__rpow__", "reciprocal", "rsqrt"),
    *("softmax", "log_softmax", "cumsum", "sum", "prod", "norm"),
}


class OnDevice(TorchFunctionMode):
    """Within it ops on meta tensors go the way that they go on `device`, "cpu" or "cuda".

    dtype: what autocast, where it is on, computes in (None: there is none). The cast of a weight that trains is kept
    until autocast ends, as torch keeps it.
    """

    def __init__(self, device: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.device, self.dtype, self.is_narrow = device, dtype, False
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}
        self._is_off = False  # torch calls a backward with the mode off

    @contextmanager
    def autocast(self, *_: Any, enabled: bool = True, **__: Any) -> Iterator[None]:
        """Stands for torch.autocast of any device; a layer that a backward runs again is run within it, too."""
        before, self.is_narrow = self.is_narrow, enabled
        was_off, self._is_off = self._is_off, False
        try:
            with self if was_off else nullcontext():
                yield
        finally:
            self.is_narrow, self._is_off = before, was_off
            if not before and enabled:
                self._casts.clear()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "backward":
            self._is_off = True
            try:
                return function(*args, **named)
            finally:
                self._is_off = False
        if self.is_narrow and "out" not in named:
            if name in PRODUCTS:
                args, named = tree_map(self._narrow, args), tree_map(self._narrow, named)
            elif name in WIDE and self.device == "cuda":
                args, named = tree_map(_wide, args), tree_map(_wide, named)
        if name == ATTENTION and self.device == "cpu" and args[0].is_meta:
            return _flash(*args, **named)
        return function(*args, **named)

    def _narrow(self, x: Any) -> Any:
        if not _is_castable(x) or x.dtype == self.dtype:
            return x
        if not (x.requires_grad and x.is_leaf and x.dtype == torch.float32 and torch.is_grad_enabled()):
            return x.to(self.dtype)
        if id(x) not in self._casts:
            self._casts[id(x)] = x, x.to(self.dtype)
        return self._casts[id(x)][1]


def _is_castable(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_meta and x.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _wide(x: Any) -> Any:
    return x.float() if _is_castable(x) else x


def _flash(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, scale: float | None = None, **_: Any
) -> Tensor:
    """The attention of a CPU, which makes numbers of a mask and keeps no scores; the meta device would take another."""
    if attn_mask is not None:
        attn_mask = q.new_zeros(attn_mask.shape)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = attention(q, k, v, 0.0, False, attn_mask=attn_mask, scale=scale)[0]
    return out
