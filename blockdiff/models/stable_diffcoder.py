"""Stable-DiffCoder: Llama's layers with a prefix of blocks, in files of Llama's model type.

What is special about it:
- Its config.json differs from a Llama's by the class that `architectures` or `auto_map` names.
- Noisy tokens are computed like clean ones, and the last prediction is not read.
- The config has neither the mask nor the length of a block: in the released code they are arguments of `generate`.
  Here they are the released ones, or `mask_token_id` and `canvas_length` of config.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from blockdiff.models.config_checks import other_values
from blockdiff.models.llama import LlamaFamily

ANSWER_LENGTH, CANVAS_LENGTH = 512, 4
MASK = 5  # <[MASK_TOKEN]> of the released vocabulary


@dataclass(frozen=True, kw_only=True)
class StableDiffCoderFamily(LlamaFamily):
    """Stable-DiffCoder, and the config of one of its models."""

    model_type = "stable_diffcoder"
    architecture = "StableDiffcoderForCausalLM"
    prefixes = ("blocks",)
    has_self_conditioning = False
    default_strategy = "confident:threshold=0.95,greedy=true,confidence=0"

    @classmethod
    def is_of(cls, values: Mapping[str, Any]) -> bool:
        named = values.get("auto_map")
        classes = [*(values.get("architectures") or ()), *(named.values() if isinstance(named, Mapping) else ())]
        has_name = any(str(each).rsplit(".", 1)[-1] == cls.architecture for each in classes)
        return values.get("model_type") in ("llama", cls.model_type) and has_name

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**super().completed(values), "model_type": "llama", "architectures": [cls.architecture]}

    @classmethod
    def own_fields(cls, theirs: Any) -> dict[str, Any]:
        mask = getattr(theirs, "mask_token_id", None)
        return super().own_fields(theirs) | {
            "canvas_length": getattr(theirs, "canvas_length", None) or CANVAS_LENGTH,
            "denoises": True,
            "prefix": "blocks",
            "mask": MASK if mask is None else mask,
        }

    @classmethod
    def wrong(cls, theirs: Any) -> Iterator[str]:
        yield from super().wrong(theirs)
        yield from other_values(theirs, {"prefix": ("blocks", None)})
        mask = getattr(theirs, "mask_token_id", None)
        if mask is not None and (not isinstance(mask, int) or not 0 <= mask < theirs.vocab_size):
            yield f"mask_token_id is {mask!r}, which no token of the vocabulary is"

    @property
    def answer_length(self) -> int:
        return ANSWER_LENGTH


FAMILIES = (StableDiffCoderFamily,)
