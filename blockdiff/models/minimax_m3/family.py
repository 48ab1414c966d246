"""MiniMax M3 as two families, with and without an image side: their config, checked field by field, and decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from blockdiff.errors import CheckpointError
from blockdiff.kernels.expert_mlp.activations import oai
from blockdiff.models.causal import canvases, wrong_canvas_length
from blockdiff.models.config_checks import (
    image_sizes_out_of_range,
    is_above_zero,
    other_values,
    refuse_first,
    sizes_below_one,
    sizes_out_of_range,
)
from blockdiff.models.family import Family, for_transformers, written_out
from blockdiff.models.minimax_m3.images import AFTER, BEFORE, MiniMaxM3Images, processor_values
from blockdiff.models.minimax_m3.model import KINDS, MiniMaxM3
from blockdiff.models.minimax_m3.names import NAMES, TEXT_NAMES

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "dense_intermediate_size", "shared_intermediate_size"),
    *("num_local_experts", "num_experts_per_tok", "index_n_heads", "index_head_dim", "index_block_size"),
    *("index_topk_blocks",),
)
# How canvases select, the default first: each query for itself or all with the mean of the canvas's index queries, and
# whether the selection of a canvas's first step serves its other steps, too.
SELECTIONS: dict[str, tuple[Any, ...]] = {
    "canvas_selection": ("query", "canvas"),
    "canvas_selection_kept": (False, True),
}
# Fields that must have the released model's value. transformers declares only some, but keeps all that a file has.
ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0.0, None),
    "router_jitter_noise": (0.0, None),
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "attention_output_gate": (False, None),
    "scoring_func": ("sigmoid",),
    "use_routing_bias": (True,),
    "n_shared_experts": (1,),
}


@dataclass(frozen=True, kw_only=True)
class MiniMaxM3Family(Family):
    """MiniMax M3, and the config of one of its models: the fields of `text_config` and of the top level.

    layer_types: of each layer, a key of KINDS; mlp_layer_types: "dense" or "sparse" of each layer; image_token: the
    token for each part of an image (None: there is no image side). canvas_selection: "query" if each query of a canvas
    selects blocks of the prefix for itself, "canvas" if all select with the mean of the canvas's index queries;
    canvas_selection_kept: whether the selection of a canvas's first denoising step serves its other steps, too.
    """

    model_type = "minimax_m3_vl"
    architecture = "MiniMaxM3SparseForConditionalGeneration"
    model_class = MiniMaxM3
    names = NAMES
    parts: ClassVar = {
        "images": ("image_side.*",),
        "layer_scalars": ("layers.*_scalar",),
        "router": ("layers.*.router.*",),
        "experts": ("layers.*.experts.*",),
        "self_conditioning": ("self_conditioning.*",),
        "indexer": ("layers.*.indexer.*",),
        "norms": ("*norm.weight",),
        "attention": ("layers.*.attention.*",),
        "mlp": ("layers.*.mlp.*", "layers.*.shared.*"),
        "head": ("vocabulary.head",),
        "embedding": ("vocabulary.*",),
    }
    adapted_parts = ("attention", "mlp", "experts", "images")
    selecting_parts = ("indexer",)
    quantised_parts = ("attention", "mlp", "experts")
    sharding_units = ("image_side", "layers.{}.experts", "layers.{}", "vocabulary")
    tensor_parts: ClassVar = {
        "layers.*.attention": "attention",
        "layers.*.mlp": "mlp",
        "layers.*.shared": "mlp",
        "layers.*.experts": "experts",
        "self_conditioning": "mlp",
        "vocabulary": "vocabulary",
    }
    predictions = ("posterior", "leave_one_out")
    corruptions = ("uniform", "mask")
    meshes = ("replicate", "shard", "experts", "tensor")
    place_of_text: ClassVar[str] = "text_config."  # begins the names of the text side's fields in messages

    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool
    dense_intermediate_size: int
    shared_intermediate_size: int
    routed_scaling_factor: float
    swiglu_alpha: float
    swiglu_limit: float
    index_n_heads: int
    index_head_dim: int
    index_block_size: int
    index_topk_blocks: int
    index_init_blocks: int = 0
    index_local_blocks: int
    index_score_type: str = "max"
    canvas_selection: str
    canvas_selection_kept: bool
    image_token: int | None

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Return the config, given the content of a config.json; its `quantization_config` (MXFP8) is dropped."""
        values = {key: value for key, value in values.items() if key != "quantization_config"}
        text, where = cls.text_of(values), cls.place_of_text
        refuse_first(sizes_out_of_range(text, SIZES, where))
        refuse_first(image_sizes_out_of_range(values.get("vision_config")))
        metric_values = (text.get("sparse_attention_config") or {}).get("sparse_disable_index_value", 1)
        carry = [not off for off in metric_values] if isinstance(metric_values, list) else [not metric_values]
        if any(carry):
            raise CheckpointError(f"{where}sparse_attention_config: layers whose index path carries values are refused")
        theirs = cls.as_transformers(values)
        refuse_first(_wrong(theirs))
        of_text, has_images = theirs.get_text_config(), getattr(theirs, "vision_config", None) is not None
        return cls.of(
            values,
            of_text,
            **canvases(theirs),
            rope_theta=of_text.rope_parameters["rope_theta"],
            experts=of_text.num_local_experts,
            experts_per_token=of_text.num_experts_per_tok,
            layer_types=tuple(of_text.layer_types),
            mlp_layer_types=tuple(of_text.mlp_layer_types),
            tie_word_embeddings=bool(theirs.tie_word_embeddings),
            **{name: getattr(theirs, name, allowed[0]) for name, allowed in SELECTIONS.items()},
            image_token=theirs.image_token_index if has_images else None,
        )

    @classmethod
    def text_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(text := values.get("text_config"), dict):
            raise CheckpointError("no text_config")
        return text

    @classmethod
    def as_transformers(cls, values: Mapping[str, Any]) -> Any:
        """Return transformers' config for the content of a config.json; transformers' own errors are passed on."""
        content = for_transformers(values)
        text = cls.text_of(content)
        sparse = text.get("sparse_attention_config") or {}
        for ours, theirs in (("index_init_blocks", "sparse_init_block"), ("index_score_type", "sparse_score_type")):
            if theirs in sparse:  # transformers knows neither, and would drop them
                text.setdefault(ours, sparse[theirs])
        rope = text.get("rope_parameters") or {}
        if "partial_rotary_factor" not in rope and "partial_rotary_factor" not in text and "rotary_dim" in text:
            text["partial_rotary_factor"] = text["rotary_dim"] / text.get("head_dim", 128)
        return cls._made(content)

    @classmethod
    def _made(cls, values: dict[str, Any]) -> Any:
        from transformers import MiniMaxM3VLConfig

        return MiniMaxM3VLConfig(**values)

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return written_out(cls.as_transformers(values))

    @property
    def activation(self) -> str:
        """The name in `kernels.expert_mlp.activations` of SwiGLU-OAI with the config's alpha and limit."""
        return oai(self.swiglu_alpha, self.swiglu_limit)

    @property
    def cached_per_token(self) -> int:
        return super().cached_per_token + self.layer_types.count("minimax_m3_sparse") * self.index_head_dim

    @property
    def lines(self) -> tuple[str, ...]:
        layers, sparse = self.num_hidden_layers, self.layer_types.count("minimax_m3_sparse")
        canvas = f"canvas {self.canvas_length}" if self.denoises else "causal"
        if self.canvas_selection == "canvas":
            canvas += " with one selection"
        return (
            f"{layers} layers ({sparse} sparse: {self.index_topk_blocks} blocks of {self.index_block_size} keys), "
            f"hidden {self.hidden_size}, vocabulary {self.vocab_size:,}, {canvas}",
            f"{self.experts} experts of {self.intermediate_size}, {self.experts_per_token} per token, "
            f"beside a shared one of {self.shared_intermediate_size}; {self.num_attention_heads} query heads",
        )

    def image_side(self) -> MiniMaxM3Images | None:
        return None if self.image_token is None else MiniMaxM3Images(self.as_transformers(self.values))

    def image_tokens(self) -> tuple[str, int, str] | None:
        token = self.image_token
        return None if token is None or token >= self.vocab_size else (BEFORE, token, AFTER)

    @classmethod
    def image_processor(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return processor_values(values)


class MiniMaxM3TextFamily(MiniMaxM3Family):
    """The text side alone, as transformers' MiniMaxM3VLForCausalLM saves it."""

    model_type = "minimax_m3_vl_text"
    architecture = "MiniMaxM3VLForCausalLM"
    names = TEXT_NAMES
    place_of_text = ""

    @classmethod
    def text_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        return values

    @classmethod
    def _made(cls, values: dict[str, Any]) -> Any:
        from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

        return MiniMaxM3VLTextConfig(**values)


def _wrong(theirs: Any) -> Iterator[str]:
    """Yield the reasons why a config is refused: values for which our model would differ from transformers'."""
    text = theirs.get_text_config()
    where = "" if text is theirs else "text_config."
    yield from other_values(text, ONE_VALUE, where)
    yield from sizes_below_one(text, SIZES, where)
    for heads in ("num_key_value_heads", "index_n_heads"):
        if text.num_attention_heads % getattr(text, heads):
            yield f"{where}{heads} {getattr(text, heads)} does not divide num_attention_heads"
    larger, smaller = sorted((text.index_n_heads, text.num_key_value_heads), reverse=True)
    if larger % smaller:
        yield f"{where}index_n_heads {text.index_n_heads} and num_key_value_heads must divide one another"
    if text.num_experts_per_tok > text.num_local_experts:
        yield f"{where}num_experts_per_tok is {text.num_experts_per_tok}, of {text.num_local_experts} experts"
    for name, known in (("layer_types", KINDS), ("mlp_layer_types", ("dense", "sparse"))):
        kinds = getattr(text, name)
        if len(kinds) != text.num_hidden_layers:
            yield f"{where}{name} names {len(kinds)} layers, but there are {text.num_hidden_layers}"
        for kind in kinds:
            if kind not in known:
                yield f"{where}{name} {kind!r} is not supported; there are: {', '.join(known)}"
    for name in ("index_init_blocks", "index_local_blocks"):
        if not isinstance(getattr(text, name, 0), int) or getattr(text, name, 0) < 0:
            yield f"{where}{name} is {getattr(text, name)!r}; it must be at least 0"
    if getattr(text, "index_score_type", "max") not in ("max", "lse"):
        yield f"{where}index_score_type is {text.index_score_type!r}; there are: max, lse"
    for name in ("swiglu_alpha", "swiglu_limit"):
        if not isinstance(getattr(text, name), int | float) or getattr(text, name) < 0:
            yield f"{where}{name} is {getattr(text, name)!r}; it must be at least 0"
    rope = text.rope_parameters or {}
    if not is_above_zero(rope.get("rope_theta")) or rope.get("rope_type", "default") != "default":
        yield f"{where}rope_parameters is {rope!r}; rope_type default with a rope_theta is supported"
    turned = int(text.head_dim * rope.get("partial_rotary_factor", 1.0))
    if turned < 2 or turned % 2 or turned > text.index_head_dim:
        yield f"{where}rope_parameters: {turned} dimensions turn; it must be even, and index heads as wide"
    yield from wrong_canvas_length(theirs)
    for name, values in SELECTIONS.items():
        if getattr(theirs, name, values[0]) not in values:
            yield f"{name} is {getattr(theirs, name)!r}; there are: {', '.join(map(str, values))}"
        if not getattr(theirs, "canvas_length", None) and getattr(theirs, name, values[0]) != values[0]:
            yield f"{name} is of canvases, which a causal model has none of; leave it out or give a canvas_length"
