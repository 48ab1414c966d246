"""Kernels: one folder per op (reference, native, later Triton), resolved once to a frozen set of functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
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


def resolve(kernels: str | Kernels = "auto") -> Kernels:
    """The kernels for a choice: "torch" (native), "triton" (refused where an op has none), "auto" (best there is).

    Raises BlockdiffError for a choice that cannot be had.
    """
    if isinstance(kernels, Kernels):
        return kernels
    if kernels == "triton":
        raise BlockdiffError('kernels="triton": no op has a Triton implementation yet; use "auto" or "torch"')
    if kernels not in ("auto", "torch"):
        raise BlockdiffError(f'kernels={kernels!r} is not known; use "auto", "torch" or "triton"')
    if kernels == "auto" and torch.cuda.is_available():
        warnings.warn("no op has a Triton kernel yet: running on native torch ops", stacklevel=2)
    return NATIVE
