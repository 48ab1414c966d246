"""The image side of a model: drawn at random, built without weights, or filled with the model's carried tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from blockdiff.checkpoint.added import fill
from blockdiff.checkpoint.assembled import assembled, read_whole
from blockdiff.checkpoint.files import Carried
from blockdiff.errors import CheckpointError
from blockdiff.models.family import Family
from blockdiff.models.image_side import IMAGE_SIDE, ImageSide
from blockdiff.models.model import BlockDiffusionModel


def drawn_images(config: Family, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random image tensors by Hub name, initialised as in transformers; {} without an image side."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        side = config.image_side()
    state = {} if side is None else side.state_dict()
    return {
        str(config.names.to_hub(IMAGE_SIDE + name)): x.detach().to(dtype if x.is_floating_point() else x.dtype)
        for name, x in state.items()
    }


def empty_image_side(config: Family) -> ImageSide:
    """Return the image side of a config, frozen and on the meta device; CheckpointError if it has none."""
    with torch.device("meta"):
        side = config.image_side()
    if side is None:
        raise CheckpointError(f"this {config.model_type} takes no images: its config has no vision_config")
    return side.requires_grad_(False).eval()


def with_image_side(model: BlockDiffusionModel) -> BlockDiffusionModel:
    """Give a model its image side, filled with the image tensors that it carries; returns the model.

    Saving writes these tensors as before. On the meta device the image side has no weights. Raises CheckpointError if
    the model takes no images, if it carries no image tensors, and if FSDP2 has sharded it already.
    """
    if model.image_side is not None:
        return model
    if model.device.type == "meta":
        model.image_side = empty_image_side(model.config)
        return model
    if hasattr(model, "set_reshard_after_forward"):
        raise CheckpointError("images are not for a model whose weights are sharded without its image side")
    side = empty_image_side(model.config)
    names, carried = model.config.names, model.carried or Carried()
    stored = assembled(carried.stored, names)
    sources = {ours: str(names.to_hub(IMAGE_SIDE + ours)) for ours in side.state_dict()}
    if missing := [hub for hub in sources.values() if hub not in stored and hub not in carried.tensors]:
        raise CheckpointError(f"the model has no image tensors ({missing[0]} is missing); load a checkpoint with them")
    for ours, hub in sources.items():
        tensor = carried.tensors[hub] if hub in carried.tensors else read_whole(stored[hub], hub)
        there = side.state_dict()[ours]
        if tensor.shape != there.shape:
            sizes = list(tensor.shape), list(there.shape)
            raise CheckpointError(f"tensor {hub} has shape {sizes[0]}, the config asks for {sizes[1]}")
        fill(side, ours, tensor.to(model.device, model.dtype, copy=True))
    model.image_side = side.train(model.training)
    still_carried = {hub: x for hub, x in carried.tensors.items() if names.is_carried(hub, has_images=True)}
    still = {hub: in_file for hub, in_file in carried.stored.items() if names.is_carried(hub, has_images=True)}
    model.carried = replace(carried, stored=still, tensors=still_carried)
    return model
