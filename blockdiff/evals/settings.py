"""The settings, other than the rows, that decide the result of an evaluation, for its record."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import blockdiff

if TYPE_CHECKING:
    from blockdiff.sampling.sampler import Sampler

PACKAGES = ("torch", "transformers", "tokenizers")


def settings_record(sampler: Sampler) -> dict[str, Any]:
    """Return the sampler's settings as JSON values: model, strategy, generation, device and versions of libraries.

    Settings of a single call (seed, steps, limits) are in the report of `evaluate`.
    """
    model, generation = sampler.model, asdict(sampler.generation)
    return {
        "family": getattr(model.config, "model_type", None),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "canvas_length": model.canvas_length,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "generation": {**generation, "eos_ids": list(generation["eos_ids"])},
        "strategy": repr(sampler.strategy),
        "prediction": sampler.diffusion.prediction,
        "corruption": sampler.diffusion.corruption,
        "versions": {
            "python": platform.python_version(),
            "blockdiff": blockdiff.__version__,
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
    }
