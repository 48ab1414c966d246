"""The version of a model's weights: what has been computed of them stands as long as it is the same."""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from blockdiff.tensor_pieces import local_of

_fused_steps = WeakIdKeyDictionary()  # of parameters: fused steps of optimisers, which torch counts as no write


def memory_of(model: nn.Module) -> Hashable:
    """The addresses and dtypes of the weights and buffers of a model, which a captured step reads."""
    return tuple((local.data_ptr(), local.dtype) for _, local in _tensors(model))


def version_of(model: nn.Module) -> Hashable:
    """The memory of a model's weights and buffers, and how often they were written to.

    Every in-place operation of torch counts and every step of an optimiser of torch: `load_state_dict`, merging an
    adapter, averaging. Writing through `.data`, numpy or a C function does not.
    """
    return tuple(
        (local.data_ptr(), local.dtype, 0 if local.is_inference() else local._version, _fused_steps.get(x, 0))
        for x, local in _tensors(model)
    )


def _tensors(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Weights and buffers, each with what of it is in this process's memory."""
    return [(x, local_of(x)) for x in itertools.chain(model.parameters(), model.buffers())]


def _count(optimiser: torch.optim.Optimizer, _: Any, __: Any) -> None:
    for group in optimiser.param_groups:
        for weight in group["params"] if group.get("fused") else ():
            _fused_steps[weight] = _fused_steps.get(weight, 0) + 1


# Here and not in the trainer, for whoever makes the optimiser: fused AdamW leaves `_version` as it is.
register_optimizer_step_post_hook(_count)
