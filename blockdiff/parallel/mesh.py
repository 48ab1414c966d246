"""The layout of the ranks of a run: which share pieces of the same weights, and which exchange tokens.

Every rank has its own rows, except that T ranks of tensor parallelism run every layer together: rank r is number r % T
of its group, and the group number r // T decides their rows. If E ranks split the experts of every layer, rank r is
number r % E of group r // E. So ranks that communicate inside layers are neighbours, and on one node if they fit.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from blockdiff.errors import RunError
from blockdiff.parallel.ranks import Ranks

if TYPE_CHECKING:  # importing it takes half a second, which a run of one process need not wait
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Mesh:
    """The ranks, and how weights are spread over them.

    shard: "none": every rank holds all weights except split experts (DDP); "full": each holds a piece of every tensor
    (FSDP2). experts: number of ranks that split the experts of a layer. offload: with "full", keep weights, gradients
    and the optimiser's state on the host. tensor: number of ranks that run every layer together.

    Device meshes: everyone: all ranks, if weights are sharded; with tensor parallelism one rank of each group. data,
    places: the two dimensions if experts are split; ranks along `places` share a layer's experts. tensors: the ranks
    that run layers with this one.
    """

    ranks: Ranks
    shard: Literal["none", "full"] = "none"
    experts: int = 1
    offload: bool = False
    everyone: DeviceMesh | None = None
    data: DeviceMesh | None = None
    places: DeviceMesh | None = None
    tensor: int = 1
    tensors: DeviceMesh | None = None

    @property
    def is_split(self) -> bool:
        """Whether a rank holds only pieces of the weights, so that ranks must run the model together."""
        return self.shard == "full" or self.experts > 1 or self.tensor > 1

    def __str__(self) -> str:
        parts = [f"{self.ranks.world} processes"]
        parts += [f"every layer split over {self.tensor}"] * (self.tensor > 1)
        parts += ["a piece of every tensor on each"] * (self.shard == "full")
        parts += ["all weights but the experts' on each"] * (self.shard == "none" and self.experts > 1)
        parts += [f"experts split over {self.experts}"] * (self.experts > 1)
        return ", ".join(parts + ["kept on the host"] * self.offload)

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        shard: Literal["none", "full"] = "none",
        experts: int = 1,
        offload: bool = False,
        tensor: int = 1,
    ) -> Mesh:
        """Lay out the ranks; all must call it. Raises RunError for sizes that do not divide or combine."""
        for name, count in {"experts": experts, "tensor": tensor}.items():
            if ranks.world == 1 < count:
                raise RunError(
                    f"parallel.{name}: {count} is a number of processes, and one was started; start "
                    f"them with `torchrun --standalone --nproc_per_node {count} -m blockdiff train RECIPE`"
                )
            if ranks.world % count:
                divisors = ", ".join(str(n) for n in range(1, ranks.world + 1) if ranks.world % n == 0)
                raise RunError(
                    f"parallel.{name}: {count} does not divide the {ranks.world} processes; choose one of {divisors}"
                )
        if shard == "none" and experts == 1 and tensor == 1:
            return cls(ranks)
        if tensor > 1 and experts > 1:
            raise RunError("parallel.experts: the ranks of parallel.tensor split the experts already; leave it at 1")
        if shard == "none" and tensor not in (1, ranks.world):
            raise RunError(
                f"parallel.tensor: {ranks.world} processes are {ranks.world // tensor} groups of {tensor}, which share "
                "the work with parallel.shard: full only"
            )
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        kind, world = ranks.device.type, ranks.world
        if not dist.is_initialized():  # a world of one can shard weights, too
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
            atexit.register(_leave)
        if tensor > 1:
            layout = torch.arange(world).view(-1, tensor)
            groups = [_group(lists.tolist(), ranks) for lists in (layout.T, layout)]
            both = DeviceMesh.from_group(groups, kind, layout, mesh_dim_names=("data", "tensor"))
            return cls(ranks, shard, experts, offload, both["data"], tensor=tensor, tensors=both["tensor"])
        everyone = init_device_mesh(kind, (world,), mesh_dim_names=("ranks",))
        if experts == 1:
            return cls(ranks, shard, experts, offload, everyone)
        layout = torch.arange(world).view(-1, experts)
        groups = [_group(lists.tolist(), ranks) for lists in (layout.T, layout)]
        both = DeviceMesh.from_group(groups, kind, layout, mesh_dim_names=("data", "experts"))
        return cls(ranks, shard, experts, offload, everyone, both["data"], both["experts"])


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _group(lists: list[list[int]], ranks: Ranks) -> Any:
    """Create groups of ranks with the run's timeout, and return the one that this rank is in."""
    group, _ = dist.new_subgroups_by_enumeration(lists, timeout=timedelta(seconds=ranks.timeout))
    return group
