"""The version of a model's weights: results computed from them are valid as long as it is equal."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from blockdiff.tensor_pieces import local_of

Version = tuple[tuple[int, torch.dtype, int], ...]


def weights_version(model: nn.Module) -> Version:
    """Return the addresses and write counts of a model's weights and buffers; it takes about 1 us for each.

    torch's in-place operations count: `load_state_dict`, merging an adapter, averaging, and the steps of an optimiser
    that `notice_steps` was called for. Writes through `.data`, numpy or a C function do not.
    """
    return tuple((x.data_ptr(), x.dtype, 0 if x.is_inference() else x._version) for x in _tensors(model))


def weight_addresses(version: Version) -> Hashable:
    """Return the addresses and dtypes in a version; captured graphs read the weights there."""
    return tuple((address, dtype) for address, dtype, _ in version)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield weights and buffers, of DTensors the local part; faster than `parameters()`, which builds names."""
    stack: list[nn.Module | None] = [model]
    seen = set[nn.Module]()
    while stack:
        module = stack.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        stack += module._modules.values()
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None:
                yield x if type(x) in (nn.Parameter, Tensor) else local_of(x)


def notice_steps(optimiser: torch.optim.Optimizer) -> None:
    """Count each step of an optimiser as a write of its weights; torch does not for fused and foreign optimisers.

    The trainer calls it for its optimiser. Call it in a custom training loop that samples between steps, too.
    """
    optimiser.register_step_post_hook(_count_step)


def _count_step(optimiser: torch.optim.Optimizer, _: Any, __: Any) -> None:
    for group in optimiser.param_groups:
        increment_version([local_of(weight) for weight in group["params"]])
