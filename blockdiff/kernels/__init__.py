"""Kernels: one folder per op (reference, native, Triton), resolved once to a frozen set of functions."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from blockdiff.errors import BlockdiffError
from blockdiff.kernels.expert_mlp import ExpertMLP
from blockdiff.kernels.expert_mlp.native import expert_mlp
from blockdiff.kernels.norm_rope.native import add_rms_norm, norm_rope, rms_norms
from blockdiff.kernels.span_attention import SpanAttention
from blockdiff.kernels.span_attention.native import span_attention
from blockdiff.kernels.vocabulary.native import (
    linear_cross_entropy,
    logits,
    soft_embedding,
    token_scores,
    token_stats,
)


@dataclass(frozen=True)
class Kernels:
    """The functions a model computes with; which implementation each is was decided when the model was built."""

    span_attention: SpanAttention
    expert_mlp: ExpertMLP
    rms_norms: Callable[..., tuple[torch.Tensor, ...]]
    add_rms_norm: Callable[..., torch.Tensor]
    norm_rope: Callable[..., torch.Tensor]
    logits: Callable[..., torch.Tensor]
    linear_cross_entropy: Callable[..., torch.Tensor]
    soft_embedding: Callable[..., torch.Tensor]
    token_stats: Callable[..., Any]
    token_scores: Callable[..., tuple[torch.Tensor, torch.Tensor]]


NATIVE = Kernels(
    span_attention=span_attention,
    expert_mlp=expert_mlp,
    rms_norms=rms_norms,
    add_rms_norm=add_rms_norm,
    norm_rope=norm_rope,
    logits=logits,
    linear_cross_entropy=linear_cross_entropy,
    soft_embedding=soft_embedding,
    token_stats=token_stats,
    token_scores=token_scores,
)


# The module that holds an op's Triton implementation, under the name of the op; imported when it is asked for.
# An op whose native form is already the best one (a single product, say) names its native module.
TRITON: dict[str, str] = {
    "logits": "blockdiff.kernels.vocabulary.native",
    "linear_cross_entropy": "blockdiff.kernels.vocabulary.triton",
    "soft_embedding": "blockdiff.kernels.vocabulary.triton",
    "token_stats": "blockdiff.kernels.vocabulary.triton",
    "token_scores": "blockdiff.kernels.vocabulary.triton",
    "span_attention": "blockdiff.kernels.span_attention.triton",
    "expert_mlp": "blockdiff.kernels.expert_mlp.triton",
    "rms_norms": "blockdiff.kernels.norm_rope.triton",
    "add_rms_norm": "blockdiff.kernels.norm_rope.triton",
    "norm_rope": "blockdiff.kernels.norm_rope.triton",
}


def resolve(kernels: str | Kernels = "auto") -> Kernels:
    """The kernels for a choice: "torch" (native), "triton" (every op in Triton) or "auto" (the best there is).

    With "auto", ops on CUDA tensors run in Triton where they have it and everything else runs natively; what is
    missing is said in one warning. Raises BlockdiffError for a choice that cannot be had.
    """
    if isinstance(kernels, Kernels):
        return kernels
    if kernels not in ("auto", "torch", "triton"):
        raise BlockdiffError(f'kernels={kernels!r} is not known; use "auto", "torch" or "triton"')
    if kernels == "torch" or (kernels == "auto" and not torch.cuda.is_available()):
        return NATIVE
    obstacle = _why_not_triton()
    missing = ", ".join(op.name for op in fields(Kernels) if op.name not in TRITON)
    if kernels == "triton":
        obstacle = obstacle or (f"there is no Triton kernel yet for {missing}" if missing else None)
        if obstacle is not None:
            raise BlockdiffError(f'kernels="triton": {obstacle}; use "auto" or "torch"')
        return replace(NATIVE, **{op: triton_op(op) for op in TRITON})
    if obstacle is not None or missing:
        what = f"{missing} run natively: no Triton kernel yet" if obstacle is None else f"native ops only: {obstacle}"
        warnings.warn(f'kernels="auto": {what}', stacklevel=2)
    if obstacle is not None:
        return NATIVE
    return replace(NATIVE, **{op: _on_gpu(triton_op(op), getattr(NATIVE, op)) for op in TRITON})


def triton_op(name: str) -> Callable[..., Any]:
    """The Triton implementation of one op (ImportError where triton is not installed)."""
    return getattr(importlib.import_module(TRITON[name]), name)


def _why_not_triton() -> str | None:
    """What keeps Triton from running in this process, in words; None where it runs."""
    if importlib.util.find_spec("triton") is None:
        return "the triton package is not installed"
    import triton

    if triton.knobs.runtime.interpret:  # TRITON_INTERPRET=1 when triton is imported: numpy on the CPU, for tests
        return None
    if not torch.cuda.is_available():
        return "Triton needs a CUDA device, and torch finds none here"
    major, minor = torch.cuda.get_device_capability()
    return None if major >= 8 else f"Triton's kernels need compute capability 8.0, this GPU has {major}.{minor}"


def _on_gpu(triton: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
    """The Triton op for CUDA tensors, the native one for those elsewhere and for fp64, which Triton has not."""

    @functools.wraps(triton)
    def choose(x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        serves = x.is_cuda and x.dtype != torch.float64
        return (triton if serves else native)(x, *rest, **named)

    return choose
