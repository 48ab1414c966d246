"""The version of a model's weights: what has been computed of them stands as long as it is the same."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from blockdiff.tensor_pieces import local_of

Version = tuple[tuple[int, torch.dtype, int], ...]


def weights_version(model: nn.Module) -> Version:
    """The memory of a model's weights and buffers, and how often they were written to; about 1 us for each of them.

    Every in-place operation of torch counts: `load_state_dict`, merging an adapter, averaging, and the steps of an
    optimiser that `notice_steps` was called for. Writing through `.data`, numpy or a C function does not.
    """
    return tuple((x.data_ptr(), x.dtype, 0 if x.is_inference() else x._version) for x in _tensors(model))


def weight_addresses(version: Version) -> Hashable:
    """Where the weights and buffers of a version lie, and as what: captured work reads them there."""
    return tuple((address, dtype) for address, dtype, _ in version)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Weights and buffers, of each what is in this process's memory; `parameters()` also makes names, and is slower."""
    left: list[nn.Module | None] = [model]
    seen = set[nn.Module]()
    while left:
        module = left.pop()
        if module is None or module in seen:
            continue
        seen.add(module)
        left += module._modules.values()
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None:
                yield x if type(x) in (nn.Parameter, Tensor) else local_of(x)


def notice_steps(optimiser: torch.optim.Optimizer) -> None:
    """Count each step of an optimiser as a write of its weights, which torch does not for fused and foreign kernels.

    The trainer calls it for the optimiser of its run. A loop of one's own that samples in between calls it, too.
    """
    optimiser.register_step_post_hook(_count_step)


def _count_step(optimiser: torch.optim.Optimizer, _: Any, __: Any) -> None:
    for group in optimiser.param_groups:
        increment_version([local_of(weight) for weight in group["params"]])
