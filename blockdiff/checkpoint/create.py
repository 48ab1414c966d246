"""`init`: a model with random weights from a preset or a config, image tensors included."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, DiffusionGemmaConfig

from blockdiff.checkpoint.files import Carried, config_from, read_json
from blockdiff.checkpoint.read import fill, resolve_device, resolve_dtype
from blockdiff.errors import CheckpointError
from blockdiff.models.diffusion_gemma import DiffusionGemma


def init(
    preset: str | Path | DiffusionGemmaConfig,
    seed: int = 0,
    tokenizer: Any = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "auto",
    kernels: str = "auto",
) -> DiffusionGemma:
    """A model with random weights drawn from `seed`, in evaluation mode: the same ones on every device.

    Matrices are normal with the config's `initializer_range`, everything that only scales is 1.
    preset: a preset's name, a preset file, or a config. tokenizer: gives the vocabulary size and the special
    tokens (None: as the preset says). Raises CheckpointError.
    """
    config = preset if isinstance(preset, DiffusionGemmaConfig) else preset_config(preset)
    if tokenizer is not None:
        config = fitted(config, tokenizer)
    place, target = resolve_device(device), resolve_dtype(dtype)
    with torch.device("meta"):
        model = DiffusionGemma(config, kernels=kernels)
    draw = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if _is_gain(name):
            values = torch.ones(tensor.shape)
        else:
            values = torch.randn(tensor.shape, generator=draw) * config.text_config.initializer_range
        fill(model, name, values.to(place, target))
    model.carried = Carried(tensors=image_tensors(config, seed, target))
    return model.eval()


def presets() -> list[str]:
    """The names of all presets."""
    return sorted(file.stem for file in _preset_directory().glob("*.json"))


def preset_config(preset: str | Path) -> DiffusionGemmaConfig:
    """The config of a preset, by name or by file: a config.json with only what differs from the defaults.

    Raises CheckpointError for one that is not there or not valid.
    """
    file = Path(preset)
    if file.suffix != ".json":
        file = _preset_directory() / f"{preset}.json"
        if str(preset) not in presets():
            near = difflib.get_close_matches(str(preset), presets(), 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise CheckpointError(f"no preset {str(preset)!r}; {hint}There are: {', '.join(presets())}")
    elif not file.is_file():
        raise CheckpointError(f"{file}: no such preset file")
    return config_from(read_json(file), file)


def fitted(config: DiffusionGemmaConfig, tokenizer: Any) -> DiffusionGemmaConfig:
    """`config` with the vocabulary size and special tokens of `tokenizer`."""
    data = config.to_dict()
    data["text_config"]["vocab_size"] = len(tokenizer)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(tokenizer, key, None) is not None:
            data["text_config"][key] = getattr(tokenizer, key)
    return config_from(data, "preset")


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


def _preset_directory() -> Path:
    """recipes/presets: inside the package in an installed wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    places = [package / "recipes" / "presets", package.parent / "recipes" / "presets"]
    return next((place for place in places if place.is_dir()), places[0])
