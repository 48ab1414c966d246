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

Config: transformers' `DiffusionGemmaConfig`. Its `per_layer_config` resolves head_dim and kv heads of each layer
from either form of file (`per_layer_config`, or `global_head_dim` and `num_global_key_value_heads`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels, resolve
from blockdiff.layers.attention import KV, Attention
from blockdiff.layers.experts import Experts, Router
from blockdiff.layers.mlp import MLP
from blockdiff.layers.norm import RMSNorm
from blockdiff.layers.rope import angles, default_frequencies, proportional_frequencies
from blockdiff.layers.self_conditioning import SelfConditioning
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.prefix import Prefix
from blockdiff.spans import Spans, denoise_spans, encode_spans

if TYPE_CHECKING:
    from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig

Rope = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """One layer, pure: `layer(x, rope, spans, past, scalar) -> (x, kv)`; caches are the caller's business."""

    def __init__(self, text: DiffusionGemmaTextConfig, index: int, kernels: Kernels):
        super().__init__()
        hidden, eps = text.hidden_size, text.rms_norm_eps
        heads = text.per_layer_config[index]
        self.eps, self.kernels = eps, kernels
        self.is_sliding = text.layer_types[index] == "sliding_attention"
        self.input_norm = RMSNorm(hidden, eps, kernels)
        self.attention = Attention(
            hidden,
            text.num_attention_heads,
            heads.num_key_value_heads,
            heads.head_dim,
            has_value=self.is_sliding,
            eps=eps,
            kernels=kernels,
        )
        self.post_attention_norm = RMSNorm(hidden, eps, kernels)
        self.pre_mlp_norm = RMSNorm(hidden, eps, kernels)
        self.mlp = MLP(hidden, text.intermediate_size)
        self.post_mlp_norm = RMSNorm(hidden, eps, kernels)
        self.router = Router(hidden, text.num_experts, text.top_k_experts)
        self.pre_experts_norm = RMSNorm(hidden, eps, kernels)
        self.experts = Experts(text.num_experts, hidden, text.moe_intermediate_size, kernels)
        self.post_experts_norm = RMSNorm(hidden, eps, kernels)
        self.post_ff_norm = RMSNorm(hidden, eps, kernels)
        self.register_buffer("encoder_scalar", torch.ones(1))
        self.register_buffer("decoder_scalar", torch.ones(1))

    def forward(
        self, x_BTD: Tensor, rope: Rope, spans: Spans, past: KV | None, scalar: Tensor
    ) -> tuple[Tensor, KV]:
        attended, kv = self.attention(self.input_norm(x_BTD), rope, spans, past)
        x_BTD = self.kernels.add_rms_norm(x_BTD, attended, self.post_attention_norm.weight, self.eps)
        # three norms of the same residual: for the MLP, the experts, and (without weight) the router
        weights = (self.pre_mlp_norm.weight, self.pre_experts_norm.weight, None)
        for_mlp, for_experts, for_router = self.kernels.rms_norms(x_BTD, weights, self.eps)
        index_Nk, weight_Nk = self.router(for_router.flatten(0, 1))
        padding_N = None if spans.padding_BT is None else spans.padding_BT.flatten()
        routed = self.experts(for_experts.flatten(0, 1), index_Nk, weight_Nk, padding_N).view_as(x_BTD)
        y_BTD = self.post_mlp_norm(self.mlp(for_mlp))
        y_BTD = self.kernels.add_rms_norm(y_BTD, routed, self.post_experts_norm.weight, self.eps)
        return self.kernels.add_rms_norm(x_BTD, y_BTD, self.post_ff_norm.weight, self.eps, scalar), kv


class DiffusionGemma(nn.Module):
    """The encode/denoise backbone. Single-device code: wrapping, sharding and losses live elsewhere."""

    def __init__(self, config: DiffusionGemmaConfig, kernels: str | Kernels = "auto"):
        super().__init__()
        text = config.text_config
        assert text is not None and not isinstance(text, dict)
        self.config = config
        self.kernels = resolve(kernels)
        self.canvas_length: int = config.canvas_length or 256
        self.vocab_size: int = text.vocab_size
        self.vocabulary = Vocabulary(text.vocab_size, text.hidden_size, text.final_logit_softcapping, self.kernels)
        self.self_conditioning = SelfConditioning(
            text.hidden_size, text.intermediate_size, text.rms_norm_eps, self.kernels
        )
        self.layers = nn.ModuleList(Layer(text, n, self.kernels) for n in range(text.num_hidden_layers))
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, self.kernels)
        self.windows: tuple[int | None, ...] = tuple(
            text.sliding_window if kind == "sliding_attention" else None for kind in text.layer_types
        )
        self._frequencies: dict[torch.device, dict[int | None, Tensor]] = {}
        self.carried: Any = None  # tensors of the checkpoint that the text model does not use (vision)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.vocabulary.table.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        return self.vocabulary.table.dtype

    def router_parameters(self) -> list[nn.Parameter]:
        """The parameters that decide the routing: frozen by default when fine-tuning."""
        return [p for layer in self.layers for p in layer.router.parameters()]  # type: ignore[union-attr]

    # -- what users and the sampler call ---------------------------------------------------------------------------

    def encode(self, tokens_BS: Tensor, lengths: Tensor | None = None, prefix: Prefix | None = None) -> Prefix:
        """Encode clean tokens causally; with `prefix`, append them to it (and consume it).

        tokens_BS: int64, rows right-padded; lengths: valid tokens of each row, int64 [B] (None: all valid).
        Returns the Prefix that `denoise` and further calls read; its `hidden` is [B, S, D].
        """
        B, S = tokens_BS.shape
        column = torch.arange(S, device=tokens_BS.device)
        past_B = None if prefix is None else prefix.lengths_B
        doc_start_BS = torch.zeros_like(tokens_BS)
        if lengths is not None:
            doc_start_BS = torch.where(column < lengths[:, None], 0, -1)
        positions_BS = column.expand(B, S) if past_B is None else past_B[:, None] + column
        spans = {w: encode_spans(doc_start_BS, w, past_B) for w in set(self.windows)}
        if prefix is None:
            hidden, kv = self.run_encode(tokens_BS, positions_BS, spans)
            return Prefix.of(hidden, kv, self.windows, lengths)
        spans = {window: prefix.seen(each, window) for window, each in spans.items()}
        past = [prefix.layer(n) for n in range(len(self.layers))]
        hidden, kv = self.run_encode(tokens_BS, positions_BS, spans, past)
        return prefix.extended(hidden, kv, lengths)

    def denoise(self, canvas_BL: Tensor, prefix: Prefix, soft_embedding: Tensor | None = None) -> Tensor:
        """Hidden states [B, L, D] of one canvas per row, after the final norm; leaves the prefix as it is.

        canvas_BL: int64 noisy tokens, standing right after the row's cached tokens; soft_embedding: [B, L, D] signal
        of the last prediction (None, or rows of zeros: no signal).
        """
        L = canvas_BL.shape[1]
        if L not in prefix.geometry:
            start_B1 = prefix.lengths_B[:, None]
            spans: dict[int | None, Spans] = {}
            for window in set(self.windows):
                whole = denoise_spans(start_B1, torch.zeros_like(start_B1), torch.full_like(start_B1, L), L, window)
                spans[window] = prefix.seen(whole, window)
                # a sliding layer holds just the keys that a canvas sees
                spans[window].sees_all = prefix.common_length is not None
            positions_BL = start_B1 + torch.arange(L, device=canvas_BL.device)
            prefix.geometry[L] = spans, self._rope(positions_BL)
        spans, rope = prefix.geometry[L]
        past = [prefix.layer(n) for n in range(len(self.layers))]
        return self._denoise(canvas_BL, rope, spans, past, soft_embedding)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits, fp32 [..., V]: a convenience; training and sampling never hold them all."""
        return self.vocabulary.logits(hidden)

    def soft_embedding(self, logits: Tensor) -> Tensor:
        """Soft embedding [..., D] of logits [..., V]: a convenience, see `vocabulary.soft_embedding`."""
        return self.vocabulary.soft_embedding_of(logits)

    # -- what training calls: any geometry -------------------------------------------------------------------------

    def run_encode(
        self, tokens_BT: Tensor, positions_BT: Tensor, spans: dict[int | None, Spans], past: list[KV] | None = None
    ) -> tuple[Tensor, list[KV]]:
        """The causal pass over any geometry: hidden [B, T, D] after the final norm, and every layer's kv."""
        rope = self._rope(positions_BT)
        x, kv = self.vocabulary.embed(tokens_BT), []
        for n, layer in enumerate(self.layers):
            window = self.windows[n]
            x, layer_kv = layer(x, rope[window], spans[window], past[n] if past else None, layer.encoder_scalar)
            kv.append(layer_kv)
        return self.norm(x), kv

    def run_denoise(
        self,
        canvas_BT: Tensor,
        positions_BT: Tensor,
        spans: dict[int | None, Spans],
        past: list[KV],
        soft_BTD: Tensor | None,
    ) -> Tensor:
        """The bidirectional pass over canvases laid side by side (T = C * L): hidden [B, T, D]."""
        return self._denoise(canvas_BT, self._rope(positions_BT), spans, past, soft_BTD)

    def _denoise(
        self,
        canvas_BT: Tensor,
        rope: dict[int | None, Rope],
        spans: dict[int | None, Spans],
        past: list[KV],
        soft_BTD: Tensor | None,
    ) -> Tensor:
        x = self.self_conditioning(self.vocabulary.embed(canvas_BT), soft_BTD)
        for n, layer in enumerate(self.layers):
            window = self.windows[n]
            x, _ = layer(x, rope[window], spans[window], past[n], layer.decoder_scalar)
        return self.norm(x)

    def _rope(self, positions_BT: Tensor) -> dict[int | None, Rope]:
        """cos and sin of every layer kind, by window."""
        device = positions_BT.device
        if device not in self._frequencies:
            self._frequencies[device] = {w: f.to(device) for w, f in _frequencies(self.config.text_config).items()}
        return {w: angles(positions_BT, f, self.dtype) for w, f in self._frequencies[device].items()}


def _frequencies(text: Any) -> dict[int | None, Tensor]:
    """RoPE frequencies by window, from the config's rope_parameters of each layer kind."""
    frequencies: dict[int | None, Tensor] = {}
    for n, kind in enumerate(text.layer_types):
        rope = text.rope_parameters[kind]
        head_dim = text.per_layer_config[n].head_dim
        window = text.sliding_window if kind == "sliding_attention" else None
        if rope["rope_type"] == "proportional":
            partial = rope.get("partial_rotary_factor", 1.0)
            frequencies[window] = proportional_frequencies(head_dim, rope["rope_theta"], partial)
        else:
            frequencies[window] = default_frequencies(head_dim, rope["rope_theta"])
    return frequencies
