"""`init`: a model with random weights from a preset or a config, image tensors included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, DiffusionGemmaConfig

from blockdiff.checkpoint.config import fitted, preset_config
from blockdiff.checkpoint.files import Carried
from blockdiff.checkpoint.read import empty, fill, resolve_device, resolve_dtype
from blockdiff.models.family import BlockDiffusionModel


def init(
    preset: str | Path | DiffusionGemmaConfig,
    seed: int = 0,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "auto",
    kernels: str = "auto",
) -> BlockDiffusionModel:
    """A model with random weights, in evaluation mode: see `draw_weights`.

    preset: a preset's name, a preset file, or a config. tokenizer: gives the vocabulary size and the special
    tokens (None: as the preset says). Raises CheckpointError.
    """
    config = preset if isinstance(preset, DiffusionGemmaConfig) else preset_config(preset)
    if tokenizer is not None:
        config = fitted(config, tokenizer)
    return draw_weights(empty(config, kernels), seed, dtype, device)


def draw_weights(
    model: BlockDiffusionModel,
    seed: int = 0,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "auto",
) -> BlockDiffusionModel:
    """Fill an empty model with random weights drawn from `seed`, the same ones on every device; returns it.

    Matrices are normal with the config's `initializer_range`, everything that only scales is 1. What is frozen stays
    frozen. Raises CheckpointError.
    """
    place, target = resolve_device(device), resolve_dtype(dtype)
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if _is_gain(name):
            values = torch.ones(tensor.shape)
        else:
            values = torch.randn(tensor.shape, generator=draw) * model.config.text_config.initializer_range
        fill(model, name, values.to(place, target))
    model.carried = Carried(tensors=image_tensors(model.config, seed, target))
    return model.eval()


def image_tensors(
    config: DiffusionGemmaConfig, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random image tensors by Hub name, as transformers initialises them; none without an image side."""
    if config.vision_config is None:
        return {}
    vision, text = AutoConfig.for_model(**config.vision_config.to_dict()), config.text_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tower = AutoModel.from_config(vision)
        width = getattr(vision, "output_proj_dims", vision.hidden_size)
        projection = torch.randn(text.hidden_size, width) * config.initializer_range
    tensors = {f"model.encoder.vision_tower.{name}": tensor for name, tensor in tower.state_dict().items()}
    tensors["model.encoder.embed_vision.embedding_projection.weight"] = projection
    return {name: t.detach().to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def _is_gain(name: str) -> bool:
    """True for what multiplies a signal elementwise: norm weights, router scales, layer scalars."""
    return name.endswith(("norm.weight", "scale", "scalar"))
