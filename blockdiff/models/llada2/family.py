"""LLaDA2.x as a family: its config, checked field by field, and decisions.

A config.json has neither the mask, the end of an answer nor the length of a block: in the released code they are
arguments of `generate`. Here they are the released ones, or `mask_token_id`, `eos_token_id` and `canvas_length` of
config.json. Nothing is taken from the defaults of the released config class, which are another model's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from blockdiff.errors import CheckpointError
from blockdiff.models.causal import wrong_canvas_length
from blockdiff.models.config_checks import (
    is_above_zero,
    other_values,
    refuse_first,
    sizes_below_one,
    sizes_out_of_range,
)
from blockdiff.models.family import Family
from blockdiff.models.llada2.model import LLaDA2
from blockdiff.models.llada2.names import NAMES

CANVAS_LENGTH = 32
ANSWER_LENGTH = 512
MASK = 156895  # <|mask|> of the released vocabulary
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "moe_intermediate_size", "num_experts", "num_experts_per_tok"),
    *("num_shared_experts", "n_group", "topk_group"),
)
NUMBERS = ("rope_theta", "partial_rotary_factor", "routed_scaling_factor")
OTHERS = ("rms_norm_eps", "first_k_dense_replace", "use_bias")  # for which the released class has other defaults
# Fields that must have the released models' value.
ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_bias": (False,),
    "use_qkv_bias": (False, None),
    "use_qk_norm": (True,),
    "use_rmsnorm": (True,),
    "using_split_qkv_in_self_attention": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0.0, None),
    "embedding_dropout": (0.0, None),
    "output_dropout": (0.0, None),
    "score_function": ("sigmoid",),
    "moe_router_enable_expert_bias": (True,),
    "norm_topk_prob": (True,),
    "router_dtype": ("fp32",),
    "norm_head": (False, None),
    "norm_softmax": (False, None),
    "rope_scaling": (None,),
    "num_nextn_predict_layers": (0, None),
}


@dataclass(frozen=True, kw_only=True)
class LLaDA2Family(Family):
    """LLaDA2.0 and 2.1, and the config of one of its models.

    first_k_dense_replace: the number of layers, from the first on, with a dense MLP; n_group, topk_group: the number of
    groups of experts, and how many of them a token keeps; turned: the number of a head's dimensions that RoPE rotates.
    """

    model_type = "llada2_moe"
    architecture = "LLaDA2MoeModelLM"
    model_class = LLaDA2
    names = NAMES
    parts: ClassVar = {
        "router": ("layers.*.router.*",),
        "experts": ("layers.*.experts.*",),
        "norms": ("*norm.weight",),
        "attention": ("layers.*.attention.*",),
        "mlp": ("layers.*.mlp.*", "layers.*.shared.*"),
        "head": ("vocabulary.head",),
        "embedding": ("vocabulary.*",),
    }
    adapted_parts = ("attention", "mlp", "experts")
    quantised_parts = ("attention", "mlp", "experts")
    sharding_units = ("layers.{}.experts", "layers.{}", "vocabulary")
    tensor_parts: ClassVar = {
        "layers.*.attention": "attention",
        "layers.*.mlp": "mlp",
        "layers.*.shared": "mlp",
        "layers.*.experts": "experts",
        "vocabulary": "vocabulary",
    }
    predictions = ("posterior", "leave_one_out")
    corruptions = ("uniform", "mask")
    meshes = ("replicate", "shard", "experts", "tensor")
    has_self_conditioning = False
    default_strategy = "confident:threshold=0.95,greedy=true,confidence=0"
    prefixes = ("blocks",)
    # dFactory's: one noise level for a document, and the mean over its masks
    objective: ClassVar = {
        "time": {"stratified": {"low": 0.3, "high": 0.8, "per": "example"}},
        "positions": "corrupted",
        "normalisation": "corrupted",
    }

    first_k_dense_replace: int
    moe_intermediate_size: int
    num_shared_experts: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    turned: int
    tie_word_embeddings: bool

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        if values.get("image_token_offset") is not None:
            raise CheckpointError(
                "image_token_offset is of LLaDA2.0-Uni, which reads and makes images; LLaDA2.0 and 2.1 are supported"
            )
        theirs = _with_rope(values)
        refuse_first(_wrong(theirs))
        mask, pad = values.get("mask_token_id"), values.get("pad_token_id")
        if mask is None and theirs.vocab_size > MASK:
            mask = MASK
        return cls.of(
            values,
            theirs,
            canvas_length=values.get("canvas_length") or CANVAS_LENGTH,
            denoises=True,
            prefix=values.get("prefix") or "blocks",
            experts=theirs.num_experts,
            experts_per_token=theirs.num_experts_per_tok,
            turned=int(theirs.head_dim * theirs.partial_rotary_factor),
            tie_word_embeddings=bool(values.get("tie_word_embeddings")),
            initializer_range=values.get("initializer_range", 0.02),
            bos_token_id=values.get("bos_token_id"),
            eos_token_id=values.get("eos_token_id", pad),
            pad_token_id=pad,
            mask=mask,
            fill=pad,
        )

    @property
    def answer_length(self) -> int:
        return ANSWER_LENGTH

    @property
    def lines(self) -> tuple[str, ...]:
        dense = self.first_k_dense_replace
        return (
            f"{self.num_hidden_layers} layers ({dense} dense), hidden {self.hidden_size}, "
            f"vocabulary {self.vocab_size:,}, canvas {self.canvas_length}",
            f"{self.experts} experts of {self.moe_intermediate_size} in {self.n_group} groups, "
            f"{self.experts_per_token} per token, and {self.num_shared_experts} shared; "
            f"{self.num_attention_heads} query heads, {self.num_key_value_heads} key heads of {self.head_dim}",
        )


def _with_rope(values: Mapping[str, Any]) -> Any:
    """Return the fields of a config.json as attributes, including RoPE's if they are in `rope_parameters`."""
    rope = values.get("rope_parameters") or {}
    if "rotary_dim" in values and values.get("head_dim"):
        rope = {"partial_rotary_factor": values["rotary_dim"] / values["head_dim"], **rope}
    return SimpleNamespace(**(rope | dict(values)))


def _wrong(theirs: Any) -> Iterator[str]:
    """Yield the reasons why a config is refused: values that our model does not support, and missing fields."""
    for name in (*SIZES, *NUMBERS, *OTHERS):
        if not hasattr(theirs, name):
            yield f"no {name}, and the default of the released class is another model's; add it"
    yield from sizes_out_of_range(vars(theirs), SIZES)
    yield from sizes_below_one(theirs, SIZES)
    yield from other_values(theirs, ONE_VALUE)
    yield from wrong_canvas_length(theirs)
    for name in NUMBERS:
        if not is_above_zero(getattr(theirs, name)):
            yield f"{name} is {getattr(theirs, name)!r}; it must be a number above 0"
    layers, dense = theirs.num_hidden_layers, theirs.first_k_dense_replace
    if not isinstance(dense, int) or not 0 <= dense <= layers:
        yield f"first_k_dense_replace is {dense!r}, of {layers} layers"
    if theirs.num_attention_heads % theirs.num_key_value_heads:
        yield f"num_key_value_heads {theirs.num_key_value_heads} does not divide num_attention_heads"
    rope = getattr(theirs, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        yield f"rope_parameters: rope_type {rope['rope_type']!r} is not supported; there is: default"
    for name in rope.keys() & NUMBERS:
        if rope[name] != getattr(theirs, name):
            yield f"rope_parameters: {name} is {rope[name]!r}, and {getattr(theirs, name)!r} beside it"
    partial, head_dim = theirs.partial_rotary_factor, theirs.head_dim
    turned = head_dim * partial
    if turned != int(turned) or turned % 2 or turned > head_dim:
        yield f"partial_rotary_factor is {partial!r}, so {turned} of the {head_dim} dimensions of a head turn"
    if turned != getattr(theirs, "rotary_dim", turned):
        yield f"rotary_dim is {theirs.rotary_dim!r}, and partial_rotary_factor {partial!r}"
    experts, groups, top = theirs.num_experts, theirs.n_group, theirs.topk_group
    if experts % groups or experts // groups < 2 or top > groups:
        yield f"n_group is {groups} and topk_group {top}; {experts} experts do not divide so into groups of 2 or more"
    if not 2 <= theirs.num_experts_per_tok <= experts // groups * top:
        yield f"num_experts_per_tok is {theirs.num_experts_per_tok}, of {experts // groups * top} in the groups kept"
    mask = getattr(theirs, "mask_token_id", None)
    if mask is not None and (not isinstance(mask, int) or not 0 <= mask < theirs.vocab_size):
        yield f"mask_token_id is {mask!r}, which no token of the vocabulary is"
