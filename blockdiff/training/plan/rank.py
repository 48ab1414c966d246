"""A rank's part of a model without memory: what it keeps, by arithmetic, and its part of every layer.

Only for plans: nothing is exchanged here. `blockdiff.parallel` spreads the weights of a training.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.errors import RecipeError
from blockdiff.layers.experts import Experts
from blockdiff.layers.fp8 import SCALE, is_scale
from blockdiff.models.adapters import is_adapter
from blockdiff.models.family import family_of
from blockdiff.training.optimiser import matrices_of
from blockdiff.training.recipe import Recipe

ORDER = ("weights", "masters", "adapters", "gradients", "buckets", "optimiser", "average")


def sharding_ranks(objective: Any, recipe: Recipe, ranks: int) -> dict[nn.Module, int]:
    """The number of `ranks` processes that share the weights of each sharding unit of the model, inner units first."""
    experts = recipe.parallel.experts
    if ranks % experts:
        raise RecipeError(f"parallel.experts: {experts} does not divide the {ranks} processes of --gpus")
    units = family_of(objective.model.config).units(objective.model)
    return {unit: ranks // experts if isinstance(unit, Experts) else ranks for unit in units}


def kept_bytes(
    objective: Any, recipe: Recipe, ranks: int, stored: torch.dtype, computed: torch.dtype
) -> dict[str, int]:
    """Bytes that each of `ranks` processes keeps all the time, by what they hold; `objective` has all experts.

    ranks: those that have rows of their own. stored: the dtype of the weights; computed: the one they run in. Adapters
    have fp32 at least.
    """
    experts = recipe.parallel.experts
    split = {id(x) for module in objective.modules() if isinstance(module, Experts) for x in _own(module)}
    split = split if experts > 1 else set()
    sharers = {id(x): 1 for x in objective.parameters()}
    if recipe.parallel.shard == "full":
        for unit, count in reversed(sharding_ranks(objective, recipe, ranks).items()):
            sharers |= {id(x): count for x in unit.parameters()}
    optim, wide = recipe.optim, torch.promote_types(stored, torch.float32)
    parts = dict.fromkeys(ORDER, 0)
    for name, x in objective.named_buffers():
        has_own_dtype = not x.is_floating_point() or is_scale(name)
        size = x.nbytes if has_own_dtype else x.numel() * stored.itemsize
        parts["weights"] += size // experts if id(x) in split else size
    for full_name, x in objective.named_parameters():
        name, count, rows = full_name.removeprefix("model."), sharers[id(x)], x.shape[0] if x.dim() else 1
        if id(x) in split:  # whole experts, of which a dimension after theirs is sharded
            numbers = -(-x.numel() // experts // count)
        else:
            numbers = -(-rows // count) * (x.numel() // max(1, rows))
        is_ours = is_adapter(name)
        dtype = wide if is_ours else stored
        is_master = x.requires_grad and dtype != computed and not is_ours
        parts["adapters" if is_ours else "masters" if is_master else "weights"] += numbers * dtype.itemsize
        if x.requires_grad:
            moments = 1 if optim.name == "muon" and matrices_of(name, x) > 0 else 2
            parts["gradients"] += numbers * dtype.itemsize
            parts["optimiser"] += numbers * moments * (1 if optim.name == "adamw_8bit" else dtype.itemsize)
            parts["average"] += numbers * 4 if optim.ema is not None else 0
    return {part: size for part, size in parts.items() if size}


def with_own_heads(objective: Any, recipe: Recipe) -> Any:
    """An objective without memory whose model has a rank's part of every layer under tensor parallelism.

    It is the objective itself without that. Of heads that are fewer than ranks a rank has one.
    """
    size = recipe.parallel.tensor
    if size == 1:
        return objective
    objective = copy.deepcopy(objective)
    parts = family_of(objective.model.config).tensor_parts
    for name, module in list(objective.model.named_modules()):
        for pattern, kind in parts.items():
            if fnmatchcase(name, pattern):
                _CUTS[kind](module, size)
    return objective


def split_experts(objective: Any, recipe: Recipe) -> None:
    """Leave an objective without memory the experts that a rank has, in place; tokens of other ranks come to them."""
    ranks = recipe.parallel.experts
    for module in objective.modules() if ranks > 1 else ():
        if isinstance(module, Experts):
            whole = module.gate_up_proj.shape[0]
            if whole % ranks:
                raise RecipeError(f"parallel.experts: {ranks} does not divide the {whole} experts of a layer")
            for name, x in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
                _cut(module, name, 0, x.shape[0] // ranks)
            module.exchange = _exchange_among(ranks)


def _exchange_among(ranks: int) -> Callable[..., Tensor]:
    """The experts' results of tokens that travel as in `parallel/exchange.py`: as many come as go."""

    def exchange(
        x_ND: Tensor, index_Nk: Tensor, weight_Nk: Tensor, experts: int, compute: Callable[..., Tensor]
    ) -> Tensor:
        (N, k), D = index_Nk.shape, x_ND.shape[1]
        distinct = ranks * (1 - (1 - 1 / ranks) ** k)  # ranks that a token's experts lie on
        M = min(N * ranks, math.ceil(N * distinct))
        token, place = torch.arange(M) % N, torch.arange(M * k)
        x_MD = x_ND.index_select(0, token).clone()  # what goes, and what comes
        weight_Mk = weight_Nk.index_select(0, token).clone()
        index_Mk = torch.where(place < N * k, place % experts, experts).view(M, k)  # the others have no expert here
        y_MD = compute(x_MD, index_Mk, weight_Mk).clone()
        total = x_ND.new_zeros(N, D, dtype=torch.promote_types(y_MD.dtype, torch.float32))
        return total.index_add(0, token, y_MD.to(total.dtype)).to(y_MD.dtype)

    return exchange


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _cut(module: nn.Module, leaf: str, dim: int, length: int) -> None:
    """Leave the first `length` rows or columns of a parameter, or of a buffer in fp8."""
    whole = getattr(module, leaf)
    part = torch.empty_like(whole.narrow(dim, 0, length))
    if leaf in module._buffers:
        module.register_buffer(leaf, part)
    else:
        module.register_parameter(leaf, nn.Parameter(part, requires_grad=whole.requires_grad))


def _out(linear: Any, length: int) -> None:
    linear.out_features = length
    for leaf in ("weight", "weight" + SCALE, "lora_B"):
        if hasattr(linear, leaf):
            _cut(linear, leaf, 0, length)


def _in(linear: Any, length: int) -> None:
    linear.in_features = length
    for leaf in ("weight", "lora_A"):
        if hasattr(linear, leaf):
            _cut(linear, leaf, 1, length)


def _attention(module: Any, size: int) -> None:
    module.heads //= size
    module.kv_heads = max(1, module.kv_heads // size)
    _out(module.q_proj, module.heads * module.head_dim)
    for each in (module.k_proj, module.v_proj):
        if each is not None:
            _out(each, module.kv_heads * module.head_dim)
    _in(module.o_proj, module.heads * module.head_dim)
    indexer = getattr(module, "indexer", None)
    if indexer is not None:
        indexer.heads = max(1, indexer.heads // size)
        _out(indexer.q_proj, indexer.heads * indexer.head_dim)


def _mlp(module: Any, size: int) -> None:
    width = module.down_proj.in_features // size
    _out(module.gate_proj, width)
    _out(module.up_proj, width)
    _in(module.down_proj, width)


def _experts(module: Any, size: int) -> None:
    held = module.gate_up_proj.shape[0] // size
    for leaf in [*module._parameters, *module._buffers]:
        _cut(module, leaf, 0, held)


def _vocabulary(module: Any, size: int) -> None:
    rows = -(-module.table.shape[0] // size)
    for leaf in ("table",) if module.head is None else ("table", "head"):
        _cut(module, leaf, 0, rows)


_CUTS: dict[str, Callable[[Any, int], None]] = {
    "attention": _attention,
    "mlp": _mlp,
    "experts": _experts,
    "vocabulary": _vocabulary,
}
