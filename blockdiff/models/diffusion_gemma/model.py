"""DiffusionGemma: Gemma 4's mixture-of-experts stack, run causally to encode and bidirectionally to denoise.

What is special about it:
- One set of weights for both passes; only the layer scalars differ (`encoder_scalar`, `decoder_scalar`).
- Every layer has a dense MLP and routed experts side by side, each with its own norms; the router reads the raw
  residual.
- Attention scale is 1 (queries and keys are normed); values are normed without weight. Full-attention layers have
  wider heads, fewer kv heads, a partial RoPE and no v_proj: their values are the raw keys, normed.
- A sliding layer keeps the last window - 1 prefix keys, the same ones for every query of a canvas.
- Denoise mixes the soft embedding of the last prediction into the canvas embedding; encode never does.
- The table is tied; logits are soft-capped.
- Where the config says so, the tokens of adjacent images all see one another when they are encoded.

Config: transformers' `DiffusionGemmaConfig`. Its `per_layer_config` resolves head_dim and kv heads of each layer
from either form of file (`per_layer_config`, or `global_head_dim` and `num_global_key_value_heads`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.layers.attention import KV, Attention, Past
from blockdiff.layers.experts import Experts, Router
from blockdiff.layers.mlp import MLP, SelfConditioning
from blockdiff.layers.norm import RMSNorm
from blockdiff.layers.rope import default_frequencies, proportional_frequencies
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.diffusion_gemma.config import ACTIVATIONS, KINDS, check
from blockdiff.models.layer_kind import LayerKind, Rope
from blockdiff.models.model import BlockDiffusionModel, layer_scalar, wanted
from blockdiff.spans import Spans, Sweep

if TYPE_CHECKING:
    from transformers.models.diffusion_gemma.configuration_diffusion_gemma import (
        DiffusionGemmaConfig,
        DiffusionGemmaTextConfig,
    )


class Layer(nn.Module):
    """One layer, `layer(x, rope, spans, past, is_noisy) -> (x, kv)`: pure, but for pages that `past` has places in."""

    encoder_scalar: Tensor
    decoder_scalar: Tensor

    def __init__(self, text: DiffusionGemmaTextConfig, index: int, kernels: Kernels):
        super().__init__()
        hidden, eps = text.hidden_size, text.rms_norm_eps
        heads, activation = text.per_layer_config[index], ACTIVATIONS[text.hidden_activation]
        self.eps, self.kernels = eps, kernels
        self.input_norm = RMSNorm(hidden, eps, kernels)
        self.attention = Attention(
            hidden,
            text.num_attention_heads,
            heads.num_key_value_heads,
            heads.head_dim,
            has_value=KINDS[text.layer_types[index]] == "sliding",
            eps=eps,
            kernels=kernels,
        )
        self.post_attention_norm = RMSNorm(hidden, eps, kernels)
        self.pre_mlp_norm = RMSNorm(hidden, eps, kernels)
        self.mlp = MLP(hidden, text.intermediate_size, kernels, activation)
        self.post_mlp_norm = RMSNorm(hidden, eps, kernels)
        self.router = Router(hidden, text.num_experts, text.top_k_experts, kernels)
        self.pre_experts_norm = RMSNorm(hidden, eps, kernels)
        self.experts = Experts(text.num_experts, hidden, text.moe_intermediate_size, kernels, activation)
        self.post_experts_norm = RMSNorm(hidden, eps, kernels)
        self.post_ff_norm = RMSNorm(hidden, eps, kernels)
        self.register_buffer("encoder_scalar", torch.ones(1))
        self.register_buffer("decoder_scalar", torch.ones(1))

    def forward(
        self, x: Tensor, rope: Rope, spans: Spans | Sweep, past: Past | None, is_noisy: bool | Tensor
    ) -> tuple[Tensor, KV]:
        """Of the residual x [B, T, D]: the next one, and the keys and values of these tokens.

        is_noisy: as `BlockDiffusionModel.forward` takes it; it says which of the layer scalars counts.
        """
        (normed,) = self.kernels.rms_norms(x, (self.input_norm.weight,), self.eps)
        attended, kv = self.attention(normed, rope, spans, past)
        x, is_noisy = wanted(x, is_noisy, attended.shape[1])
        # x + norm(attended), and its three norms: for the MLP, the experts, and (without weight) the router
        weights = (self.pre_mlp_norm.weight, self.pre_experts_norm.weight, None)
        norm = self.post_attention_norm
        x, for_mlp, for_experts, for_router = self.kernels.residual_norms(x, attended, norm.weight, weights, self.eps)
        index_Nk, weight_Nk = self.router(for_router)
        padding_N = None if spans.padding_BT is None else spans.padding_BT.flatten()
        routed = self.experts.slots(for_experts, index_Nk, weight_Nk, padding_N)
        norms = self.post_mlp_norm.weight, self.post_experts_norm.weight, self.post_ff_norm.weight
        scalar = layer_scalar(self, is_noisy, x.dtype)
        return self.kernels.layer_end(x, self.mlp(for_mlp), routed, norms, self.eps, scalar), kv


class DiffusionGemma(BlockDiffusionModel):
    """The encode/denoise backbone. Single-device code: wrapping, sharding and losses live elsewhere.

    A subclass may name another `layer_class`; what it adds is drawn, saved and loaded (`checkpoint/added.py`).
    """

    layer_class: type[Layer] = Layer

    def __init__(self, config: DiffusionGemmaConfig, kernels: str | Kernels = "auto"):
        super().__init__(config, kernels)
        check(config)
        text: Any = config.text_config
        self.canvas_length = config.canvas_length or 256
        self.vocab_size = text.vocab_size
        self.vocabulary = Vocabulary(text.vocab_size, text.hidden_size, text.final_logit_softcapping, self.kernels)
        self.self_conditioning = SelfConditioning(
            text.hidden_size,
            text.intermediate_size,
            text.rms_norm_eps,
            self.kernels,
            ACTIVATIONS[text.hidden_activation],
        )
        self.leaves_clean_out = self.layer_class is Layer
        self.layers = nn.ModuleList(self.layer_class(text, n, self.kernels) for n in range(text.num_hidden_layers))
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, self.kernels)
        self.layer_kinds = tuple(KINDS[layer_type] for layer_type in text.layer_types)
        self.kinds = {name: _kind(text, name, self.layer_kinds.index(name)) for name in dict.fromkeys(self.layer_kinds)}


def _kind(text: Any, name: str, layer: int) -> LayerKind:
    """The kind called `name`, of which `layer` is one."""
    rope = text.rope_parameters[text.layer_types[layer]]
    head_dim, theta = text.per_layer_config[layer].head_dim, rope["rope_theta"]
    if rope.get("rope_type") == "proportional":
        frequencies = proportional_frequencies(head_dim, theta, rope.get("partial_rotary_factor", 1.0))
    else:
        frequencies = default_frequencies(head_dim, theta)
    if rope.get("rope_type", "default") != "default":
        frequencies = frequencies / rope.get("factor", 1.0)
    return LayerKind(
        name,
        text.sliding_window if name == "sliding" else None,
        frequencies,
        sees_whole_images=getattr(text, "use_bidirectional_attention", None) == "vision",
    )
