"""`init`: make a model with random weights, image tensors included, from a preset or a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from blockdiff.checkpoint.added import beyond_family, draw_added, fill, tensor_shapes
from blockdiff.checkpoint.config import config_from, fitted, preset_config
from blockdiff.checkpoint.files import Carried
from blockdiff.checkpoint.images import drawn_images
from blockdiff.checkpoint.read import empty, require_dtype, require_room, resolve_dtype
from blockdiff.devices import resolve_device
from blockdiff.errors import CheckpointError
from blockdiff.layers.weights import dtype_of
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel


def init(
    preset: Any,
    seed: int = 0,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "auto",
    kernels: str = "auto",
    model: type[BlockDiffusionModel] | None = None,
) -> BlockDiffusionModel:
    """Return a model with random weights, in evaluation mode: see `empty` and `draw_weights`.

    preset: a preset's name, a preset file, or a config, ours or transformers'. tokenizer: sets the vocabulary size and
    the special tokens (None: they are the preset's). Raises CheckpointError.
    """
    config = preset_config(preset) if isinstance(preset, str | Path) else preset
    if not hasattr(config, "to_dict"):
        raise CheckpointError(f"init: {preset!r} is no preset; give a preset's name, a preset file or a config")
    if not isinstance(config, Family):
        config = config_from(config.to_dict(), "init")
    if tokenizer is not None:
        config = fitted(config, tokenizer)
    return draw_weights(empty(config, kernels, model), seed, dtype, device)


def draw_weights(
    model: BlockDiffusionModel,
    seed: int = 0,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "auto",
) -> BlockDiffusionModel:
    """Fill an empty model with random weights drawn from `seed`, equal on every device; returns it in evaluation mode.

    Matrices are normal with standard deviation `initializer_range`, scales change nothing (see `_neutral`), and
    `reset_parameters` sets the tensors that the model's class adds to its family. Frozen parameters stay frozen. Raises
    CheckpointError.
    """
    target_device, target = resolve_device(device), resolve_dtype(dtype)
    require_dtype(model, target)
    require_room(model, target, target_device)
    config, draw = model.config, torch.Generator().manual_seed(seed)
    spread = config.initializer_range
    added = beyond_family(model)
    draw_added(model, seed, target, target_device)
    images = drawn_images(model.config, seed, target)
    for name, shape in tensor_shapes(model).items():
        if name in added:
            continue
        # all ranks draw the same, and keep their own part
        of_image = images.pop(str(config.names.to_hub(name)), None)
        values = drawn(model, name, shape, draw, spread) if of_image is None else of_image
        fill(model, name, values.to(target_device, dtype_of(name, target)))
    model.carried = Carried(tensors=images)
    return model.eval()


def drawn(
    model: BlockDiffusionModel, name: str, shape: tuple[int, ...], draw: torch.Generator, spread: float
) -> torch.Tensor:
    """Return initial fp32 values of tensor `name`: normal with standard deviation `spread`, or neutral (`_neutral`)."""
    neutral = _neutral(model, name)
    return torch.randn(shape, generator=draw) * spread if neutral is None else torch.full(shape, neutral)


def _neutral(model: BlockDiffusionModel, name: str) -> float | None:
    """Return the value with which an elementwise scale or bias changes nothing; None for matrices.

    These are norm weights, router scales, layer scalars (1, or 0 if a norm adds its weight to 1) and biases (0).
    """
    if name.endswith("norm.weight"):
        return float(getattr(model.get_submodule(name.removesuffix(".weight")), "neutral", 1.0))
    return 1.0 if name.endswith(("scale", "scalar")) else 0.0 if name.endswith("bias") else None
