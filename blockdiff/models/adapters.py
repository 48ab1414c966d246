"""Adapters of a whole model: choosing their modules, adding, disabling, filling and merging them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from blockdiff.errors import CheckpointError
from blockdiff.layers.experts import Experts
from blockdiff.layers.linear import Linear
from blockdiff.layers.lora import LowRank, draw_low_rank, is_low_rank
from blockdiff.layers.weights import HasWeights
from blockdiff.models.image_side import IMAGE_SIDE
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.tensor_pieces import fill_piece, gathered, is_spread

TOKEN_ROWS = "vocabulary.token_rows"


def targets(model: BlockDiffusionModel, parts: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """Return the modules of the named parts that can be adapted, with their settings; experts have no dropout.

    Raises CheckpointError for a part that the family has no adapters for, and for a rank above its matrices' rank.
    """
    config = model.config
    modules: dict[str, LowRank] = {}
    for part, low_rank in parts.items():
        if part not in config.adapted_parts:
            there = ", ".join(config.adapted_parts) or "none"
            raise CheckpointError(f"{config.model_type} has no adapters for the part {part!r} (there are: {there})")
        widest = 0
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | Experts) and config.part_of(f"{name}.{_leaf(module)}") == part:
                modules[name] = replace(low_rank, dropout=0.0) if isinstance(module, Experts) else low_rank
                if isinstance(module, HasWeights):
                    shapes = [module.held(weight).shape for weight in module.WEIGHTS]
                else:
                    shapes = [module.weight.shape]
                widest = max(widest, *(min(shape[-2:]) for shape in shapes))
        if widest and low_rank.rank > widest:
            raise CheckpointError(
                f"rank {low_rank.rank:,} of the part {part!r} is more than its matrices have ({widest:,}); lower it"
            )
    return modules


def adapt(model: BlockDiffusionModel, modules: Mapping[str, LowRank], tokens: Sequence[int] = ()) -> None:
    """Add adapters to the named modules, in place, and freeze everything else.

    torch's linear layers, as in image towers, become ours (`Linear.of`). tokens: ids whose rows of the embedding table
    train, too. The adapters are unfilled (see `draw_adapters`). Raises CheckpointError for a module that cannot be
    adapted or has an adapter already, and for adapters of noisy tokens only on a model or part without noisy tokens.
    """
    if any(low_rank.noisy_only for low_rank in modules.values()):
        if not model.denoises:
            raise CheckpointError("adapters of noisy tokens only, and a causal model has no noisy tokens")
        if any(name.startswith(IMAGE_SIDE) for name in modules):
            raise CheckpointError("adapters of noisy tokens only, and images are clean; leave the image side out")
        if tokens:
            raise CheckpointError("adapters of noisy tokens only, and rows of the table are of clean ones, too")
    known = dict(model.named_modules())
    model.requires_grad_(False)
    for name, low_rank in modules.items():
        module = known.get(name)
        if isinstance(module, nn.Linear) and not isinstance(module, Linear):
            module = Linear.of(module)
            model.set_submodule(name, module)
        if not isinstance(module, HasWeights):
            raise CheckpointError(f"{name} is no linear layer or experts of this model, so it has no adapter")
        if module.low_rank is not None:
            raise CheckpointError(f"{name} has an adapter already; merge it first")
        module.adapt(low_rank)
    if tokens:
        outside = [token for token in tokens if not 0 <= token < model.vocab_size]
        if outside:
            raise CheckpointError(f"token {outside[0]} is not one of the model's {model.vocab_size} ids")
        model.vocabulary.train_rows(tokens)


def adapters_of(model: BlockDiffusionModel) -> dict[str, HasWeights]:
    """Return the adapted modules of a model by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, HasWeights) and m.low_rank is not None}


def is_adapted(model: BlockDiffusionModel) -> bool:
    """Whether a model has adapters, or trained rows of the embedding table."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


@contextmanager
def without_adapters(model: BlockDiffusionModel) -> Iterator[None]:
    """Disable a model's adapters inside the `with` block, bit-exactly; trained rows of the table stay in use."""
    adapted = [(module, module.low_rank) for module in adapters_of(model).values() if module.low_rank is not None]
    for module, low_rank in adapted:
        module.low_rank = replace(low_rank, alpha=0.0)
    try:
        yield
    finally:
        for module, low_rank in adapted:
            module.low_rank = low_rank


@contextmanager
def cast_once(model: nn.Module) -> Iterator[None]:
    """Cache the casts of adapters to the tokens' dtype inside the `with` block; do not change adapters there."""
    adapted = [module for module in model.modules() if isinstance(module, HasWeights) and module.low_rank is not None]
    for module in adapted:
        module.cast_cache = {}
    try:
        yield
    finally:
        for module in adapted:
            module.cast_cache = None


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter, including trained rows of the table."""
    return name == TOKEN_ROWS or is_low_rank(name)


def adapter_tensors(model: BlockDiffusionModel) -> dict[str, Tensor]:
    """Return the tensors of all adapters by our names."""
    return {name: tensor for name, tensor in model.state_dict().items() if is_adapter(name)}


@torch.no_grad()
def draw_adapters(model: BlockDiffusionModel, seed: int, device: torch.device, dtype: torch.dtype) -> None:
    """Fill new adapters so that the model's results do not change: B is 0, trained rows equal the table's.

    dtype: of the weights; adapters have at least fp32. The same seed gives the same values on every device.
    """
    wide = torch.promote_types(dtype, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    for module in adapters_of(model).values():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if is_low_rank(name):
                values = torch.zeros(parameter.shape)
                if name.endswith("A"):
                    draw_low_rank(values, generator)
                _fill(module, name, values.to(device, wide))
    vocabulary = model.vocabulary
    if vocabulary.token_rows is not None:
        rows = gathered(vocabulary.table)[list(vocabulary.token_ids)].to(device, wide, copy=True)
        _fill(vocabulary, "token_rows", rows)


def _fill(module: nn.Module, name: str, values: Tensor) -> None:
    """Set a parameter to values; if it is sharded, each rank's piece gets its part of them."""
    parameter = module.get_parameter(name)
    if is_spread(parameter):
        fill_piece(parameter, values)
    else:
        setattr(module, name, nn.Parameter(values, parameter.requires_grad))


def require_mergeable(low_ranks: Iterable[LowRank | None]) -> None:
    """Raise CheckpointError for adapters of noisy tokens only, since merging would change clean tokens, too."""
    if any(each is not None and each.noisy_only for each in low_ranks):
        raise CheckpointError(
            "the adapter is of noisy tokens only, so it cannot be added to weights that clean tokens share; "
            "use it beside its model (`--adapter`), and write it with `export --peft`"
        )


@torch.no_grad()
def merge(model: BlockDiffusionModel) -> None:
    """Add every adapter to its weights, in place, and remove the adapters.

    Sums are computed in at least fp32 and rounded once to the weights' dtype; stored weights become parameters of the
    model's dtype, because fewer bits would lose the adapter's change. Raises CheckpointError as `require_mergeable`.
    """
    require_mergeable(module.low_rank for module in adapters_of(model).values())
    for module in adapters_of(model).values():
        module.merge(model.dtype)
    model.vocabulary.merge_rows()
    model.requires_grad_(True)


def _leaf(module: nn.Linear | Experts) -> str:
    """Return the name of a weight of the module, which determines its part."""
    return "gate_up_proj" if isinstance(module, Experts) else "weight"
