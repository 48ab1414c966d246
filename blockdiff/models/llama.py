"""Llama-like causal models: Llama and Qwen3, as they are on the Hub, or with the weights added that denoising needs.

What is special about them:
- Pre-norm layers, `x + attention(norm(x))` then `x + mlp(norm(x))`; norms are cast before their weight multiplies.
- Attention scale d^-1/2. Qwen3 norms every query and key before RoPE; values are never normed.
- RoPE with llama3 scaling slows the frequencies that turn too seldom over the original positions; a family may have
  yarn, and queries that are scaled at far positions.
- Embeddings are not scaled; the head may be a matrix of its own; logits are not soft-capped.
- Causal: such a model encodes, and samples with its next-token predictions. If the config has a `canvas_length`
  it denoises, too: an MLP without an outer norm adds the soft embedding of the last prediction to the
  canvas embedding, and each layer multiplies noisy tokens by its decoder scalar. With the MLP's output at zero and the
  scalars at 1, as `init --from` makes them, noisy tokens are computed like clean ones. The Hub has no names for these
  tensors, so they are in blockdiff.safetensors, and transformers loads the rest as a causal model.

config.json is that of transformers' `LlamaConfig` or `Qwen3Config`, with a `canvas_length` if the model denoises, and
`"prefix": "blocks"` if its clean tokens see their whole block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.layers.attention import KV, Attention, Past
from blockdiff.layers.mlp import MLP
from blockdiff.layers.norm import CastRMSNorm
from blockdiff.layers.rope import default_frequencies, llama3_frequencies, yarn_attention_factor, yarn_frequencies
from blockdiff.models.causal import CausalModel, canvases, wrong_canvas_length
from blockdiff.models.config_checks import other_values, refuse_first, sizes_below_one, sizes_out_of_range, wrong_rope
from blockdiff.models.family import Family, for_transformers, written_out
from blockdiff.models.layer_kind import LayerKind, Rope
from blockdiff.models.model import BlockDiffusionModel, layer_scalar, wanted
from blockdiff.models.names import Names
from blockdiff.spans import Spans, Sweep

# What a config may have: fields with one supported value; activations, by their names there and in kernels/; types of
# layers, with our names of the kinds; RoPE types, with their parameters.
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
    """One layer, `layer(x, rope, spans, past, is_noisy) -> (x, kv)`; it changes nothing except the pages of `past`."""

    def __init__(self, config: LlamaFamily, has_scalar: bool, kernels: Kernels):
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
            qk_norm=CastRMSNorm if config.has_qk_norm else None,
            norms_values=False,
            scale=head_dim**-0.5,
        )
        self.post_attention_norm = CastRMSNorm(hidden, eps, kernels)
        self.mlp = MLP(hidden, config.intermediate_size, kernels, ACTIVATIONS[config.hidden_act])
        self.encoder_scalar = None  # clean tokens are computed as in the causal model
        self.decoder_scalar = nn.Parameter(torch.ones(1)) if has_scalar else None

    def forward(
        self, x: Tensor, rope: Rope, spans: Spans | Sweep, past: Past | None, is_noisy: bool | Tensor
    ) -> tuple[Tensor, KV]:
        """Return the residual after the layer, given x [B, T, D], and the keys and values of these tokens.

        is_noisy: as in `BlockDiffusionModel.forward`; noisy tokens are multiplied by the decoder scalar.
        """
        attended, kv = self.attention(self.input_norm(x), rope, spans, past, is_noisy)
        x, is_noisy = wanted(x, is_noisy, attended.shape[1])
        x = x + attended
        x = x + self.mlp(self.post_attention_norm(x), is_noisy)
        scalar = layer_scalar(self, is_noisy, x.dtype)
        return x if scalar is None else x * scalar, kv


class Llama(CausalModel):
    """The model of Llama and Qwen3: causal, and with a `config.canvas_length` a denoiser, too."""

    layer_class: type[Layer] = Layer

    def __init__(self, config: LlamaFamily, kernels: str | Kernels = "auto"):
        activation = ACTIVATIONS[config.hidden_act]
        super().__init__(config, kernels, config.intermediate_size, activation, config.tie_word_embeddings)
        layers, self.leaves_clean_out = config.num_hidden_layers, self.layer_class is Layer
        has_scalars = self.denoises and config.has_self_conditioning  # without it denoising adds no weights
        self.layers = nn.ModuleList(self.layer_class(config, has_scalars, self.kernels) for _ in range(layers))
        self.norm = CastRMSNorm(config.hidden_size, config.rms_norm_eps, self.kernels)
        self.layer_kinds = tuple(KINDS[each] for each in config.layer_types)
        windows = {"full": None, "sliding": config.sliding_window}
        more: Any = {"block": config.block, "query_scale": _query_scale(config)}
        self.kinds = {
            name: LayerKind(name, windows[name], frequencies(config), **more)
            for name in dict.fromkeys(self.layer_kinds)
        }


def frequencies(config: LlamaFamily) -> Tensor:
    """Return the frequencies of RoPE for the config's type of RoPE, fp32 [d/2]."""
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        return llama3_frequencies(config.head_dim, rope["rope_theta"], rope)
    if rope.get("rope_type") == "yarn":
        return yarn_frequencies(config.head_dim, rope["rope_theta"], rope)
    return default_frequencies(config.head_dim, rope["rope_theta"]) / rope.get("factor", 1.0)


def _query_scale(config: LlamaFamily) -> tuple[float, int] | None:
    """Return beta and the original positions for `rope.query_scale`, None if queries are not scaled."""
    rope = config.rope_parameters
    beta = rope.get("llama_4_scaling_beta")
    return None if beta is None else (beta, rope["original_max_position_embeddings"])


# `{}` is the layer number. Tensors that denoising adds have no name on the Hub.
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


@dataclass(frozen=True, kw_only=True)
class LlamaFamily(Family):
    """Llama, and the config of one of its models.

    transformers_class: reads config.json, fills in its defaults and validates it; has_qk_norm: whether queries and keys
    are normed; ropes: the types of RoPE that a config may have, with their parameters. layer_types: of each layer, a
    key of KINDS.
    """

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    model_class: ClassVar[type[BlockDiffusionModel]] = Llama
    names = Names(TABLE, ties=(("lm_head.weight", "model.embed_tokens.weight"),))
    parts: ClassVar = {
        "layer_scalars": ("layers.*_scalar",),
        "self_conditioning": ("self_conditioning.*",),
        "norms": ("*norm.weight",),
        "attention": ("layers.*.attention.*",),
        "mlp": ("layers.*.mlp.*",),
        "head": ("vocabulary.head",),
        "embedding": ("vocabulary.*",),
    }
    adapted_parts: ClassVar[tuple[str, ...]] = ("attention", "mlp")
    quantised_parts: ClassVar[tuple[str, ...]] = ("attention", "mlp")
    sharding_units: ClassVar[tuple[str, ...]] = ("layers.{}", "vocabulary")
    tensor_parts: ClassVar = {
        "layers.*.attention": "attention",
        "layers.*.mlp": "mlp",
        "self_conditioning": "mlp",
        "vocabulary": "vocabulary",
    }
    predictions: ClassVar[tuple[str, ...]] = ("posterior", "leave_one_out")
    corruptions: ClassVar[tuple[str, ...]] = ("uniform", "mask")
    meshes: ClassVar[tuple[str, ...]] = ("replicate", "shard", "tensor")
    prefixes: ClassVar[tuple[str, ...]] = ("causal", "blocks")
    transformers_class: ClassVar[str] = "LlamaConfig"
    has_qk_norm: ClassVar[bool] = False
    ropes: ClassVar[Mapping[str, tuple[str, ...]]] = ROPES

    hidden_act: str
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    rope_parameters: Mapping[str, Any]
    tie_word_embeddings: bool

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        refuse_first(sizes_out_of_range(values, SIZES))
        theirs = cls.as_transformers(values)
        refuse_first(cls.wrong(theirs))
        return cls.of(values, theirs, **cls.own_fields(theirs))

    @classmethod
    def as_transformers(cls, values: Mapping[str, Any]) -> Any:
        """Return transformers' config for the content of a config.json; transformers' own errors are passed on."""
        import transformers

        return getattr(transformers, cls.transformers_class)(**for_transformers(values))

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        named = {"model_type": values.get("model_type", cls.model_type)}
        return written_out(cls.as_transformers(values)) | named

    @classmethod
    def own_fields(cls, theirs: Any) -> dict[str, Any]:
        """Return the fields that transformers' config does not have under the same name or in the same form."""
        rope_theta = theirs.rope_parameters["rope_theta"]
        return canvases(theirs) | {"layer_types": _layer_types(theirs), "rope_theta": rope_theta}

    @classmethod
    def wrong(cls, theirs: Any) -> Iterator[str]:
        """Yield the reasons why a config is refused: values for which our model would differ from transformers'."""
        yield from other_values(theirs, ONE_VALUE)
        if theirs.hidden_act not in ACTIVATIONS:
            yield f"hidden_act {theirs.hidden_act!r} is not supported; there are: {', '.join(ACTIVATIONS)}"
        yield from sizes_below_one(theirs, SIZES)
        heads, key_heads = theirs.num_attention_heads, theirs.num_key_value_heads
        if theirs.head_dim % 2:
            yield f"head_dim is {theirs.head_dim}; it must be even"
        if heads % key_heads:
            yield f"num_key_value_heads {key_heads} does not divide num_attention_heads {heads}"
        yield from wrong_canvas_length(theirs)
        if len(kinds := _layer_types(theirs)) != theirs.num_hidden_layers:
            yield f"layer_types names {len(kinds)} layers, but there are {theirs.num_hidden_layers}"
        for kind in kinds:
            if kind not in KINDS:
                yield f"layer_types {kind!r} is not supported; there are: {', '.join(KINDS)}"
            elif kind == "sliding_attention" and not (getattr(theirs, "sliding_window", None) or 0) >= 1:
                yield f"sliding_window is {theirs.sliding_window!r}, but some layers slide; it must be at least 1"
        yield from wrong_rope(rope := theirs.rope_parameters, cls.ropes, "rope_parameters")
        if rope and rope.get("rope_type") == "yarn":
            if lacking := {"factor", "original_max_position_embeddings"} - rope.keys():
                yield f"rope_parameters: no {min(lacking)}, which yarn needs"
            elif (factor := yarn_attention_factor(rope)) != 1.0:
                yield f"rope_parameters: cos and sin would be multiplied by {factor}; only 1 is supported"

    @property
    def lines(self) -> tuple[str, ...]:
        layers, sliding = f"{self.num_hidden_layers} layers", self.layer_types.count("sliding_attention")
        layers += f" ({sliding} sliding, window {self.sliding_window})" if sliding else ""
        canvas = f"canvas {self.canvas_length}" if self.denoises else "causal"
        canvas += "" if self.block is None else ", prefix of blocks"
        return (
            f"{layers}, hidden {self.hidden_size}, vocabulary {self.vocab_size:,}, {canvas}",
            f"MLP of {self.intermediate_size}; {self.num_attention_heads} query heads, "
            f"{self.num_key_value_heads} key heads of {self.head_dim}",
        )


def _layer_types(theirs: Any) -> tuple[str, ...]:
    """Return the type of each layer; all are full if the config lists none, as Llama's."""
    return tuple(getattr(theirs, "layer_types", None) or ["full_attention"] * theirs.num_hidden_layers)


class Qwen3Family(LlamaFamily):
    """Qwen3: Llama's layers with normed queries and keys, and windows."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    transformers_class = "Qwen3Config"
    has_qk_norm = True


FAMILIES = (LlamaFamily, Qwen3Family)
