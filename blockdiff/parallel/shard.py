"""Spreading a model over the ranks, and adding up the gradients of their parts.

Each rank holds all weights (DDP), or a piece of every tensor that is gathered while a unit runs (FSDP2), and with
either it may hold the weights of some experts only. Whatever the mesh, a parameter gets the gradient of the sum of all
ranks' losses, which the training step has divided by global counts. So it equals the gradient in a single process.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch.nn.parallel import DistributedDataParallel

from blockdiff.checkpoint.added import fill
from blockdiff.checkpoint.opening import load_files, model_files
from blockdiff.errors import RunError
from blockdiff.kernels.once_differentiable import once_differentiable
from blockdiff.layers.experts import Experts
from blockdiff.layers.weights import dtype_of
from blockdiff.models.adapters import is_adapter
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import stored_layers
from blockdiff.parallel.exchange import expert_parallel
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.tensor import tensor_parallel
from blockdiff.tensor_pieces import is_spread, local_of


def split(model: BlockDiffusionModel, mesh: Mesh, dtype: torch.dtype, computes_in: torch.dtype | None = None) -> None:
    """Allocate this rank's pieces of a model on the meta device, in place, unfilled.

    dtype: of the weights; adapters have fp32 at least. computes_in: the dtype in which sharded weights are gathered
    and run, None = their own; they stay the fp32 masters of the optimiser. Gradients are added up over the ranks in
    fp32 at least. With `mesh.offload` the pieces are on the host. Raises RunError for sizes that do not divide.
    """
    frozen = [f"{name}.{leaf}" for name, held in stored_layers(model).items() for leaf, _ in held.named_buffers()]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name in frozen:  # these have a dtype of their own
            continue
        wide = torch.promote_types(dtype, torch.float32)
        fill(model, name, torch.empty_like(tensor, dtype=wide if is_adapter(name) else dtype_of(name, dtype)))
    if mesh.places is not None:
        expert_parallel(model, mesh.places)
    if mesh.tensors is not None:
        tensor_parallel(model, mesh.tensors)
    if mesh.shard == "full":
        _shard(model, mesh, None if computes_in == dtype else computes_in)
    buffers = [name for name, buffer in model.named_buffers() if not is_spread(buffer)]
    model.to_empty(device="cpu" if mesh.offload else mesh.ranks.device)
    for name in buffers:
        fill(model, name, model.get_buffer(name).to(mesh.ranks.device))


def load_split(
    path_or_hub_id: str | Path,
    mesh: Mesh,
    dtype: str = "auto",
    kernels: str = "auto",
    adapter: str | Path | None = None,
    quantize: str | None = None,
) -> BlockDiffusionModel:
    """Load a model of which this rank reads and holds only its pieces; arguments as of `checkpoint.load`.

    Tensors to be stored in fp8 are read whole, one at a time, and rounded on the host.
    """
    return load_files(
        model_files(path_or_hub_id, adapter),
        dtype,
        mesh.ranks.device,
        kernels,
        quantize=quantize,
        spread=lambda model, kept_in: split(model, mesh, kept_in),
        warns=mesh.ranks.is_main,
    )


def _shard(model: BlockDiffusionModel, mesh: Mesh, computes_in: torch.dtype | None) -> None:
    """Shard every unit of a model by FSDP2: its weights are gathered only while it runs.

    Gradients are summed, not averaged, because each rank's loss is already divided by global counts. So split experts
    need no factor of their own, although only the ranks along `mesh.data` sum their gradients.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
        register_fsdp_forward_method,
    )

    is_narrow = (computes_in or model.dtype).itemsize < 4
    precision = MixedPrecisionPolicy(
        param_dtype=computes_in,
        reduce_dtype=torch.float32 if is_narrow else None,
        cast_forward_inputs=False,  # statistics and random numbers among them keep their dtype
    )
    # torch warns of units that return views, but nothing changes their results in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    pinned = mesh.ranks.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pinned) if mesh.offload else OffloadPolicy()
    for unit in model.config.units(model):
        # Units are gathered anew for every call, so that writes by an average or a checkpoint take effect.
        options: Any = {"reshard_after_forward": True, "mp_policy": precision, "offload_policy": offload}
        if mesh.experts > 1 and isinstance(unit, Experts):
            options |= {"mesh": mesh.data, "shard_placement_fn": _divisible(mesh)}
        else:
            options |= {"mesh": mesh.everyone}
        sharded: Any = fully_shard(unit, **options)
        assert isinstance(sharded, FSDPModule)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "image_features")  # it is called before the model is
    model.gathered_in = computes_in
    model.gathered_on = mesh.ranks.device if mesh.offload else None


def _divisible(mesh: Mesh) -> Any:
    """Return a function that chooses the dimension to shard split experts along: the first after 0 that divides."""
    from torch.distributed.tensor import Shard

    size = mesh.ranks.world // mesh.experts

    def dimension(parameter: nn.Parameter) -> Shard:
        for number, length in enumerate(parameter.shape[1:], 1):
            if length % size == 0:
                return Shard(number)
        raise RunError(
            f"parallel: {size} ranks cannot share tensors of experts of the shape {list(parameter.shape[1:])}; choose "
            "another number of processes, or of parallel.experts"
        )

    return dimension


def replicate(objective: nn.Module, mesh: Mesh) -> nn.Module:
    """Return the module that training calls: the objective, wrapped in DDP if every rank holds all weights.

    DDP copies rank 0's weights to all ranks, except split experts.
    """
    if mesh.ranks.world // mesh.tensor == 1 or mesh.shard == "full":
        return objective
    # Buffers are constants; the option not to broadcast them was renamed in torch 2.13.
    options = signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in options else "broadcast_buffers"
    leave: dict[str, Any] = {name: False}
    touched = _TouchEveryParameter(objective)
    if mesh.experts > 1:
        held = [*touched.named_parameters(), *touched.named_buffers()]
        apart = [name for name, tensor in held if is_spread(tensor)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(touched, apart)
    replicated = DistributedDataParallel(touched, gradient_as_bucket_view=True, **leave)
    _settle(replicated)
    return replicated


def _settle(replicated: DistributedDataParallel) -> None:
    """Make DDP build its final gradient buckets, by an empty backward.

    After the first backward DDP rebuilds them in the order in which it reached the parameters, and the order of sums of
    three or more ranks depends on a gradient's position in its bucket. Without this a resumed run would round its first
    sums differently from the uninterrupted run.
    """
    replicated(None).backward()
    replicated.zero_grad(set_to_none=True)


def exchanging(module: nn.Module, now: bool) -> AbstractContextManager[Any]:
    """Return a context for the forward and backward of a micro-batch, in which DDP exchanges gradients only if `now`.

    FSDP2 exchanges them in every micro-batch, since it would otherwise have to store whole gradients.
    """
    if isinstance(module, DistributedDataParallel) and not now:
        return module.no_sync()
    return nullcontext()


def loss_factor(module: nn.Module, mesh: Mesh) -> int:
    """Return the factor of a rank's loss before its backward: DDP averages gradients over ranks, FSDP2 sums them."""
    return mesh.ranks.world if isinstance(module, DistributedDataParallel) else 1


@torch.no_grad()
def exchange_others(module: nn.Module, parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """Sum, after the last backward of a step, the gradients that neither DDP nor FSDP2 exchanges.

    These are split experts under DDP, whose gradients already contain all tokens of the ranks along `mesh.places`, and
    under FSDP2 the objective's parameters outside the model. All `parameters` must have a gradient. Tensor parallelism
    needs nothing: parameters that are whole on its ranks have complete gradients there.
    """
    if not mesh.is_split:
        return
    is_replicated = isinstance(module, DistributedDataParallel)
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        if is_replicated and is_spread(parameter):
            assert mesh.data is not None
            dist.all_reduce(local_of(gradient), group=mesh.data.get_group())
            local_of(gradient).div_(loss_factor(module, mesh))
        elif not is_replicated and not is_spread(parameter) and mesh.ranks.world // mesh.tensor > 1:
            assert mesh.everyone is not None
            dist.all_reduce(gradient, group=mesh.everyone.get_group())


def require_sums(losses: Any) -> None:
    """Raise RunError unless an objective's forward returned sums by name: tensors without dimensions."""
    remedy = "return a dict of sums by name, tensors without dimensions"
    if not isinstance(losses, dict) or not losses:
        raise RunError(f"objective: its forward gave a {type(losses).__name__}; {remedy}")
    for name, each in losses.items():
        if not isinstance(each, Tensor) or each.dim():
            shape = list(each.shape) if isinstance(each, Tensor) else type(each).__name__
            raise RunError(f"objective: its forward gave {shape} for the loss {name}; {remedy}")


class _Touch(autograd.Function):
    """Identity on a loss that adds parameters to its graph without giving them a gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (gradients[0], *[None] * ctx.count)


class _TouchEveryParameter(nn.Module):
    """An objective whose losses depend on every parameter, so that DDP, which waits for all of them, never hangs.

    A rank without a canvas or a coin leaves some parameters unused. Touching them costs neither a graph walk nor zero
    gradients.
    """

    def __init__(self, objective: nn.Module) -> None:
        super().__init__()
        self.objective = objective

    @functools.cached_property
    def _trainable(self) -> tuple[nn.Parameter, ...]:
        parameters = self.objective.parameters()
        return tuple(parameter for parameter in parameters if parameter.requires_grad and not is_spread(parameter))

    def forward(self, batch: Any) -> Any:
        """Return the losses of a batch; for None a 0 whose backward reaches every parameter."""
        if batch is None:
            return _Touch.apply(torch.zeros((), device=self._trainable[0].device), *self._trainable)
        losses = self.objective(batch)
        require_sums(losses)
        first = next(iter(losses))
        return losses | {first: _Touch.apply(losses[first], *self._trainable)}
