"""Configs of DiffusionGemma: read, checked field by field, and put in words that all families share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from blockdiff.errors import CheckpointError
from blockdiff.models.config_checks import LARGEST, other_values, refuse_first, sizes_out_of_range, wrong_rope
from blockdiff.models.family import Outline

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
    from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig

# What has to be as the released model has it: the values that we implement. The last two are Gemma 4's, which
# transformers' class does not declare but keeps where a file has them.
ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attention_dropout": (0.0, None),
    "use_bidirectional_attention": (None, "vision"),
    "use_double_wide_mlp": (False, None),
    "num_kv_shared_layers": (0, None),
}
# What must be at least 1 where a file says it.
SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "sliding_window"),
    *("num_key_value_heads", "num_global_key_value_heads", "head_dim", "global_head_dim", "max_position_embeddings"),
    *("num_experts", "top_k_experts", "moe_intermediate_size"),
}
KINDS = {"sliding_attention": "sliding", "full_attention": "full"}  # layer types, and our names of the kinds
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}  # names there, and in kernels/
# RoPE types, and the parameters beside `rope_theta` that each may have.
ROPES = {"default": (), "linear": ("factor",), "proportional": ("factor", "partial_rotary_factor")}


def read(values: Mapping[str, Any]) -> DiffusionGemmaConfig:
    """A config from the content of a config.json, in both forms of the global-head fields.

    Raises CheckpointError for values that are not supported, and what transformers raises for those that cannot be.
    """
    from transformers.models.diffusion_gemma.configuration_diffusion_gemma import DiffusionGemmaConfig

    if not isinstance(values.get("text_config"), Mapping):
        raise CheckpointError("no text_config")
    for name, value in values["text_config"].items():
        most = LARGEST.get(name, 2**31)
        if isinstance(value, int) and value > most:
            raise CheckpointError(f"text_config.{name} is {value}; at most {most} is supported")
    refuse_first(_wrong_sizes(values.get("canvas_length"), values["text_config"]))
    own: dict[str, Any] = json.loads(json.dumps(values))
    if own.get("vision_config"):
        own["vision_config"] = _image_config(own["vision_config"])
    config = DiffusionGemmaConfig(**own)  # `from_dict` would also write it out, for a log that nobody reads
    check(config)
    return config


def check(config: DiffusionGemmaConfig) -> None:
    """Raises CheckpointError, naming the field, for a config that our model does not compute as transformers does."""
    refuse_first(_wrong(config))


def _wrong(config: Any) -> Iterator[str]:
    text = config.text_config
    yield from _wrong_sizes(config.canvas_length, text.to_dict())
    if not config.tie_word_embeddings:
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
    """Sizes that are 0 or less, and layers that are not there, which transformers looks up; text: the fields said."""
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


def _image_config(values: dict[str, Any]) -> PreTrainedConfig:
    """The image side's config, which is carried like its tensors: only writing it looks up its class.

    That class imports transformers' generation and torch's compiler, a second that sampling has no use for.
    """
    from transformers import AutoConfig, PreTrainedConfig

    class ImageConfig(PreTrainedConfig):
        model_type = values.get("model_type", "gemma4_vision")

        def to_dict(self) -> dict[str, Any]:
            return AutoConfig.for_model(**super().to_dict()).to_dict()

    return ImageConfig(**values)


def outline(config: Any) -> Outline:
    """The config in words that all families share."""
    text = config.text_config
    kinds = list(text.layer_types)
    sliding = kinds.count("sliding_attention")
    heads = [text.per_layer_config[layer] for layer in range(len(kinds))]
    return Outline(
        vocab_size=text.vocab_size,
        canvas_length=config.canvas_length or 256,
        bos=text.bos_token_id,
        eos=text.eos_token_id,
        pad=text.pad_token_id,
        initializer_range=text.initializer_range,
        experts=text.num_experts,
        experts_per_token=text.top_k_experts,
        cached_per_token=sum(2 * each.num_key_value_heads * each.head_dim for each in heads),
        positions=text.max_position_embeddings,
        lines=(
            f"{len(kinds)} layers ({sliding} sliding, window {text.sliding_window}; {len(kinds) - sliding} full), "
            f"hidden {text.hidden_size}, vocabulary {text.vocab_size:,}, canvas {config.canvas_length}",
            f"{text.num_experts} experts of {text.moe_intermediate_size}, {text.top_k_experts} per token, "
            f"beside a dense MLP of {text.intermediate_size}; {text.num_attention_heads} query heads",
        ),
    )


def with_tokens(config: DiffusionGemmaConfig, vocab_size: int, special: Mapping[str, int | None]) -> Any:
    """The config with another vocabulary; special: bos_token_id, eos_token_id and pad_token_id."""
    values = config.to_dict()
    values["text_config"] |= {"vocab_size": vocab_size, **special}
    return read(values)
