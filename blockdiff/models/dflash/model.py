"""The drafter: Qwen3's layers over a block of tokens, which also see keys computed from the target's hidden states.

What is special about it:
- It has no vocabulary: the target's embeds its tokens and makes its logits, so their hidden sizes are the same.
- A clean token enters as the outputs of chosen layers of the target, concatenated (its features), through `fc` and
  `hidden_norm`. Every layer computes keys and values from these alone, so they are cached like a prefix's.
- A block is the last accepted token (the anchor) and masks. Its tokens all see one another, and each mask's position
  predicts the token there in one pass. In sliding layers each token sees the window - 1 tokens before it, and none
  after it unless the config has `is_causal: false`.
- Heads, norms, MLP and RoPE are Qwen3's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from blockdiff.errors import BlockdiffError
from blockdiff.kernels import Kernels
from blockdiff.layers.attention import KV, Past
from blockdiff.layers.linear import Linear
from blockdiff.layers.norm import CastRMSNorm
from blockdiff.models import llama
from blockdiff.models.drafted import Drafter, draft_block
from blockdiff.models.layer_kind import LayerKind, Rope
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.spans import Spans, Sweep

if TYPE_CHECKING:
    from blockdiff.models.dflash.family import DFlashFamily


@dataclass(frozen=True, eq=False)
class BlockKind(LayerKind):
    """A kind of layers in which a block's tokens see the tokens in the window, and none after them if `is_causal`."""

    is_causal: bool = False

    @property
    def sees_whole_canvases(self) -> bool:
        """Whether all tokens of a block see the same: there is no window, and the kind is not causal."""
        return self.window is None and not self.is_causal

    def denoise_spans(self, start_BC: Tensor, doc_start_BC: Tensor, length_BC: Tensor, canvas_length: int) -> Spans:
        """Return the spans of blocks side by side (see `spans.denoise_spans`)."""
        spans = super().denoise_spans(start_BC, doc_start_BC, length_BC, canvas_length)
        bounds_BCL4 = spans.bounds_BT4.view(*start_BC.shape, canvas_length, 4)
        return Spans(self._narrowed(bounds_BCL4).flatten(1, 2))

    def canvas_spans(self, start_B: Tensor, canvas_length: int) -> Spans:
        """Return the spans of the block after each row (see `spans.canvas_spans`)."""
        return Spans(self._narrowed(super().canvas_spans(start_B, canvas_length).bounds_BT4), is_padded=False)

    def _narrowed(self, bounds: Tensor) -> Tensor:
        """Cut bounds [..., L, 4], in which the tokens of blocks see everything, to the keys that this kind sees."""
        if self.sees_whole_canvases:
            return bounds
        place_L = torch.arange(bounds.shape[-2], device=bounds.device)
        lo, hi, own_lo, own_hi = bounds.unbind(-1)
        first = own_lo[..., :1] + place_L
        reach = 1 if self.is_causal or self.window is None else self.window
        own_hi = torch.where(own_hi > own_lo, own_hi.minimum(first + reach), own_hi)
        if self.window is not None:
            lo, own_lo = lo.maximum(hi + place_L + 1 - self.window), own_lo.maximum(first + 1 - self.window)
        return torch.stack([lo, hi.expand_as(lo), own_lo, own_hi], -1)


class Layer(llama.Layer):
    """One of Qwen3's layers; clean tokens only get keys and values."""

    def forward(
        self, x: Tensor, rope: Rope, spans: Spans | Sweep, past: Past | None, is_noisy: bool | Tensor
    ) -> tuple[Tensor, KV]:
        """Return the residual after the layer, given x [B, T, D], and the keys and values of these tokens.

        The x of clean tokens is returned unchanged.
        """
        if is_noisy is False:
            return x, self.attention.keys(x, rope, past)
        return super().forward(x, rope, spans, past, is_noisy)


class DFlash(Drafter):
    """A DFlash drafter (see `Drafter`).

    `forward` takes features [B, T, layers * D] in place of clean tokens, and token ids for blocks; `layers` is the
    number of the target's layers that it reads.
    """

    config: DFlashFamily

    def __init__(self, config: DFlashFamily, kernels: str | Kernels = "auto"):
        super().__init__(config, kernels)
        assert config.mask is not None, "a drafter that is read has one"
        self.target_layers, self.mask_id = config.target_layer_ids, config.mask
        self.fc = Linear(len(self.target_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = CastRMSNorm(config.hidden_size, config.rms_norm_eps, self.kernels)
        self.layers = nn.ModuleList(Layer(config, False, self.kernels) for _ in range(config.num_hidden_layers))
        self.norm = CastRMSNorm(config.hidden_size, config.rms_norm_eps, self.kernels)
        self.layer_kinds = tuple(llama.KINDS[each] for each in config.layer_types)
        is_causal, turns = config.is_causal, llama.frequencies(config)
        all_kinds = {
            "full": BlockKind("full", None, turns, is_causal=bool(is_causal)),
            "sliding": BlockKind("sliding", config.sliding_window, turns, is_causal=is_causal in (None, True)),
        }
        self.kinds = {name: all_kinds[name] for name in dict.fromkeys(self.layer_kinds)}

    def drafts_for(self, target: BlockDiffusionModel) -> None:
        """Share a target's vocabulary; BlockdiffError unless hidden size and number of layers are as in training."""
        super().drafts_for(target)
        needed = (self.config.hidden_size, self.config.num_target_layers)
        present = (target.vocabulary.table.shape[1], len(target.layers))
        if needed != present:
            raise BlockdiffError(
                "the drafter is of a target with hidden size {} and {} layers, and this one has {} and {}; "
                "give the model that it was trained for".format(*needed, *present)
            )
        self._scale = self.config.input_embedding_scale / target.vocabulary.root

    def reading(self, tokens_BT: Tensor, features_BTF: Tensor) -> Tensor:
        """Return the features: the drafter reads no embeddings of clean tokens."""
        return features_BTF

    def draft(self, anchor_B: Tensor, count: int, denoise: Callable[..., Tensor]) -> Tensor:
        """Return the likeliest `count` tokens [B, count] after each row's last token, anchor_B, in one `denoise`."""
        return draft_block(self, self.mask_id, anchor_B, count, denoise)

    def embedded(self, tokens_BT: Tensor) -> Tensor:
        """Return the first layer's input [B, T, D] for features [B, T, layers * D] or for token ids of blocks."""
        if tokens_BT.is_floating_point():
            x: Tensor = self.hidden_norm(self.fc(tokens_BT))
            return x
        x = self.vocabulary.embed(tokens_BT)
        return x if self._scale == 1.0 else x * self._scale
