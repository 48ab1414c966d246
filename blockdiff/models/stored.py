"""Which layers of a model have weights that are stored in fewer bits, and in which form."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from blockdiff.errors import CheckpointError
from blockdiff.layers.experts import Experts
from blockdiff.layers.linear import Linear
from blockdiff.layers.weights import FORMS, Form, HasWeights
from blockdiff.models.model import BlockDiffusionModel

# The words of `quantize`, beside "none": the forms of linear layers and of experts.
QUANTIZE = {"fp8": (FORMS["fp8"], FORMS["fp8"])}


def quantised_layers(model: BlockDiffusionModel, quantize: str | None) -> dict[str, Form]:
    """The layers that a word of `quantize` stores in fewer bits, each with its form: those of the family's `fp8_parts`.

    None and "none" store none. Raises CheckpointError for another word, and for a family that has no such layers.
    """
    if quantize is None or quantize == "none":
        return {}
    check_quantize(quantize)
    config = model.config
    if not config.fp8_parts:
        raise CheckpointError(f"{config.model_type} has no weights in {quantize}; leave quantize out")
    of_linear, of_experts = QUANTIZE[quantize]
    return {
        name: of_experts if isinstance(module, Experts) else of_linear
        for name, module in model.named_modules()
        if isinstance(module, Linear | Experts) and config.part_of(f"{name}.weight") in config.fp8_parts
    }


def check_quantize(quantize: str | None) -> None:
    """Raises CheckpointError for a form that is not known."""
    if quantize is not None and quantize not in (*QUANTIZE, "none"):
        words = ", ".join([*QUANTIZE, "none"])
        raise CheckpointError(f"quantize={quantize!r} is not known; use {words} or leave it out")


def store(model: BlockDiffusionModel, forms: Mapping[str, Form]) -> None:
    """Freeze the weights of layers in forms of fewer bits, without values. Adapters come afterwards."""
    for name, form in forms.items():
        module = model.get_submodule(name)
        assert isinstance(module, HasWeights)
        if module.stored is None:
            module.store(form)
            if isinstance(module, Linear):
                module.kernels = model.kernels


def stored_layers(model: nn.Module) -> dict[str, HasWeights]:
    """The layers of a model whose weights are stored in fewer bits, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, HasWeights) and module.stored is not None
    }


def frozen_weights(model: nn.Module) -> dict[str, tuple[HasWeights, str]]:
    """The stored weights of a model by name: the module and its name there."""
    return {
        f"{name}.{weight}": (module, weight)
        for name, module in stored_layers(model).items()
        for weight in module.WEIGHTS
    }
