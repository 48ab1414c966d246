"""A rank of a plan: its part of a model without memory, split by training's own code, and the bytes that it keeps."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.errors import RecipeError
from blockdiff.layers.experts import Experts
from blockdiff.layers.weights import is_scale, is_wide
from blockdiff.models.adapters import is_adapter
from blockdiff.parallel.exchange import expert_parallel
from blockdiff.parallel.tensor import tensor_parallel
from blockdiff.tensor_pieces import PlannedMesh
from blockdiff.training.kinds.kind import kind_of
from blockdiff.training.optimiser import matrix_count
from blockdiff.training.recipe import Recipe

ORDER = ("weights", "masters", "adapters", "gradients", "buckets", "optimiser", "average")


def sharding_ranks(objective: Any, recipe: Recipe, ranks: int) -> dict[nn.Module, int]:
    """Return how many of `ranks` processes share the weights of each sharding unit, inner units first."""
    experts = recipe.parallel.experts
    if ranks % experts:
        raise RecipeError(f"parallel.experts: {experts} does not divide the {ranks} processes of --gpus")
    units = objective.model.config.units(objective.model)
    return {unit: ranks // experts if isinstance(unit, Experts) else ranks for unit in units}


def kept_bytes(
    objective: Any, recipe: Recipe, ranks: int, stored: torch.dtype, computed: torch.dtype
) -> dict[str, int]:
    """Return the bytes that each of `ranks` processes keeps between steps, by their name.

    objective: already cut to a rank. ranks: those with rows of their own. stored: the dtype of the weights. computed:
    the dtype in which they run. Adapters have fp32 at least.
    """
    experts = [module for module in objective.modules() if isinstance(module, Experts)]
    split = {id(x) for module in experts for x in module.parameters()} if recipe.parallel.experts > 1 else set()
    sharers = {id(x): 1 for x in objective.parameters()}
    if recipe.parallel.shard == "full":
        for unit, count in reversed(sharding_ranks(objective, recipe, ranks).items()):
            sharers |= {id(x): count for x in unit.parameters()}
    optim, wide = recipe.optim, torch.promote_types(stored, torch.float32)
    beside, sharers_of_others = kind_of(recipe).beside(objective), ranks if recipe.parallel.shard == "full" else 1
    parts = dict.fromkeys((*beside, *ORDER), 0)
    for word, other in beside.items():
        parts[word] = sum(-(-x.nbytes // sharers_of_others) for x in (*other.parameters(), *other.buffers()))
    for name, x in objective.named_buffers():
        has_own_dtype = not x.is_floating_point() or is_scale(name) or is_wide(name)
        parts["weights"] += x.nbytes if has_own_dtype else x.numel() * stored.itemsize
    for full_name, x in objective.named_parameters():
        name, count, rows = full_name.removeprefix("model."), sharers[id(x)], x.shape[0] if x.dim() else 1
        if id(x) in split:  # whole experts: sharding cuts a dimension behind theirs
            numbers = -(-x.numel() // count)
        else:
            numbers = -(-rows // count) * (x.numel() // max(1, rows))
        is_ours = is_adapter(name)
        dtype = wide if is_ours else stored
        is_master = x.requires_grad and dtype != computed and not is_ours
        parts["adapters" if is_ours else "masters" if is_master else "weights"] += numbers * dtype.itemsize
        if x.requires_grad:
            moments = 1 if optim.name == "muon" and matrix_count(name, x) > 0 else 2
            parts["gradients"] += numbers * dtype.itemsize
            parts["optimiser"] += numbers * moments * (1 if optim.name == "adamw_8bit" else dtype.itemsize)
            parts["average"] += numbers * 4 if optim.ema is not None else 0
    return {part: size for part, size in parts.items() if size}


def cut_to_rank(objective: Any, recipe: Recipe) -> Any:
    """Return an objective without memory whose model has one rank's part of every layer, as in training.

    It is the objective itself if ranks split no layer, else a copy. Experts get tokens of other ranks.
    """
    tensor, experts = recipe.parallel.tensor, recipe.parallel.experts
    if tensor == experts == 1:
        return objective
    objective = copy.deepcopy(objective)
    mesh: Any = PlannedMesh(max(tensor, experts))
    if tensor > 1:
        tensor_parallel(objective.model, mesh)
    if experts > 1:
        expert_parallel(objective.model, mesh)
        for module in objective.model.modules():
            if isinstance(module, Experts):
                module.split = _exchange_among(experts)
    return objective


def _exchange_among(ranks: int) -> Callable[..., Tensor]:
    """Return a stand-in for the exchange of tokens between ranks (`parallel/exchange.py`): as many come as go."""

    def exchange(
        x_ND: Tensor, index_Nk: Tensor, weight_Nk: Tensor, experts: int, compute: Callable[..., Tensor]
    ) -> Tensor:
        (N, k), D = index_Nk.shape, x_ND.shape[1]
        distinct = ranks * (1 - (1 - 1 / ranks) ** k)  # mean number of ranks that have a token's experts
        M = min(N * ranks, math.ceil(N * distinct))
        token, slot = torch.arange(M) % N, torch.arange(M * k)
        x_MD = x_ND.index_select(0, token).clone()  # the tokens sent, and those received
        weight_Mk = weight_Nk.index_select(0, token).clone()
        index_Mk = torch.where(slot < N * k, slot % experts, experts).view(M, k)  # the others have no expert here
        y_MD = compute(x_MD, index_Mk, weight_Mk).clone()
        total = x_ND.new_zeros(N, D, dtype=torch.promote_types(y_MD.dtype, torch.float32))
        return total.index_add(0, token, y_MD.to(total.dtype)).to(y_MD.dtype)

    return exchange
