"""What the rest of the house may ask of a model, whatever its family: its kinds of layers and its passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.layers.attention import KV
from blockdiff.layers.rope import angles
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.prefix import Prefix
from blockdiff.spans import Spans, denoise_spans, encode_spans

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class LayerKind:
    """What layers of one kind have in common: which tokens they see, and how they turn them.

    window: how many keys a clean query sees, itself included (None: all); frequencies: of RoPE, fp32 [d/2].
    """

    name: str
    window: int | None
    frequencies: Tensor
    _on: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def encode_spans(self, doc_start_BT: Tensor, past_B: Tensor | None = None) -> Spans:
        """The causal spans of clean tokens, see `spans.encode_spans`."""
        return encode_spans(doc_start_BT, self.window, past_B)

    def denoise_spans(
        self, start_BC: Tensor, doc_start_BC: Tensor, length_BC: Tensor, canvas_length: int
    ) -> Spans:
        """The spans of canvases laid side by side, see `spans.denoise_spans`."""
        return denoise_spans(start_BC, doc_start_BC, length_BC, canvas_length, self.window)

    def rope(self, positions_BT: Tensor, dtype: torch.dtype) -> Rope:
        """cos and sin [B, T, d] for `norm_rope`."""
        device = positions_BT.device
        if device not in self._on:
            self._on[device] = self.frequencies.to(device)
        return angles(positions_BT, self._on[device], dtype)


class BlockDiffusionModel(nn.Module):
    """A denoiser with a prefix: every family's model is one, and nothing else in the house knows the families apart.

    Every way into the weights is a call of a module (of the model or of its vocabulary), because what shards weights
    gathers them around such calls and nowhere else.
    """

    config: Any
    canvas_length: int
    vocab_size: int
    vocabulary: Vocabulary
    layers: nn.ModuleList
    kinds: dict[str, LayerKind]  # by name
    layer_kinds: tuple[str, ...]  # the name of each layer's kind
    carried: Any = None  # tensors and files of the checkpoint that the model does not run

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        spans: Mapping[str, Spans],
        past: list[KV] | None = None,
        is_noisy: bool | Tensor = False,
        soft_BTD: Tensor | None = None,
        rope: Mapping[str, Rope] | None = None,
    ) -> tuple[Tensor, list[KV]]:
        """Run the layers over any geometry: hidden states [B, T, D] after the final norm, and each layer's kv.

        spans: by kind of layer; past: each layer's prefix tensors; is_noisy: False = clean tokens (encode), True =
        tokens of canvases (denoise), or which they are as booleans [B, T]; soft_BTD: the signal of noisy tokens (None:
        none); rope: what `rope(positions_BT)` gives, for who has it. The kv of a call that is all noisy is left out
        (an empty list): nothing ever sees those tokens again.
        """
        raise NotImplementedError

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
        return [p for name, p in self.named_parameters() if ".router." in name]

    def rope(self, positions_BT: Tensor) -> dict[str, Rope]:
        """cos and sin of every kind of layer."""
        return {name: kind.rope(positions_BT, self.dtype) for name, kind in self.kinds.items()}

    def encode(self, tokens_BS: Tensor, lengths: Tensor | None = None, prefix: Prefix | None = None) -> Prefix:
        """Encode clean tokens causally; with `prefix`, append them to it (and consume it).

        tokens_BS: int64, rows right-padded; lengths: valid tokens of each row, int64 [B] (None: all valid).
        Returns the Prefix that `denoise` and further calls read; its `hidden` is [B, S, D].
        """
        column = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        doc_start_BS = torch.zeros_like(tokens_BS)
        if lengths is not None:
            doc_start_BS = torch.where(column < lengths[:, None], 0, -1)
        if prefix is None:
            spans = {name: kind.encode_spans(doc_start_BS) for name, kind in self.kinds.items()}
            hidden, kv = self(tokens_BS, column.expand(tokens_BS.shape), spans)
            return Prefix.of(hidden, kv, [self.kinds[name] for name in self.layer_kinds], lengths)
        spans = {
            name: prefix.held(kind, kind.encode_spans(doc_start_BS, prefix.lengths_B))
            for name, kind in self.kinds.items()
        }
        hidden, kv = self(tokens_BS, prefix.lengths_B[:, None] + column, spans, prefix.layers())
        return prefix.extended(hidden, kv, lengths)

    def denoise(self, canvas_BL: Tensor, prefix: Prefix, soft_embedding: Tensor | None = None) -> Tensor:
        """Hidden states [B, L, D] of one canvas per row, after the final norm; leaves the prefix as it is.

        canvas_BL: int64 noisy tokens, standing right after the row's cached tokens; soft_embedding: [B, L, D] signal
        of the last prediction (None, or rows of zeros: no signal).
        """
        positions_BL, spans, rope = prefix.canvas(canvas_BL.shape[1], self.rope)
        hidden, _ = self(canvas_BL, positions_BL, spans, prefix.layers(), True, soft_embedding, rope)
        return hidden

    def unembed(self, hidden: Tensor) -> Tensor:
        """Soft-capped logits, fp32 [..., V]: a convenience; training and sampling never hold them all."""
        return self.vocabulary.logits(hidden)

    def soft_embedding(self, logits: Tensor) -> Tensor:
        """Soft embedding [..., D] of logits [..., V]: a convenience, see `vocabulary.soft_embedding`."""
        return self.vocabulary.soft_embedding_of(logits)
