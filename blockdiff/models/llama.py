"""Llama-like causal models: Llama and Qwen3, as they are on the Hub, or with what denoising needs added to them.

What is special about them:
- Pre-norm layers, `x + attention(norm(x))` then `x + mlp(norm(x))`; norms are cast before their weight multiplies.
- Attention scale d^-1/2. Qwen3 norms every query and key before RoPE; values are never normed.
- RoPE with llama3 scaling slows the frequencies that turn too seldom over the original positions.
- Embeddings are not scaled; the head may be a matrix of its own; logits are not soft-capped.
- Causal: such a model encodes, and its next-token predictions are what it samples with. Where the config has a
  `canvas_length` it denoises, too: an MLP without an outer norm adds the soft embedding of the last prediction to the
  canvas embedding, and each layer multiplies noisy tokens by its decoder scalar. With the MLP's output at zero and the
  scalars at 1, as `init --from` makes them, noisy tokens are computed like clean ones. The Hub has no names for these
  tensors, so they lie in blockdiff.safetensors and transformers loads the rest as the causal model that it is.

Config: transformers' `LlamaConfig` or `Qwen3Config`, with `canvas_length` beside its own fields where it denoises.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.layers.attention import KV, Attention, Past
from blockdiff.layers.mlp import MLP
from blockdiff.layers.norm import CastRMSNorm
from blockdiff.layers.rope import default_frequencies, llama3_frequencies
from blockdiff.models.causal import CausalModel, denoises, wrong_canvas_length
from blockdiff.models.config_checks import other_values, refuse_first, sizes_below_one, sizes_out_of_range, wrong_rope
from blockdiff.models.family import Capabilities, Family, Outline
from blockdiff.models.layer_kind import LayerKind, Rope
from blockdiff.models.model import layer_scalar, wanted
from blockdiff.models.names import Names
from blockdiff.spans import Spans, Sweep

# What a config may say: one value only, names there and in kernels/, RoPE types with the parameters each may have.
ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "attention_dropout": (0.0, None),
    "mlp_bias": (False, None),
    "use_bidirectional_attention": (False, None),
}
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
KINDS = {"full_attention": "full", "sliding_attention": "sliding"}
ROPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings"),
)


class Layer(nn.Module):
    """One layer, `layer(x, rope, spans, past, is_noisy) -> (x, kv)`: pure, but for pages that `past` has places in."""

    def __init__(self, config: Any, denoises: bool, kernels: Kernels):
        super().__init__()
        hidden, eps, head_dim = config.hidden_size, config.rms_norm_eps, config.head_dim
        self.input_norm = CastRMSNorm(hidden, eps, kernels)
        self.attention = Attention(
            hidden,
            config.num_attention_heads,
            config.num_key_value_heads,
            head_dim,
            has_value=True,
            eps=eps,
            kernels=kernels,
            qk_norm=None if config.model_type == "llama" else CastRMSNorm,
            norms_values=False,
            scale=head_dim**-0.5,
        )
        self.post_attention_norm = CastRMSNorm(hidden, eps, kernels)
        self.mlp = MLP(hidden, config.intermediate_size, kernels, ACTIVATIONS[config.hidden_act])
        self.encoder_scalar = None  # clean tokens are the causal model's
        self.decoder_scalar = nn.Parameter(torch.ones(1)) if denoises else None

    def forward(
        self, x: Tensor, rope: Rope, spans: Spans | Sweep, past: Past | None, is_noisy: bool | Tensor
    ) -> tuple[Tensor, KV]:
        """Of the residual x [B, T, D]: the next one, and the keys and values of these tokens.

        is_noisy: as `BlockDiffusionModel.forward` takes it; noisy tokens are multiplied by the decoder scalar.
        """
        attended, kv = self.attention(self.input_norm(x), rope, spans, past)
        x, is_noisy = wanted(x, is_noisy, attended.shape[1])
        x = x + attended
        x = x + self.mlp(self.post_attention_norm(x))
        scalar = layer_scalar(self, is_noisy, x.dtype)
        return x if scalar is None else x * scalar, kv


class Llama(CausalModel):
    """The stack of layers, causal, and with `config.canvas_length` a denoiser, too."""

    layer_class: type[Layer] = Layer

    def __init__(self, config: Any, kernels: str | Kernels = "auto"):
        check(config)
        super().__init__(config, kernels, config.intermediate_size, ACTIVATIONS[config.hidden_act])
        layers, self.leaves_clean_out = config.num_hidden_layers, self.layer_class is Layer
        self.layers = nn.ModuleList(self.layer_class(config, self.denoises, self.kernels) for _ in range(layers))
        self.norm = CastRMSNorm(config.hidden_size, config.rms_norm_eps, self.kernels)
        self.layer_kinds = tuple(KINDS[each] for each in layer_types(config))
        windows = {"full": None, "sliding": getattr(config, "sliding_window", None)}
        self.kinds = {
            name: LayerKind(name, windows[name], frequencies(config)) for name in dict.fromkeys(self.layer_kinds)
        }


def layer_types(config: Any) -> Sequence[str]:
    """The type of each layer; Llama's are all full."""
    return getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers


def frequencies(config: Any) -> Tensor:
    """The frequencies of RoPE, fp32 [d/2]."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        return llama3_frequencies(config.head_dim, rope["rope_theta"], rope)
    return default_frequencies(config.head_dim, rope["rope_theta"]) / rope.get("factor", 1.0)


# -- what a config may say -------------------------------------------------------------------------------------


def read(values: Mapping[str, Any], model_type: str) -> Any:
    """A config from the content of a config.json.

    Raises CheckpointError for values that are not supported, and what transformers raises for those that cannot be.
    """
    from transformers import LlamaConfig, Qwen3Config

    refuse_first(sizes_out_of_range(values, SIZES))
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[model_type](**json.loads(json.dumps(values)))
    check(config)
    return config


def check(config: Any) -> None:
    """Raises CheckpointError, naming the field, for a config that our model does not compute as transformers does."""
    refuse_first(_wrong(config))


def _wrong(config: Any) -> Iterator[str]:
    yield from other_values(config, ONE_VALUE)
    if config.hidden_act not in ACTIVATIONS:
        yield f"hidden_act {config.hidden_act!r} is not supported; there are: {', '.join(ACTIVATIONS)}"
    yield from sizes_below_one(config, SIZES)
    if config.head_dim % 2:
        yield f"head_dim is {config.head_dim}; it must be even"
    if config.num_attention_heads % config.num_key_value_heads:
        yield (
            f"num_key_value_heads {config.num_key_value_heads} does not divide num_attention_heads "
            f"{config.num_attention_heads}"
        )
    yield from wrong_canvas_length(config)
    if len(layer_types(config)) != config.num_hidden_layers:
        yield f"layer_types names {len(layer_types(config))} layers, but there are {config.num_hidden_layers}"
    for kind in layer_types(config):
        if kind not in KINDS:
            yield f"layer_types {kind!r} is not supported; there are: {', '.join(KINDS)}"
        elif kind == "sliding_attention" and not (getattr(config, "sliding_window", None) or 0) >= 1:
            yield f"sliding_window is {config.sliding_window!r}, but some layers slide; it must be at least 1"
    yield from wrong_rope(config.rope_parameters, ROPES, "rope_parameters")


def outline(config: Any) -> Outline:
    """The config in words that all families share."""
    kinds = list(layer_types(config))
    sliding = kinds.count("sliding_attention")
    layers = f"{len(kinds)} layers" + (f" ({sliding} sliding, window {config.sliding_window})" if sliding else "")
    canvas = f"canvas {config.canvas_length}" if denoises(config) else "causal"
    return Outline(
        vocab_size=config.vocab_size,
        canvas_length=getattr(config, "canvas_length", None) or 1,
        bos=config.bos_token_id,
        eos=config.eos_token_id,
        pad=config.pad_token_id,
        initializer_range=config.initializer_range,
        experts=0,
        experts_per_token=0,
        cached_per_token=2 * len(kinds) * config.num_key_value_heads * config.head_dim,
        positions=config.max_position_embeddings,
        lines=(
            f"{layers}, hidden {config.hidden_size}, vocabulary {config.vocab_size:,}, {canvas}",
            f"MLP of {config.intermediate_size}; {config.num_attention_heads} query heads, "
            f"{config.num_key_value_heads} key heads of {config.head_dim}",
        ),
        denoises=denoises(config),
    )


def with_tokens(config: Any, vocab_size: int, special: Mapping[str, int | None]) -> Any:
    """The config with another vocabulary; special: bos_token_id, eos_token_id and pad_token_id."""
    return read(config.to_dict() | {"vocab_size": vocab_size, **special}, config.model_type)


def with_canvases(config: Any, canvas_length: int) -> Any:
    """The config of the same model as a denoiser of canvases of so many tokens."""
    return read(config.to_dict() | {"canvas_length": canvas_length}, config.model_type)


# `{}` is the layer number. What denoising adds has no name on the Hub.
TABLE: tuple[tuple[str, str], ...] = (
    # ours                                      Hub
    ("vocabulary.table", "model.embed_tokens.weight"),
    ("vocabulary.head", "lm_head.weight"),
    ("norm.weight", "model.norm.weight"),
    ("layers.{}.input_norm.weight", "model.layers.{}.input_layernorm.weight"),
    ("layers.{}.post_attention_norm.weight", "model.layers.{}.post_attention_layernorm.weight"),
    ("layers.{}.attention.q_proj.weight", "model.layers.{}.self_attn.q_proj.weight"),
    ("layers.{}.attention.k_proj.weight", "model.layers.{}.self_attn.k_proj.weight"),
    ("layers.{}.attention.v_proj.weight", "model.layers.{}.self_attn.v_proj.weight"),
    ("layers.{}.attention.o_proj.weight", "model.layers.{}.self_attn.o_proj.weight"),
    ("layers.{}.attention.q_norm.weight", "model.layers.{}.self_attn.q_norm.weight"),
    ("layers.{}.attention.k_norm.weight", "model.layers.{}.self_attn.k_norm.weight"),
    ("layers.{}.mlp.gate_proj.weight", "model.layers.{}.mlp.gate_proj.weight"),
    ("layers.{}.mlp.up_proj.weight", "model.layers.{}.mlp.up_proj.weight"),
    ("layers.{}.mlp.down_proj.weight", "model.layers.{}.mlp.down_proj.weight"),
)


def _family(model_type: str, architecture: str) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        model_class=Llama,
        names=Names(TABLE, ties=(("lm_head.weight", "model.embed_tokens.weight"),)),
        parts={
            "layer_scalars": ("layers.*_scalar",),
            "self_conditioning": ("self_conditioning.*",),
            "norms": ("*norm.weight",),
            "attention": ("layers.*.attention.*",),
            "mlp": ("layers.*.mlp.*",),
            "head": ("vocabulary.head",),
            "embedding": ("vocabulary.*",),
        },
        adapted_parts=("attention", "mlp"),
        fp8_parts=("attention", "mlp"),
        sharding_units=("layers.{}", "vocabulary"),
        tensor_parts={
            "layers.*.attention": "attention",
            "layers.*.mlp": "mlp",
            "self_conditioning": "mlp",
            "vocabulary": "vocabulary",
        },
        capabilities=Capabilities(
            predictions=("posterior", "leave_one_out"),
            corruptions=("uniform", "mask"),
            meshes=("replicate", "shard", "tensor"),
        ),
        read=partial(read, model_type=model_type),
        check=check,
        outline=outline,
        with_tokens=with_tokens,
        with_canvases=with_canvases,
    )


FAMILIES = (_family("llama", "LlamaForCausalLM"), _family("qwen3", "Qwen3ForCausalLM"))
