"""DiffusionGemma as a family: its config, read and checked field by field, and the family's decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from blockdiff.errors import CheckpointError
from blockdiff.models.config_checks import (
    LARGEST,
    image_sizes_out_of_range,
    other_values,
    refuse_first,
    sizes_out_of_range,
    wrong_rope,
)
from blockdiff.models.diffusion_gemma.images import GemmaImages
from blockdiff.models.diffusion_gemma.model import ACTIVATIONS, KINDS, DiffusionGemma
from blockdiff.models.diffusion_gemma.names import NAMES
from blockdiff.models.family import Family, for_transformers, written_out

if TYPE_CHECKING:
    from transformers import DiffusionGemmaConfig

# Fields that must have the released model's value, which is all that we implement. The last two are Gemma 4's, which
# transformers' class does not declare but keeps if a file has them.
ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0, None),
    "use_bidirectional_attention": (None, "vision"),
    "use_double_wide_mlp": (False, None),
    "num_kv_shared_layers": (0, None),
}
# Sizes that must be at least 1 if a file has them.
SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "sliding_window"),
    *("num_key_value_heads", "num_global_key_value_heads", "head_dim", "global_head_dim", "max_position_embeddings"),
    *("num_experts", "top_k_experts", "moe_intermediate_size"),
}
# RoPE types, and the parameters in addition to `rope_theta` that each may have.
ROPES = {"default": (), "linear": ("factor",), "proportional": ("factor", "partial_rotary_factor")}


@dataclass(frozen=True)
class Heads:
    """The key heads of one layer, and the width of all its heads."""

    num_key_value_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class DiffusionGemmaFamily(Family):
    """DiffusionGemma, and the config of one of its models: the fields of `text_config` and of the top level.

    layer_types: of each layer, a key of KINDS; heads: of each layer; rope_parameters: of each layer type.
    """

    model_type = "diffusion_gemma"
    architecture = "DiffusionGemmaForBlockDiffusion"
    model_class = DiffusionGemma
    names = NAMES
    parts: ClassVar = {
        "images": ("image_side.*",),
        "layer_scalars": ("layers.*_scalar",),
        "router": ("layers.*.router.*",),
        "experts": ("layers.*.experts.*",),
        "self_conditioning": ("self_conditioning.*",),
        "norms": ("*norm.weight",),
        "attention": ("layers.*.attention.*",),
        "mlp": ("layers.*.mlp.*",),
        "embedding": ("vocabulary.*",),
    }
    adapted_parts = ("attention", "mlp", "experts", "self_conditioning", "images")
    quantised_parts = ("attention", "mlp", "experts")
    tensor_parts: ClassVar = {
        "layers.*.attention": "attention",
        "layers.*.mlp": "mlp",
        "self_conditioning": "mlp",
        "layers.*.experts": "experts",
        "vocabulary": "vocabulary",
    }
    sharding_units = ("image_side", "layers.{}.experts", "layers.{}", "vocabulary")
    predictions = ("posterior", "leave_one_out")
    corruptions = ("uniform", "mask")
    meshes = ("replicate", "shard", "experts", "tensor")
    image_spellings: ClassVar = {
        "boi_token_id": "<|image>",
        "image_token_id": "<|image|>",
        "eoi_token_id": "<image|>",
    }

    hidden_activation: str
    layer_types: tuple[str, ...]
    heads: tuple[Heads, ...]
    rope_parameters: Mapping[str, Mapping[str, Any]]
    sliding_window: int
    moe_intermediate_size: int
    final_logit_softcapping: float | None
    use_bidirectional_attention: str | None
    boi_token_id: int
    image_token_id: int
    eoi_token_id: int

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Return the config, given the content of a config.json with either form of the global-head fields."""
        for name, value in cls.text_of(dict(values)).items():
            most = LARGEST.get(name, 2**31)
            if isinstance(value, int) and value > most:
                raise CheckpointError(f"text_config.{name} is {value}; at most {most} is supported")
        refuse_first(_wrong_sizes(values.get("canvas_length"), values["text_config"]))
        refuse_first(image_sizes_out_of_range(values.get("vision_config")))
        theirs = cls.as_transformers(values)
        refuse_first(_wrong(theirs))
        text: Any = theirs.text_config
        of_layers, of_most = [text.per_layer_config[layer] for layer in range(text.num_hidden_layers)], text.to_dict()
        return cls.of(
            values,
            text,
            canvas_length=theirs.canvas_length or 256,
            denoises=True,
            num_key_value_heads=of_most["num_key_value_heads"],
            head_dim=of_most["head_dim"],
            rope_theta=next(each["rope_theta"] for each in text.rope_parameters.values()),
            experts=text.num_experts,
            experts_per_token=text.top_k_experts,
            layer_types=tuple(text.layer_types),
            heads=tuple(Heads(each.num_key_value_heads, each.head_dim) for each in of_layers),
            use_bidirectional_attention=getattr(text, "use_bidirectional_attention", None),
            boi_token_id=theirs.boi_token_id,
            image_token_id=theirs.image_token_id,
            eoi_token_id=theirs.eoi_token_id,
        )

    @classmethod
    def text_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(text := values.get("text_config"), dict):
            raise CheckpointError("no text_config")
        return text

    @classmethod
    def as_transformers(cls, values: Mapping[str, Any]) -> DiffusionGemmaConfig:
        """Return transformers' config for the content of a config.json; transformers' own errors are passed on.

        It lacks the config of the image side, whose class takes two seconds to import.
        """
        from transformers import PreTrainedConfig
        from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig

        content = for_transformers(values) | {"vision_config": PreTrainedConfig()}
        return DiffusionGemmaConfig(**content)  # `from_dict` would also write it out, for a log that nobody reads

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return written_out(cls.as_transformers(values)) | {"vision_config": values.get("vision_config")}

    @property
    def cached_per_token(self) -> int:
        return sum(2 * each.num_key_value_heads * each.head_dim for each in self.heads)

    @property
    def lines(self) -> tuple[str, ...]:
        layers, sliding = self.num_hidden_layers, self.layer_types.count("sliding_attention")
        return (
            f"{layers} layers ({sliding} sliding, window {self.sliding_window}; {layers - sliding} full), "
            f"hidden {self.hidden_size}, vocabulary {self.vocab_size:,}, canvas {self.canvas_length}",
            f"{self.experts} experts of {self.moe_intermediate_size}, {self.experts_per_token} per token, "
            f"beside a dense MLP of {self.intermediate_size}; {self.num_attention_heads} query heads",
        )

    def image_side(self) -> GemmaImages:
        return GemmaImages(for_transformers(self.values.get("vision_config") or {}), self.as_transformers(self.values))

    def image_tokens(self) -> tuple[int, int, int] | None:
        tokens = self.boi_token_id, self.image_token_id, self.eoi_token_id
        return None if None in tokens or max(tokens) >= self.vocab_size else tokens


def _wrong(theirs: Any) -> Iterator[str]:
    """Yield the reasons why a config is refused: values for which our model would differ from transformers'."""
    text = theirs.text_config
    yield from _wrong_sizes(theirs.canvas_length, text.to_dict())
    if not theirs.tie_word_embeddings:
        yield "tie_word_embeddings is false; only tied weights are supported"
    yield from other_values(text, ONE_VALUE, "text_config.")
    if text.hidden_activation not in ACTIVATIONS:
        yield _one_of("hidden_activation", text.hidden_activation, ACTIVATIONS)
    for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        if not getattr(text, name):
            yield f"text_config.{name} is {getattr(text, name)!r}; every layer has experts, say how many"
    if text.top_k_experts > text.num_experts:
        yield f"text_config.top_k_experts is {text.top_k_experts}, but there are {text.num_experts} experts"
    for kind in text.layer_types:
        if kind not in KINDS:
            yield _one_of("layer_types", kind, KINDS)
    yield from _wrong_heads(text)
    for kind in dict.fromkeys(text.layer_types):
        of_kind = (text.rope_parameters or {}).get(kind)
        yield from wrong_rope(of_kind, ROPES, f"text_config.rope_parameters.{kind}")


def _wrong_sizes(canvas_length: Any, text: Mapping[str, Any]) -> Iterator[str]:
    """Yield a reason for each size below 1, and for overrides of layers that do not exist, which transformers looks up.

    text: the fields of `text_config`.
    """
    sizes = {"canvas_length": canvas_length} | {f"text_config.{name}": text.get(name) for name in sorted(SIZES)}
    for name, size in sizes.items():
        if isinstance(size, int) and size < 1:
            yield f"{name} is {size}; it must be at least 1"
    layers, by_layer = text.get("num_hidden_layers"), text.get("per_layer_config")
    if not isinstance(by_layer, Mapping) or not isinstance(layers, int):
        return
    for layer, overrides in by_layer.items():
        if isinstance(overrides, Mapping):
            yield from sizes_out_of_range(overrides, sorted(overrides), f"text_config.per_layer_config.{layer}.")
        if not str(layer).isdecimal() or int(layer) >= layers:
            yield f"text_config.per_layer_config names layer {layer!r}, but there are {layers} layers, counted from 0"


def _wrong_heads(text: Any) -> Iterator[str]:
    for layer, overrides in (text.to_dict().get("per_layer_config") or {}).items():
        for name in overrides.keys() - {"head_dim", "num_key_value_heads"}:
            yield f"text_config.per_layer_config: {name} of layer {layer} is its own; only heads may differ by layer"
    sizes: dict[str, int] = {}
    for layer, kind in enumerate(text.layer_types):
        heads = text.per_layer_config[layer]
        if heads.head_dim != sizes.setdefault(kind, heads.head_dim) or heads.head_dim % 2:
            yield f"text_config: head_dim of layer {layer} is {heads.head_dim}; it must be even and one for all {kind}"
        if heads.num_key_value_heads < 1 or text.num_attention_heads % heads.num_key_value_heads:
            yield (
                f"text_config: layer {layer} has {text.num_attention_heads} query heads, which "
                f"{heads.num_key_value_heads} num_key_value_heads do not divide"
            )


def _one_of(name: str, value: str, known: Mapping[str, str]) -> str:
    return f"text_config.{name} {value!r} is not supported; there are: {', '.join(known)}"
