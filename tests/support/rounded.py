"""Models whose weights are rounded to a form of fewer bits in memory."""

from __future__ import annotations

from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.stored import quantised_layers, store, stored_layers


def rounded(model: BlockDiffusionModel, quantize: str) -> BlockDiffusionModel:
    """The model, whose weights are now stored as `load(quantize=)` stores them."""
    for layer, form in quantised_layers(model, quantize).items():
        weights = {leaf: weight.detach() for leaf, weight in model.get_submodule(layer).named_parameters()}
        store(model, {layer: form})
        for leaf, weight in weights.items():
            stored_layers(model)[layer].hold(leaf, form.nearest(weight))
    return model
