"""Which layers of a model have weights that are stored in fewer bits, and in which form."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args

from torch import nn

from blockdiff.errors import CheckpointError
from blockdiff.layers.experts import Experts
from blockdiff.layers.linear import Linear
from blockdiff.layers.weights import FORMS, Form, HasWeights
from blockdiff.models.adapters import is_adapter
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.stored_forms import QUANTIZE, Quantize


def quantised_layers(model: BlockDiffusionModel, quantize: str | None) -> dict[str, Form]:
    """Return the layers that a value of `quantize` stores in fewer bits, each with its form.

    They are the layers of the family's `quantised_parts`; None and "none" store none. Raises CheckpointError for
    another value, for a model that has no such layers, and for inputs that are no multiple of a form's block.
    """
    if quantize is None or quantize == "none":
        return {}
    check_quantize(quantize)
    forms = layers_of(model, quantize)
    if not model.config.quantised_parts:
        raise CheckpointError(f"{model.config.model_type} has no weights in {quantize}; leave quantize out")
    of_linear, of_experts = QUANTIZE[quantize]
    if of_experts != of_linear and FORMS[of_experts] not in forms.values():
        raise CheckpointError(f"quantize={quantize!r}: it is for experts, and this model has no experts; use fp8")
    for name, form in forms.items():
        module = model.get_submodule(name)
        assert isinstance(module, HasWeights)
        inputs = [module.held(weight).shape[-1] for weight in module.WEIGHTS]
        if wrong := next((n for n in inputs if n % form.BLOCK), None):
            blocks = f"{wrong} inputs, and {quantize} stores blocks of {form.BLOCK}"
            raise CheckpointError(f"quantize={quantize!r}: {name} has {blocks}; use fp8")
    return forms


def layers_of(model: BlockDiffusionModel, quantize: str) -> dict[str, Form]:
    """Return the layers that a known value of `quantize` applies to, each with its form."""
    config, (of_linear, of_experts) = model.config, (FORMS[form] for form in QUANTIZE[quantize])
    return {
        name: of_experts if isinstance(module, Experts) else of_linear
        for name, module in model.named_modules()
        if isinstance(module, Linear | Experts) and config.part_of(f"{name}.weight") in config.quantised_parts
    }


def check_quantize(quantize: str | None) -> None:
    """Raise CheckpointError for an unknown value of `quantize`."""
    words = get_args(Quantize)
    if quantize is not None and quantize not in words:
        raise CheckpointError(f"quantize={quantize!r} is not known; use {', '.join(words)} or leave it out")


def store(model: BlockDiffusionModel, forms: Mapping[str, Form]) -> None:
    """Replace the weights of the named layers by unfilled, frozen matrices of fewer bits. Call it before `adapt`."""
    for name, form in forms.items():
        module = model.get_submodule(name)
        assert isinstance(module, HasWeights)
        if module.stored is None:
            module.store(form)
            if isinstance(module, Linear):
                module.kernels = model.kernels


def stored_layers(model: nn.Module) -> dict[str, HasWeights]:
    """Return the layers of a model whose weights are stored in fewer bits, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, HasWeights) and module.stored is not None
    }


def rounded_bytes(model: BlockDiffusionModel, itemsize: int) -> dict[str, int]:
    """Return, for each value of `quantize` that the model allows, the bytes of its weights without adapters.

    itemsize: bytes per number of weights that stay unquantised.
    """
    sizes, weights = {}, {name: x for name, x in model.named_parameters() if not is_adapter(name)}
    for word in QUANTIZE:
        with suppress(CheckpointError):
            layers = quantised_layers(model, word)
            stored: dict[str, Any] = {
                name: layers[layer].empty_like(x)
                for name, x in weights.items()
                if (layer := name.rpartition(".")[0]) in layers and x.dim() > 1
            }
            others = sum(x.numel() for name, x in weights.items() if name not in stored)
            sizes[word] = others * itemsize + sum(part.nbytes for matrix in stored.values() for part in matrix)
    return sizes


def forms_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the forms in which a model stores weights, in the order of FORMS."""
    forms = {module.stored for module in stored_layers(model).values()}
    return tuple(word for word, form in FORMS.items() if form in forms)


def frozen_weights(model: nn.Module) -> dict[str, tuple[HasWeights, str]]:
    """Return, for each stored weight by its name in the model, its module and its name there."""
    return {
        f"{name}.{weight}": (module, weight)
        for name, module in stored_layers(model).items()
        for weight in module.WEIGHTS
    }
