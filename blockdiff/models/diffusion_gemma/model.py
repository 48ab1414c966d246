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
- If `use_bidirectional_attention` is "vision", all tokens of adjacent images see one another when they are encoded.

config.json is that of transformers' `DiffusionGemmaConfig`, which resolves head_dim and kv heads of each layer from
either form of file (`per_layer_config`, or `global_head_dim` and `num_global_key_value_heads`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.layers.attention import KV, Attention, Past
from blockdiff.layers.experts import Experts, Router
from blockdiff.layers.mlp import MLP, SelfConditioning
from blockdiff.layers.norm import RMSNorm
from blockdiff.layers.rope import default_frequencies, proportional_frequencies
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.layer_kind import LayerKind, Rope
from blockdiff.models.model import BlockDiffusionModel, layer_scalar, wanted
from blockdiff.spans import Spans, Sweep

if TYPE_CHECKING:
    from blockdiff.models.diffusion_gemma.family import DiffusionGemmaFamily

KINDS = {"sliding_attention": "sliding", "full_attention": "full"}  # layer types, and our names of the kinds
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "swish": "silu"}  # names in configs, and in kernels/


class Layer(nn.Module):
    """One layer, `layer(x, rope, spans, past, is_noisy) -> (x, kv)`; it changes nothing except the pages of `past`."""

    encoder_scalar: Tensor
    decoder_scalar: Tensor

    def __init__(self, config: DiffusionGemmaFamily, index: int, kernels: Kernels):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        heads, activation = config.heads[index], ACTIVATIONS[config.hidden_activation]
        self.eps, self.kernels = eps, kernels
        self.input_norm = RMSNorm(hidden, eps, kernels)
        self.attention = Attention(
            hidden,
            config.num_attention_heads,
            heads.num_key_value_heads,
            heads.head_dim,
            has_value=KINDS[config.layer_types[index]] == "sliding",
            eps=eps,
            kernels=kernels,
        )
        self.post_attention_norm = RMSNorm(hidden, eps, kernels)
        self.pre_mlp_norm = RMSNorm(hidden, eps, kernels)
        self.mlp = MLP(hidden, config.intermediate_size, kernels, activation)
        self.post_mlp_norm = RMSNorm(hidden, eps, kernels)
        self.router = Router(hidden, config.experts, config.experts_per_token, kernels)
        self.pre_experts_norm = RMSNorm(hidden, eps, kernels)
        self.experts = Experts(config.experts, hidden, config.moe_intermediate_size, kernels, activation)
        self.post_experts_norm = RMSNorm(hidden, eps, kernels)
        self.post_ff_norm = RMSNorm(hidden, eps, kernels)
        self.register_buffer("encoder_scalar", torch.ones(1))
        self.register_buffer("decoder_scalar", torch.ones(1))

    def forward(
        self, x: Tensor, rope: Rope, spans: Spans | Sweep, past: Past | None, is_noisy: bool | Tensor
    ) -> tuple[Tensor, KV]:
        """Return the residual after the layer, given x [B, T, D], and the keys and values of these tokens.

        is_noisy: as in `BlockDiffusionModel.forward`; it selects the layer scalar of each token.
        """
        (normed,) = self.kernels.rms_norms(x, (self.input_norm.weight,), self.eps)
        attended, kv = self.attention(normed, rope, spans, past, is_noisy)
        x, is_noisy = wanted(x, is_noisy, attended.shape[1])
        # x + norm(attended), and its three norms: for the MLP, the experts, and (without weight) the router
        weights = (self.pre_mlp_norm.weight, self.pre_experts_norm.weight, None)
        norm = self.post_attention_norm
        x, for_mlp, for_experts, for_router = self.kernels.residual_norms(x, attended, norm.weight, weights, self.eps)
        index_Nk, weight_Nk = self.router(for_router)
        padding_N = None if spans.padding_BT is None else spans.padding_BT.flatten()
        routed = self.experts.slots(for_experts, index_Nk, weight_Nk, padding_N, is_noisy)
        norms = self.post_mlp_norm.weight, self.post_experts_norm.weight, self.post_ff_norm.weight
        scalar = layer_scalar(self, is_noisy, x.dtype)
        return self.kernels.layer_end(x, self.mlp(for_mlp, is_noisy), routed, norms, self.eps, scalar), kv


class DiffusionGemma(BlockDiffusionModel):
    """The DiffusionGemma model. Single-device code: wrapping, sharding and losses are elsewhere.

    A subclass may set another `layer_class`; weights that it adds are drawn, saved and loaded (`checkpoint/added.py`).
    """

    layer_class: type[Layer] = Layer

    def __init__(self, config: DiffusionGemmaFamily, kernels: str | Kernels = "auto"):
        super().__init__(config, kernels)
        hidden, eps, softcap = config.hidden_size, config.rms_norm_eps, config.final_logit_softcapping
        self.vocabulary = Vocabulary(config.vocab_size, hidden, softcap, self.kernels)
        activation = ACTIVATIONS[config.hidden_activation]
        self.self_conditioning = SelfConditioning(hidden, config.intermediate_size, eps, self.kernels, activation)
        self.leaves_clean_out = self.layer_class is Layer
        self.layers = nn.ModuleList(self.layer_class(config, n, self.kernels) for n in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps, self.kernels)
        self.layer_kinds = tuple(KINDS[layer_type] for layer_type in config.layer_types)
        self.kinds = {
            name: _kind(config, name, self.layer_kinds.index(name)) for name in dict.fromkeys(self.layer_kinds)
        }


def _kind(config: DiffusionGemmaFamily, name: str, layer: int) -> LayerKind:
    """Build the LayerKind `name` ("sliding" or another) with the RoPE of `layer`, the index of a layer of this kind."""
    rope = config.rope_parameters[config.layer_types[layer]]
    head_dim, theta = config.heads[layer].head_dim, rope["rope_theta"]
    if rope.get("rope_type") == "proportional":
        frequencies = proportional_frequencies(head_dim, theta, rope.get("partial_rotary_factor", 1.0))
    else:
        frequencies = default_frequencies(head_dim, theta)
    if rope.get("rope_type", "default") != "default":
        frequencies = frequencies / rope.get("factor", 1.0)
    return LayerKind(
        name,
        config.sliding_window if name == "sliding" else None,
        frequencies,
        sees_whole_images=config.use_bidirectional_attention == "vision",
    )
