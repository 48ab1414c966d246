"""Modules that are spread over ranks: FSDP2, experts split over pairs of ranks, and both."""

from __future__ import annotations

from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from blockdiff.layers.experts import Experts

How = Literal["none", "full", "experts", "both"]


def spread(module: Any, how: How) -> Any:
    """Spread a module over all ranks, in place, or leave it as it is; a toy's vocabulary stands for its experts."""
    if how == "none":
        return module
    world, rank = dist.get_world_size(), dist.get_rank()
    everyone = init_device_mesh("cpu", (world,))
    pairs = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "experts"))
    groups = [part for part in module.modules() if isinstance(part, Experts)] or [module.vocabulary]
    if how != "full":
        for part in groups:
            for name, whole in list(part.named_parameters(recurse=False)):
                size = -(-whole.shape[0] // 2)
                local = whole.detach()[rank % 2 * size : (rank % 2 + 1) * size].clone()
                split = DTensor.from_local(
                    local, pairs["experts"], [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
                )
                part._parameters[name] = nn.Parameter(split, whole.requires_grad)
    if how != "experts":
        for part in groups:
            fully_shard(
                part,
                mesh=everyone if how == "full" else pairs["data"],
                shard_placement_fn=lambda parameter: Shard(1 if how == "both" and parameter.dim() == 3 else 0),
            )
        fully_shard(module, mesh=everyone)
    return module
