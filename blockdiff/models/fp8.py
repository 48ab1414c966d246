"""A whole model in fp8: which layers can be, and putting their places there."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from blockdiff.errors import CheckpointError
from blockdiff.layers.experts import Experts
from blockdiff.layers.fp8 import Fp8Experts, Fp8Linear, InFp8
from blockdiff.models.family import family_of
from blockdiff.models.model import BlockDiffusionModel


def fp8_layers(model: BlockDiffusionModel) -> list[str]:
    """The names of the layers that fp8 is for: linear ones and experts of the family's `fp8_parts`.

    Raises CheckpointError for a family that has none.
    """
    family = family_of(model.config)
    if not family.fp8_parts:
        raise CheckpointError(f"{family.model_type} has no weights in fp8; leave quantize out")
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Experts) and family.part_of(f"{name}.weight") in family.fp8_parts
    ]


def put_in_fp8(model: BlockDiffusionModel, layers: Iterable[str]) -> None:
    """Put layers for weights in fp8 in the place of the named ones, without values. Adapters come afterwards."""
    for name in layers:
        module = model.get_submodule(name)
        if isinstance(module, InFp8):
            continue
        made: InFp8
        if isinstance(module, Experts):
            made = Fp8Experts(module)
        else:
            assert isinstance(module, nn.Linear)
            made = Fp8Linear(module, model.kernels)
        model.set_submodule(name, made.train(module.training))


def layers_in_fp8(model: nn.Module) -> dict[str, InFp8]:
    """The layers of a model whose weights are in fp8, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, InFp8)}
