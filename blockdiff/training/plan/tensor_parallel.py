"""What a rank of tensor parallelism has of a model without memory, for plans; `blockdiff.parallel.tensor` does it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.layers.fp8 import SCALE
from blockdiff.models.family import family_of
from blockdiff.training.plan.work import Work
from blockdiff.training.recipe import Recipe


def one_rank(objective: Any, recipe: Recipe, work: Work | None = None) -> Any:
    """An objective without memory whose model has a rank's part of every layer; itself without tensor parallelism.

    What the ranks exchange is added to `work`. Of heads that are fewer than ranks a rank has one.
    """
    size = recipe.parallel.tensor
    if size == 1:
        return objective
    objective = copy.deepcopy(objective)
    parts = family_of(objective.model.config).tensor_parts
    for name, module in list(objective.model.named_modules()):
        kind = next((kind for pattern, kind in parts.items() if fnmatchcase(name, pattern)), None)
        if kind is not None:
            _SHRINKS[kind](module, size)
            if work is not None:
                module.register_forward_hook(lambda _, args, out: _count(work, out, size))
    return objective


def _count(work: Work, out: Any, size: int) -> None:
    """A sum over the ranks in the forward, and one in the backward."""
    out = out[0] if isinstance(out, tuple) else out
    if isinstance(out, Tensor):
        work.exchanged += (2 if torch.is_grad_enabled() else 1) * 2 * out.nbytes * (size - 1) / size


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


_SHRINKS: dict[str, Callable[[Any, int], None]] = {
    "attention": _attention,
    "mlp": _mlp,
    "experts": _experts,
    "vocabulary": _vocabulary,
}
