"""Kernels: one folder per op (reference, native, C, Triton), resolved once to a frozen set of functions."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from blockdiff.errors import BlockdiffError
from blockdiff.kernels.launch import Unserved

# The ops of every folder. Its native.py says what they compute and holds a function of each name; so does its
# triton.py (imported when it is asked for), but for `logits`, whose native form is a single product, and `class_stats`.
FOLDERS = {
    "span_attention": ("span_attention",),
    "expert_mlp": ("expert_mlp", "gated", "route"),
    "block_sparse": ("select_blocks", "block_sparse_attention"),
    "norm_rope": ("rms_norms", "add_rms_norm", "norm_rope"),
    "vocabulary": (
        *("logits", "linear_cross_entropy", "soft_embedding"),
        *("token_stats", "token_scores", "log_sums", "class_stats"),
    ),
}
NATIVE_ONLY = ("logits", "class_stats", "gated", "route", "select_blocks", "block_sparse_attention")
# Those that also have C functions, in their folder's cpu.py and cpu.c.
IN_C = (
    *("span_attention", "expert_mlp", "gated", "route", "rms_norms", "add_rms_norm", "norm_rope"),
    *("linear_cross_entropy", "soft_embedding", "token_stats"),
)
OPS = {op: folder for folder, ops in FOLDERS.items() for op in ops}


@dataclass(frozen=True)
class Kernels:
    """The functions a model computes with; which implementation each is was decided when the model was built."""

    span_attention: Callable[..., Any]
    expert_mlp: Callable[..., torch.Tensor]
    select_blocks: Callable[..., torch.Tensor]
    block_sparse_attention: Callable[..., torch.Tensor]
    gated: Callable[..., torch.Tensor]
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rms_norms: Callable[..., tuple[torch.Tensor, ...]]
    add_rms_norm: Callable[..., torch.Tensor]
    norm_rope: Callable[..., torch.Tensor]
    logits: Callable[..., torch.Tensor]
    linear_cross_entropy: Callable[..., torch.Tensor]
    soft_embedding: Callable[..., torch.Tensor]
    token_stats: Callable[..., Any]
    token_scores: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    log_sums: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    class_stats: Callable[..., Any]


def _op(name: str, implementation: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"blockdiff.kernels.{OPS[name]}.{implementation}"), name)


NATIVE = Kernels(**{name: _op(name, "native") for name in OPS})
CPU = Kernels(**{name: _op(name, "cpu" if name in IN_C else "native") for name in OPS})


def resolve(kernels: str | Kernels = "auto") -> Kernels:
    """The kernels for a choice: "torch" (plain torch), "triton" (every op in Triton) or "auto" (the best there is).

    With "auto", ops on CUDA tensors run in Triton, fp32 ones on a CPU by C functions where a C compiler is found, and
    everything else runs natively; one warning says why Triton cannot run on a GPU at all, and one for each op why it
    cannot serve some call. Raises BlockdiffError for a choice that cannot be had.
    """
    if isinstance(kernels, Kernels):
        return kernels
    if kernels not in ("auto", "torch", "triton"):
        raise BlockdiffError(f'kernels={kernels!r} is not known; use "auto", "torch" or "triton"')
    if kernels == "torch":
        return NATIVE
    if kernels == "auto" and not torch.cuda.is_available():
        return CPU
    obstacle = _why_not_triton()
    if obstacle is not None and kernels == "triton":
        raise BlockdiffError(f'kernels="triton": {obstacle}; use "auto" or "torch"')
    if obstacle is not None:
        warnings.warn(f'kernels="auto": native ops only: {obstacle}', stacklevel=2)
        return CPU
    choose = triton_op if kernels == "triton" else _on_gpu
    return Kernels(**{name: choose(name) for name in OPS})


def triton_op(name: str) -> Callable[..., Any]:
    """The Triton implementation of one op (ImportError where triton is not installed)."""
    return _op(name, "native" if name in NATIVE_ONLY else "triton")


def _why_not_triton() -> str | None:
    """What keeps Triton from running in this process, in words; None where it runs."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    import triton

    if triton.knobs.runtime.interpret:  # TRITON_INTERPRET=1 when triton is imported: numpy on the CPU, for tests
        return None
    if not torch.cuda.is_available():
        return "Triton needs a CUDA device, and torch finds none here"
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and the Triton kernels are made for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"Triton's kernels need compute capability 8.0, this GPU has {major}.{minor}"


def _on_gpu(name: str) -> Callable[..., Any]:
    """The Triton op for CUDA tensors; that of a CPU elsewhere, for fp64 and for what Triton has no kernel for."""
    triton, native = triton_op(name), getattr(CPU, name)
    warned: set[str] = set()

    @functools.wraps(triton)
    def choose(x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        if x.is_cuda and x.dtype != torch.float64:
            try:
                return triton(x, *rest, **named)
            except Unserved as obstacle:
                if obstacle.reason not in warned:
                    warned.add(obstacle.reason)
                    warnings.warn(f'kernels="auto": {name} runs natively: {obstacle.reason}', stacklevel=2)
        return native(x, *rest, **named)

    return choose
