"""Activation checkpointing per layer, applied from outside: a layer is pure, so running it again is all it takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_activations(model: nn.Module) -> None:
    """Keep only the inputs of each of `model.layers` for the backward, which computes the rest again.

    Losses and gradients stay the same to the bit; parameter names too. A pass without gradients pays nothing.
    Non-reentrant (torch.utils.checkpoint): keys and values that a layer returns may be used by later passes.
    """
    for layer in model.layers:  # type: ignore[union-attr]
        if not isinstance(layer.forward, partial):
            layer.forward = partial(_run_again, layer.forward)


def _run_again(forward: Callable[..., Any], *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args)
    return checkpoint(forward, *args, use_reentrant=False)
