"""SDAR: Qwen3's layers, denoising block after block.

What is special about it:
- The layers are Qwen3's and have no scalars: noisy tokens are computed like clean ones, and the last prediction is not
  read.
- A clean token sees its whole block, so there is no next-token head.
- SDAR-MoE has experts in place of the MLP of each layer. The router computes a softmax over all experts in fp32. The
  experts with the highest probabilities are weighted by these, divided by their sum. There is no shared expert.

config.json is that of transformers' `Qwen3Config` or `Qwen3MoeConfig` with a `block_size` and a `mask_token_id`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.autocast import upcast
from blockdiff.layers.attention import KV, Past
from blockdiff.layers.experts import Experts
from blockdiff.layers.linear import Linear
from blockdiff.models.layer_kind import Rope
from blockdiff.models.llama import ACTIVATIONS, Layer, Llama
from blockdiff.models.model import routed, wanted
from blockdiff.spans import Spans, Sweep

if TYPE_CHECKING:
    from blockdiff.models.sdar.family import SDARFamily, SDARMoeFamily


class DenseLayer(Layer):
    """Qwen3's layer, which computes noisy tokens like clean ones."""

    def __init__(self, config: SDARFamily, denoises: bool, kernels: Kernels):
        super().__init__(config, False, kernels)


class SDAR(Llama):
    """The SDAR model with dense layers."""

    layer_class: type[Layer] = DenseLayer

    def __init__(self, config: SDARFamily, kernels: str | Kernels = "auto"):
        super().__init__(config, kernels)
        self.leaves_clean_out = True


class SoftmaxRouter(nn.Module):
    """Top-k routing by a softmax over all experts, renormalised; the projection in the dtype of the model."""

    def __init__(self, hidden: int, experts: int, top_k: int):
        super().__init__()
        self.proj, self.top_k = Linear(hidden, experts, bias=False), top_k

    def forward(self, normed_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return expert index int64 [N, k] and weight [N, k] in at least fp32."""
        weight_Nk, index_Nk = upcast(self.proj(normed_ND)).softmax(-1).topk(self.top_k, dim=-1)
        return index_Nk, weight_Nk / weight_Nk.sum(-1, keepdim=True)


class MoeLayer(nn.Module):
    """One layer, `layer(x, rope, spans, past, is_noisy) -> (x, kv)`; it changes nothing except the pages of `past`."""

    def __init__(self, config: SDARMoeFamily, denoises: bool, kernels: Kernels):
        super().__init__()
        dense = DenseLayer(config, denoises, kernels)
        self.input_norm, self.attention = dense.input_norm, dense.attention
        self.post_attention_norm = dense.post_attention_norm
        self.router = SoftmaxRouter(config.hidden_size, config.experts, config.experts_per_token)
        activation, width = ACTIVATIONS[config.hidden_act], config.moe_intermediate_size
        self.experts = Experts(config.experts, config.hidden_size, width, kernels, activation)
        self.encoder_scalar = self.decoder_scalar = None

    def forward(
        self, x: Tensor, rope: Rope, spans: Spans | Sweep, past: Past | None, is_noisy: bool | Tensor
    ) -> tuple[Tensor, KV]:
        """Return the residual after the layer, given x [B, T, D], and the keys and values of these tokens."""
        attended, kv = self.attention(self.input_norm(x), rope, spans, past, is_noisy)
        x, is_noisy = wanted(x, is_noisy, attended.shape[1])
        x = x + attended
        return x + routed(self, self.post_attention_norm(x), spans, is_noisy), kv


class SDARMoe(SDAR):
    """The SDAR model with experts in every layer."""

    layer_class = MoeLayer  # type: ignore[assignment]
