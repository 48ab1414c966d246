"""The settings of generation, with transformers' defaults and file format."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockdiff.diffusion.acceptance import EntropyBound
from blockdiff.diffusion.stopping import StableAndConfident
from blockdiff.diffusion.temperature import LinearTemperature
from blockdiff.errors import CheckpointError

FILE = "generation_config.json"


@dataclass(frozen=True)
class Generation:
    """How canvases are denoised and when a response ends.

    `max_steps` bounds the denoising steps of a canvas, `max_new_tokens` the response (rounded up to whole
    canvases); any of `eos_ids` ends a response; `pad_id` fills prompts of unequal length.
    """

    max_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability: int = 1
    confidence: float = 0.005
    max_new_tokens: int = 256
    eos_ids: tuple[int, ...] = field(default=())
    pad_id: int = 0

    def __post_init__(self) -> None:
        rules = {
            "max_steps must be at least 1": self.max_steps >= 1,
            "max_new_tokens must be at least 1": self.max_new_tokens >= 1,
            "entropy_bound must be more than 0": self.entropy_bound > 0,
            "t_min must be at least 0 and less than t_max": 0 <= self.t_min < self.t_max,
            "stability must be at least 0": self.stability >= 0,
            "confidence must be more than 0": self.confidence > 0,
        }
        for rule, is_met in rules.items():
            if not is_met:
                raise ValueError(f"{rule}: {self}")

    @property
    def temperature(self) -> LinearTemperature:
        """The temperature of each step."""
        return LinearTemperature(self.t_min, self.t_max)

    @property
    def acceptance(self) -> EntropyBound:
        """The rule that keeps sampled tokens."""
        return EntropyBound(self.entropy_bound)

    @property
    def stopping(self) -> StableAndConfident:
        """The rule that ends a canvas early."""
        return StableAndConfident(self.stability, self.confidence)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Generation:
        """The settings of a checkpoint directory or hub id: its generation_config.json over the defaults.

        CheckpointError when the file cannot be used.
        """
        file = Path(path) / FILE
        if not Path(path).is_dir():
            from transformers.utils import cached_file

            try:
                found = cached_file(str(path), FILE, _raise_exceptions_for_missing_entries=False)
            except OSError as error:
                raise CheckpointError(f"{path}: neither a directory nor a model on the Hub") from error
            file = Path(found) if found else file
        if not file.exists():
            return cls()
        try:
            return cls.from_dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{file}: {error}") from error

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Generation:
        """The settings from transformers' names, as `to_dict` gives them; ValueError if unusable."""
        if not isinstance(config, dict):
            raise ValueError(f"expected an object, got {type(config).__name__}")
        acceptance = config.get("sampler_config") or {}
        rule = acceptance.get("_cls_name", "EntropyBoundSamplerConfig")
        if rule != "EntropyBoundSamplerConfig":
            raise ValueError(f"sampler {rule!r} is not supported, only EntropyBoundSamplerConfig")
        eos = config.get("eos_token_id")
        values: dict[str, Any] = {
            "max_steps": config.get("max_denoising_steps"),
            "entropy_bound": acceptance.get("entropy_bound"),
            "t_min": config.get("t_min"),
            "t_max": config.get("t_max"),
            "stability": config.get("stability_threshold"),
            "confidence": config.get("confidence_threshold"),
            "max_new_tokens": config.get("max_new_tokens"),
            "eos_ids": None if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            "pad_id": config.get("pad_token_id"),
        }
        return cls(**{name: value for name, value in values.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """The settings in transformers' names, as generation_config.json holds them."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "max_denoising_steps": self.max_steps,
            "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": self.entropy_bound},
            "t_min": self.t_min,
            "t_max": self.t_max,
            "stability_threshold": self.stability,
            "confidence_threshold": self.confidence,
            "eos_token_id": list(self.eos_ids),
            "pad_token_id": self.pad_id,
        }
