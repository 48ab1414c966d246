"""LLaDA2.0 and 2.1: a mixture of experts that denoises block after block.

What is special about it:
- Queries, keys and values have one projection, with their rows in that order. Every query and key is normed before
  RoPE, which turns the first half of a head's dimensions; the others pass. Attention scale d^-1/2.
- Norms are cast before their weight multiplies. No bias, embeddings are not scaled, logits have no cap.
- The first layers have a dense MLP. The others have routed experts in addition to a shared one, which every token
  passes. The router computes sigmoids in fp32 and keeps the groups of experts whose two best have the largest sums of
  score and bias. It chooses among their experts by score plus bias, and weights by the scores alone, renormalised and
  scaled.
- A clean token sees its whole block, so there is no next-token head. The model does not read its last prediction:
  noisy tokens are computed like clean ones.

config.json is that of the released remote code; transformers has no class for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.layers.attention import KV, Attention, Past
from blockdiff.layers.experts import Experts, SigmoidRouter
from blockdiff.layers.mlp import MLP
from blockdiff.layers.norm import CastRMSNorm
from blockdiff.layers.rope import default_frequencies
from blockdiff.models.causal import CausalModel
from blockdiff.models.layer_kind import LayerKind, Rope
from blockdiff.models.model import routed, wanted
from blockdiff.spans import Spans, Sweep

if TYPE_CHECKING:
    from blockdiff.models.llada2.family import LLaDA2Family

ACTIVATION = "silu"


class Layer(nn.Module):
    """One layer, `layer(x, rope, spans, past, is_noisy) -> (x, kv)`; it changes nothing except the pages of `past`."""

    encoder_scalar = None
    decoder_scalar = None

    def __init__(self, config: LLaDA2Family, index: int, kernels: Kernels):
        super().__init__()
        hidden, eps, width = config.hidden_size, config.rms_norm_eps, config.moe_intermediate_size
        self.input_norm = CastRMSNorm(hidden, eps, kernels)
        self.attention = Attention(
            hidden,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            has_value=True,
            eps=eps,
            kernels=kernels,
            qk_norm=CastRMSNorm,
            norms_values=False,
            scale=config.head_dim**-0.5,
            is_fused=True,
        )
        self.post_attention_norm = CastRMSNorm(hidden, eps, kernels)
        self.mlp = self.shared = self.router = self.experts = None
        if index < config.first_k_dense_replace:
            self.mlp = MLP(hidden, config.intermediate_size, kernels, ACTIVATION)
        else:
            self.shared = MLP(hidden, width * config.num_shared_experts, kernels, ACTIVATION)
            self.router = SigmoidRouter(
                hidden,
                config.experts,
                config.experts_per_token,
                config.routed_scaling_factor,
                groups=config.n_group,
                top_groups=config.topk_group,
                is_wide=True,
            )
            self.experts = Experts(config.experts, hidden, width, kernels, ACTIVATION)

    def forward(
        self, x: Tensor, rope: Rope, spans: Spans | Sweep, past: Past | None, is_noisy: bool | Tensor
    ) -> tuple[Tensor, KV]:
        """Return the residual after the layer, given x [B, T, D], and the keys and values of these tokens."""
        attended, kv = self.attention(self.input_norm(x), rope, spans, past, is_noisy)
        x, is_noisy = wanted(x, is_noisy, attended.shape[1])
        x = x + attended
        return x + self._feed_forward(self.post_attention_norm(x), spans, is_noisy), kv

    def _feed_forward(self, normed: Tensor, spans: Spans | Sweep, is_noisy: bool | Tensor) -> Tensor:
        if self.mlp is not None:
            dense: Tensor = self.mlp(normed, is_noisy)
            return dense
        assert self.shared is not None
        return routed(self, normed, spans, is_noisy) + self.shared(normed, is_noisy)


class LLaDA2(CausalModel):
    """The LLaDA2 model."""

    layer_class: type[Layer] = Layer

    def __init__(self, config: LLaDA2Family, kernels: str | Kernels = "auto"):
        super().__init__(config, kernels, config.intermediate_size, ACTIVATION, config.tie_word_embeddings)
        self.leaves_clean_out = self.layer_class is Layer
        self.layers = nn.ModuleList(self.layer_class(config, n, self.kernels) for n in range(config.num_hidden_layers))
        self.norm = CastRMSNorm(config.hidden_size, config.rms_norm_eps, self.kernels)
        self.layer_kinds = ("full",) * config.num_hidden_layers
        frequencies = default_frequencies(config.turned, config.rope_theta)
        self.kinds = {"full": LayerKind("full", None, frequencies, block=config.block)}
