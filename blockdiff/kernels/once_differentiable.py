"""A decorator for hand-written gradients, which refuses second derivatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from blockdiff.errors import BlockdiffError


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward of an autograd function raise BlockdiffError under `create_graph=True`.

    Every autograd function of this package is decorated with it. Saved tensors and C calls are outside torch's graph,
    so a second derivative would silently omit them. torch's decorator of the same name refuses only the part of the
    second derivative that runs through the incoming gradient.
    """
    *_, op, file = backward.__module__.split(".")
    name = op if file in ("c", "torch", "triton") else file
    remedy = '; load the model with kernels="torch"' if file in ("c", "triton") else ""

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # torch's engine enables it only for create_graph=True
            raise BlockdiffError(f"{name}: no second derivative here (a backward with create_graph=True){remedy}")
        return backward(ctx, *gradients)

    return once
