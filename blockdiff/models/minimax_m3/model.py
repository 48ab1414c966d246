"""MiniMax M3: a causal mixture of experts whose long layers attend to few blocks of keys.

What is special about it:
- All norms are zero-centred: `x / rms(x) * (1 + w)`, in fp32. Every query and key is normed before RoPE, which turns
  the first half of a head's dimensions; the others pass. Attention scale d^-1/2.
- SwiGLU-OAI everywhere: gate clamped from above, up on both sides, `gate * sigmoid(alpha * gate) * (up + 1)`.
- The first layers have a dense MLP. The others have routed experts and a shared one, which every token passes. The
  router computes sigmoids, chooses by score plus a bias, and weights by the scores alone, renormalised and scaled.
- Sparse layers have an indexer: a few small query heads and one shared key score blocks of keys, and a query attends to
  the best of them. The indexer only selects: it has no values and gets no gradient. Its keys are cached with the
  others.
- Causal. With a `canvas_length` in the config it denoises, too: a canvas selects among the blocks of its prefix, and
  always sees its own keys, which do not count as selected blocks. Self-conditioning and decoder scalars are as in
  Llama. With `canvas_selection: "canvas"` its queries share one selection, made with the mean of their index queries;
  with `canvas_selection_kept` the selection of its first denoising step serves the other steps, too.

config.json is that of transformers' `MiniMaxM3VLConfig`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from blockdiff.kernels import Kernels
from blockdiff.kernels.block_sparse.torch import Selection, sparse_attention
from blockdiff.kernels.heads import HeadNorms
from blockdiff.kernels.span_attention.paged import PagedTensor, written
from blockdiff.layers.attention import KV, Attention, Past
from blockdiff.layers.experts import Experts, SigmoidRouter
from blockdiff.layers.linear import Linear
from blockdiff.layers.mlp import MLP
from blockdiff.layers.norm import ZeroCentredRMSNorm
from blockdiff.layers.rope import default_frequencies
from blockdiff.models.causal import CausalModel
from blockdiff.models.layer_kind import LayerKind, Rope
from blockdiff.models.model import layer_scalar, routed
from blockdiff.spans import Spans, Sweep

if TYPE_CHECKING:
    from blockdiff.models.minimax_m3.family import MiniMaxM3Family

KINDS = {"full_attention": "full", "minimax_m3_sparse": "sparse"}  # layer types, and our names of the kinds


class MiniMaxM3RMSNorm(ZeroCentredRMSNorm):
    """The norm of this family, by the name that NeMo AutoModel has for it."""


class MiniMaxM3MLP(MLP):
    """`down(swiglu_oai(gate x, up x))` of a dense layer or a shared expert."""

    def __init__(self, config: MiniMaxM3Family, intermediate: int, kernels: Kernels):
        super().__init__(config.hidden_size, intermediate, kernels, config.activation)


class MiniMaxM3Indexer(nn.Module):
    """The indexer by which a sparse layer selects blocks: queries of a few heads and one key for all of them."""

    def __init__(self, config: MiniMaxM3Family, kernels: Kernels):
        super().__init__()
        self.heads, self.head_dim, self.kernels = config.index_n_heads, config.index_head_dim, kernels
        self.q_proj = Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = Linear(config.hidden_size, self.head_dim, bias=False)
        self.q_norm = MiniMaxM3RMSNorm(self.head_dim, config.rms_norm_eps, kernels)
        self.k_norm = MiniMaxM3RMSNorm(self.head_dim, config.rms_norm_eps, kernels)

    @torch.no_grad()
    def forward(self, x_BTD: Tensor, rope: Rope, into: tuple[PagedTensor, ...] | None = None) -> tuple[Tensor, Tensor]:
        """Return index queries [B, T, H, d] and keys [B, T, 1, d] of tokens, normed and rotated, without gradient.

        into: the page tensor to which keys are written (None: none); the returned keys are then empty, [B, 0, 1, d].
        """
        B, T, _ = x_BTD.shape
        q = self.q_proj(x_BTD).view(B, T, self.heads, self.head_dim)
        k = self.k_proj(x_BTD).view(B, T, 1, self.head_dim)
        norms = HeadNorms(self.head_dim, self.q_norm, self.k_norm, False, self.q_norm.eps)
        q, k, _ = self.kernels.attention_heads(q, k, None, norms, rope, into)
        return q, k


class MiniMaxM3Attention(Attention):
    """Attention of one layer; in a sparse layer, over the blocks that its indexer selects.

    canvas_length: the length of canvases whose queries share one selection (None: each query has its own).
    """

    def __init__(self, config: MiniMaxM3Family, is_sparse: bool, kernels: Kernels, canvas_length: int | None = None):
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            has_value=True,
            eps=config.rms_norm_eps,
            kernels=kernels,
            qk_norm=MiniMaxM3RMSNorm,
            norms_values=False,
            scale=config.head_dim**-0.5,
        )
        self.indexer = MiniMaxM3Indexer(config, kernels) if is_sparse else None
        self.selection = Selection(
            block=config.index_block_size,
            topk=config.index_topk_blocks,
            init=config.index_init_blocks,
            local=config.index_local_blocks,
            score=config.index_score_type,
            scale=self.scale,
            canvas_length=canvas_length,
        )

    def forward(
        self, x_BTD: Tensor, rope: Rope, spans: Spans | Sweep, past: Past | None, is_noisy: bool | Tensor = False
    ) -> tuple[Tensor, KV]:
        if self.indexer is None:
            return super().forward(x_BTD, rope, spans, past, is_noisy)
        into = written(past)
        q, k, v = (x.view(*x.shape[:2], -1, self.head_dim) for x in self.projected(x_BTD, is_noisy))
        norms = HeadNorms(self.head_dim, self.q_norm, self.k_norm, self.norms_values, self.eps)
        q, k, own_v = self.kernels.attention_heads(q, k, v, norms, rope, into)
        assert own_v is not None, "values were given"
        idx_q, idx_k = self.indexer(x_BTD, rope, None if into is None else into[2:])
        out = sparse_attention(self.kernels, q, idx_q, (k, own_v, idx_k), spans, past, self.selection, self)
        return self.o_proj(out.flatten(2), is_noisy), (k, own_v, idx_k) if into is None else ()


class Block(nn.Module):
    """One layer, `layer(x, rope, spans, past, is_noisy) -> (x, kv)`; it changes nothing except the pages of `past`."""

    def __init__(
        self, config: MiniMaxM3Family, index: int, denoises: bool, kernels: Kernels, canvas_length: int | None = None
    ):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = MiniMaxM3RMSNorm(hidden, eps, kernels)
        is_sparse = KINDS[config.layer_types[index]] == "sparse"
        self.attention = MiniMaxM3Attention(config, is_sparse, kernels, canvas_length)
        self.post_attention_norm = MiniMaxM3RMSNorm(hidden, eps, kernels)
        self.mlp = self.shared = self.router = self.experts = None
        if config.mlp_layer_types[index] == "dense":
            self.mlp = MiniMaxM3MLP(config, config.dense_intermediate_size, kernels)
        else:
            experts, top_k = config.experts, config.experts_per_token
            self.shared = MiniMaxM3MLP(config, config.shared_intermediate_size, kernels)
            self.router = SigmoidRouter(hidden, experts, top_k, config.routed_scaling_factor)
            self.experts = Experts(experts, hidden, config.intermediate_size, kernels, config.activation)
        self.encoder_scalar = None  # clean tokens are computed as in the causal model
        self.decoder_scalar = nn.Parameter(torch.ones(1)) if denoises else None

    def forward(
        self, x: Tensor, rope: Rope, spans: Spans | Sweep, past: Past | None, is_noisy: bool | Tensor
    ) -> tuple[Tensor, KV]:
        """Return the residual after the layer, given x [B, T, D], and the tokens' keys, values and index keys."""
        attended, kv = self.attention(self.input_norm(x), rope, spans, past, is_noisy)
        x = x + attended
        x = x + self._feed_forward(self.post_attention_norm(x), spans, is_noisy)
        scalar = layer_scalar(self, is_noisy, x.dtype)
        return x if scalar is None else x * scalar, kv

    def _feed_forward(self, normed: Tensor, spans: Spans | Sweep, is_noisy: bool | Tensor) -> Tensor:
        if self.mlp is not None:
            dense: Tensor = self.mlp(normed, is_noisy)
            return dense
        assert self.shared is not None
        return routed(self, normed, spans, is_noisy) + self.shared(normed, is_noisy)


class MiniMaxM3(CausalModel):
    """The MiniMax M3 model: causal, and with a `config.canvas_length` a denoiser, too."""

    layer_class: type[Block] = Block

    def __init__(self, config: MiniMaxM3Family, kernels: str | Kernels = "auto"):
        dense, is_tied = config.dense_intermediate_size, config.tie_word_embeddings
        super().__init__(config, kernels, dense, config.activation, is_tied)
        more = self.denoises, self.kernels, self.canvas_length if config.canvas_selection == "canvas" else None
        self.layers = nn.ModuleList(self.layer_class(config, n, *more) for n in range(config.num_hidden_layers))
        self.norm = MiniMaxM3RMSNorm(config.hidden_size, config.rms_norm_eps, self.kernels)
        self.layer_kinds = tuple(KINDS[each] for each in config.layer_types)
        turned = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
        frequencies = default_frequencies(turned, config.rope_theta)
        self.kinds = {
            name: LayerKind(name, None, frequencies, config.canvas_selection_kept and name == "sparse")
            for name in dict.fromkeys(self.layer_kinds)
        }
