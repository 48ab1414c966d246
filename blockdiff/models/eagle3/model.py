"""The EAGLE3 head: one layer that drafts one token per pass, from the target's hidden states and then from its own.

What is special about it:
- The features of a token are the outputs of some layers of the target (three by default), concatenated, through `fc`.
  Some heads apply norms before `fc`.
- The layer reads a token's embedding and the features of the token before it, each normed, and predicts the token
  after it. The residual is the features alone. A drafted token has no features before it; the layer's own output for
  the token before replaces them.
- So the keys and values of a token also depend on the token before it. The prefix stores each token's features with
  its keys and values, for the next token, even of a later call. The first token of a row has no token before it, and
  no token sees it.
- The head's logits may cover fewer tokens than the target's; adding `d2t` to their ids gives the target's ids.

A block is the last accepted token and the tokens drafted after it. Each pass runs over all its tokens so far and stores
nothing: the target's next call computes the keys of accepted tokens, from true features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockdiff.errors import BlockdiffError
from blockdiff.kernels import Kernels
from blockdiff.kernels.span_attention.paged import PagedTensor, written
from blockdiff.layers.attention import KV, Past
from blockdiff.layers.linear import Linear
from blockdiff.layers.norm import CastRMSNorm
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models import llama
from blockdiff.models.dflash.model import BlockKind
from blockdiff.models.drafted import Drafter
from blockdiff.models.layer_kind import Rope
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.spans import Spans, Sweep

if TYPE_CHECKING:
    from blockdiff.models.eagle3.family import Eagle3Family


class HeadKind(BlockKind):
    """The kind of a head's layer: no token sees the first token of a row."""

    def _narrowed(self, bounds: Tensor) -> Tensor:
        lo, hi, own_lo, own_hi = super()._narrowed(bounds).unbind(-1)
        return torch.stack([lo.clamp(min=1), hi, own_lo, own_hi], -1)


class Layer(llama.Layer):
    """A layer of Llama or Qwen3 that reads embeddings and features; clean tokens only get keys and values."""

    def __init__(self, config: Eagle3Family, kernels: Kernels):
        super().__init__(config.layer, False, kernels)
        hidden = config.hidden_size
        self.hidden_norm = CastRMSNorm(hidden, config.rms_norm_eps, kernels)
        self.norms_residual = bool(config.value_of("norm_before_residual"))
        for name in ("q_proj", "k_proj", "v_proj"):
            wide = Linear(2 * hidden, getattr(self.attention, name).out_features, bias=False)
            setattr(self.attention, name, wide)

    def forward(
        self, x: Tensor, rope: Rope, spans: Spans | Sweep, past: Past | None, is_noisy: bool | Tensor
    ) -> tuple[Tensor, KV]:
        """Return features [B, T, D], given embeddings and features x [B, T, 2D], and the kv of these tokens.

        The features of clean tokens are returned unchanged.
        """
        embedding, before = x.chunk(2, -1)
        normed = self.hidden_norm(before)
        read = torch.cat([self.input_norm(embedding), normed], -1)
        if is_noisy is False:
            return before, self.attention.keys(read, rope, past)
        attended, kv = self.attention(read, rope, spans, past, is_noisy)
        x = (normed if self.norms_residual else before) + attended
        return x + self.mlp(self.post_attention_norm(x), is_noisy), kv


class Eagle3(Drafter):
    """An EAGLE3 head (see `Drafter`).

    For clean tokens `forward` takes the result of `reading`, embeddings and features [B, T, 2D]. For blocks it takes
    token ids and, as the signal, the head's outputs for all of them except the last. It returns outputs before the
    final norm.
    """

    config: Eagle3Family
    table: nn.Parameter | None
    d2t: Tensor | None

    def __init__(self, config: Eagle3Family, kernels: str | Kernels = "auto"):
        super().__init__(config, kernels)
        hidden, eps, of_target = config.hidden_size, config.rms_norm_eps, config.target_hidden_size
        self.target_layers = config.target_layers(6)  # `drafts_for` sets them for the target's depth
        read, has = len(self.target_layers), config.value_of
        self.norms_output = bool(has("norm_output"))
        self.input_norm = CastRMSNorm(read * of_target, eps, self.kernels) if has("norm_before_fc") else None
        each = (CastRMSNorm(of_target, eps, self.kernels) for _ in range(read))
        self.fc_norm = nn.ModuleList(each) if has("fc_norm") else None
        self.fc = Linear(read * of_target, hidden, bias=False)
        self.layers = nn.ModuleList([Layer(config, self.kernels)])
        self.norm = CastRMSNorm(hidden, eps, self.kernels)
        self.table = nn.Parameter(torch.empty(self.vocab_size, hidden))  # None: the target's table is used
        self.head = Vocabulary(config.draft_vocab_size, hidden, None, self.kernels, scale=1.0)  # or the target's
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))  # None: the same tokens
        self.kinds = {"full": HeadKind("full", None, llama.frequencies(config.layer), is_causal=True)}
        self.layer_kinds = ("full",)

    def drafts_for(self, target: BlockDiffusionModel) -> None:
        """Share the target's weights that the head lacks; raise BlockdiffError for a target of another shape."""
        super().drafts_for(target)
        depth, hidden = len(target.layers), target.vocabulary.table.shape[1]
        self.target_layers = self.config.target_layers(depth)
        is_lent = self.table is None or self.head.table is None
        if hidden != self.config.target_hidden_size or (is_lent and hidden != self.config.hidden_size):
            raise BlockdiffError(
                f"the head is of a target with hidden size {self.config.target_hidden_size}, and this has {hidden}; "
                "give the model that it was trained for"
            )
        if self.d2t is not None:
            ids_N = self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)
            if not bool(((ids_N >= 0) & (ids_N < self.vocab_size)).all()):
                raise BlockdiffError(f"the head's d2t leads to tokens that are none of the target's {self.vocab_size}")
        if any(not 0 <= n < depth - 1 for n in self.target_layers):
            outputs = ", ".join(map(str, self.target_layers))
            raise BlockdiffError(
                f"the head reads the outputs of layers {outputs} (the first is 0), and of the target's {depth} all but "
                "the last can be read; give the model that it was trained for"
            )

    def reading(self, tokens_BT: Tensor, features_BTF: Tensor) -> Tensor:
        """Return the embeddings of clean tokens and their features after `fc`, concatenated [B, T, 2D]."""
        if self.input_norm is not None:
            features_BTF = self.input_norm(features_BTF)
        if self.fc_norm is not None:
            parts = features_BTF.chunk(len(self.fc_norm), -1)
            features_BTF = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return torch.cat([self.embedded(tokens_BT), self.fc(features_BTF)], -1)

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        """Return the unscaled embeddings [B, T, D] of tokens."""
        if self.table is not None:
            return F.embedding(tokens_BT, self.table)
        x: Tensor = self.vocabulary.embed(tokens_BT)
        return x if self.vocabulary.root == 1.0 else x / self.vocabulary.root

    def forward(  # type: ignore[override]  # a head has no images and shows nothing
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        spans: Mapping[str, Spans | Sweep],
        past: Sequence[Past] | None = None,
        is_noisy: bool | Tensor = False,
        soft_BTD: Tensor | None = None,
        rope: Mapping[str, Rope] | None = None,
    ) -> tuple[Tensor, list[KV]]:
        """Return the head's outputs [B, T, D] and the kv of its layer: keys, values and features of clean tokens.

        The list of kv is empty for blocks; its tuple is empty if they were written to pages.
        """
        rope, prefix = self.rope(positions_BT) if rope is None else rope, None if past is None else past[0]
        if is_noisy:
            embedding, following = self.embedded(tokens_BT), soft_BTD
        else:
            embedding, features = tokens_BT.chunk(2, -1)
            following = features[:, :-1]
        before = self._features_before(prefix, positions_BT, embedding[:, :1])
        before = before if following is None else torch.cat([before, following], 1)
        x = torch.cat([embedding, before], -1)
        x, kv = self.layers[0](x, rope["full"], spans["full"], None if prefix is None else prefix[:2], is_noisy)
        if is_noisy:
            return x, []
        new_features, into = features[:, :, None], written(prefix)
        if into is not None:
            into[2].write(new_features)
        return x, [(*kv, new_features)] if into is None else [()]

    def _features_before(self, prefix: Past | None, positions_BT: Tensor, like_B1D: Tensor) -> Tensor:
        """Return the features [B, 1, D] of the token before each row's first token, zeros if there is none."""
        if prefix is None:
            return torch.zeros_like(like_B1D)
        last_B, features = positions_BT[:, 0] - 1, prefix[2]
        row_B, column_B = torch.arange(len(last_B), device=last_B.device), last_B.clamp(min=0)
        if isinstance(features, PagedTensor):
            before = features.pool_NPKd.flatten(0, 1)[features.pages.slots_of(row_B, column_B)]
        else:
            before = features[row_B, column_B]
        return before.masked_fill((last_B < 0)[:, None, None], 0.0)

    def draft(self, anchor_B: Tensor, count: int, denoise: Callable[..., Tensor]) -> Tensor:
        """Draft the next `count` tokens [B, count], each by one pass over the anchor and the drafts before it."""
        tokens_BT, outputs, is_lent = anchor_B[:, None], None, self.head.table is None
        head, d2t = (self.vocabulary, None) if is_lent else (self.head, self.d2t)
        for _ in range(count):
            hidden = denoise(tokens_BT, outputs)
            normed = self.norm(hidden)
            outputs = normed if self.norms_output else hidden
            _, likeliest_B = head.scores(normed[:, -1], torch.zeros_like(anchor_B))
            likeliest_B = likeliest_B if d2t is None else likeliest_B + d2t[likeliest_B]
            tokens_BT = torch.cat([tokens_BT, likeliest_B[:, None]], 1)
        return tokens_BT[:, 1:]
