"""SDAR as a family: the fields that its config adds to Qwen3's, and the family's decisions.

A config.json has the length of a block as `block_size` and the mask as `mask_token_id`. Early files have neither. Their
mask is the released vocabulary's. Their block must be set (`canvas_length` in blockdiff.json, `export
--canvas-length`), because models of blocks of 4 to 64 tokens were released with the same config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from blockdiff.models.config_checks import other_values, sizes_below_one
from blockdiff.models.llama import Qwen3Family
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.sdar.model import SDAR, SDARMoe
from blockdiff.models.sdar.names import DENSE, MOE

ANSWER_LENGTH = 512
MASK, VOCABULARY = 151669, 151936  # of the released models


@dataclass(frozen=True, kw_only=True)
class SDARFamily(Qwen3Family):
    """SDAR, dense, and the config of one of its models."""

    model_type = "sdar"
    architecture = "SDARForCausalLM"
    model_class: ClassVar[type[BlockDiffusionModel]] = SDAR
    names = DENSE
    prefixes = ("blocks",)
    has_self_conditioning = False
    length_key = "block_size"
    default_strategy = "confident:threshold=0.85,confidence=0,t_min=1,t_max=1"
    objective: ClassVar[Mapping[str, Any]] = {
        "time": {"stratified": {"low": 1e-3, "high": 1.0, "per": "example"}},
        "weight": "elbo",
        "positions": "corrupted",
    }

    @classmethod
    def as_transformers(cls, values: Mapping[str, Any]) -> Any:
        return super().as_transformers({name: value for name, value in values.items() if name != "model_type"})

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**super().completed(values), "model_type": cls.model_type}

    @classmethod
    def own_fields(cls, theirs: Any) -> dict[str, Any]:
        mask = getattr(theirs, "mask_token_id", None)
        return super().own_fields(theirs) | {
            "canvas_length": _block(theirs),
            "denoises": True,
            "prefix": "blocks",
            "mask": MASK if mask is None else mask,
            "fill": theirs.pad_token_id,
        }

    @classmethod
    def wrong(cls, theirs: Any) -> Iterator[str]:
        yield from super().wrong(theirs)
        yield from other_values(theirs, {"prefix": ("blocks", None)})
        block, other = _block(theirs), getattr(theirs, "canvas_length", None)
        if block is None:
            yield (
                "no block_size, and models of several were released with this config; write the model once with "
                '`blockdiff export MODEL --canvas-length 4 --output DIR`, or put {"canvas_length": 4} into a '
                "blockdiff.json beside its weights (SDAR-Chat, OPDLM: 4; else the number in the model's name)"
            )
        elif not isinstance(block, int) or block < 1:
            yield f"block_size is {block!r}; it must be a number of tokens"
        elif other not in (None, block):
            yield f"block_size is {block}, and canvas_length {other}; they are the same"
        mask = getattr(theirs, "mask_token_id", None)
        if mask is None and theirs.vocab_size < VOCABULARY:
            yield f"no mask_token_id; that of the released models is {MASK}, of {VOCABULARY:,} tokens"
        elif mask is not None and (not isinstance(mask, int) or not 0 <= mask < theirs.vocab_size):
            yield f"mask_token_id is {mask!r}, which no token of the vocabulary is"

    @property
    def answer_length(self) -> int:
        return ANSWER_LENGTH


def _block(theirs: Any) -> Any:
    """Return the length of a block, `block_size` or else `canvas_length`; None if the config has neither."""
    named = (getattr(theirs, name, None) for name in ("block_size", "canvas_length"))
    return next((length for length in named if length is not None), None)


@dataclass(frozen=True, kw_only=True)
class SDARMoeFamily(SDARFamily):
    """SDAR with experts, and the config of one of its models."""

    model_type = "sdar_moe"
    architecture = "SDARMoeForCausalLM"
    model_class: ClassVar[type[BlockDiffusionModel]] = SDARMoe
    names = MOE
    parts: ClassVar = {
        "router": ("layers.*.router.*",),
        "experts": ("layers.*.experts.*",),
        **{name: patterns for name, patterns in SDARFamily.parts.items() if name != "mlp"},
    }
    adapted_parts = ("attention", "experts")
    quantised_parts = ("attention", "experts")
    sharding_units = ("layers.{}.experts", "layers.{}", "vocabulary")
    tensor_parts: ClassVar = {
        "layers.*.attention": "attention",
        "layers.*.experts": "experts",
        "vocabulary": "vocabulary",
    }
    meshes = ("replicate", "shard", "experts", "tensor")
    transformers_class = "Qwen3MoeConfig"

    moe_intermediate_size: int

    @classmethod
    def own_fields(cls, theirs: Any) -> dict[str, Any]:
        experts = {"experts": theirs.num_experts, "experts_per_token": theirs.num_experts_per_tok}
        return super().own_fields(theirs) | experts

    @classmethod
    def wrong(cls, theirs: Any) -> Iterator[str]:
        yield from super().wrong(theirs)
        yield from sizes_below_one(theirs, ("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
        yield from other_values(theirs, {"norm_topk_prob": (True,), "decoder_sparse_step": (1,)})
        if theirs.mlp_only_layers:
            yield f"mlp_only_layers is {theirs.mlp_only_layers!r}; only layers with experts are supported"
        if theirs.num_experts_per_tok > theirs.num_experts:
            yield f"num_experts_per_tok is {theirs.num_experts_per_tok}, of {theirs.num_experts} experts"

    @property
    def lines(self) -> tuple[str, ...]:
        heads = f"{self.num_attention_heads} query heads, {self.num_key_value_heads} key heads of {self.head_dim}"
        experts = f"{self.experts} experts of {self.moe_intermediate_size}, {self.experts_per_token} per token"
        return super().lines[0], f"{experts}; {heads}"


class A2DQwen3Family(SDARFamily):
    """OPDLM: dense SDAR under another model type and class name, with another default threshold."""

    model_type = "a2d-qwen3"
    default_strategy = "confident:threshold=0.9,confidence=0,t_min=1,t_max=1"
    architecture = "A2DQwen3LMHeadModel"
