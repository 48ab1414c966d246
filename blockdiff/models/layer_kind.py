"""`LayerKind`: the tokens that a kind of layers sees, and its RoPE."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdiff.images import RowImages
from blockdiff.layers.rope import angles, query_scale
from blockdiff.spans import Spans, block_runs, canvas_spans, denoise_spans, encode_spans

Rope = tuple[Tensor, ...]  # cos and sin [B, T, d], and the scale of queries [B, T, 1] if they have one


@dataclass(frozen=True, eq=False)
class LayerKind:
    """A kind of layers, which see the same tokens and have the same RoPE.

    window: number of keys that a clean query sees, itself included (None: all). frequencies: of RoPE, fp32 [d/2].
    keeps_selection: for layers that select among the prefix's keys, whether the selection of a canvas's first step is
    kept for its other steps. sees_whole_images: whether the tokens of adjacent images all see one another. block:
    length of the blocks, counted from a document's start, within which clean tokens see one another (None: causal).
    query_scale: beta and original positions of `rope.query_scale` (None: no scale).
    """

    name: str
    window: int | None
    frequencies: Tensor
    keeps_selection: bool = False
    sees_whole_images: bool = False
    block: int | None = None
    query_scale: tuple[float, int] | None = None
    _on: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def sees_whole_canvases(self) -> bool:
        """Whether every token of a canvas sees the whole canvas, and the same part of the prefix."""
        return True

    def encode_spans(
        self, doc_start_BT: Tensor, past_B: Tensor | None = None, images: RowImages | None = None
    ) -> Spans:
        """Return the spans of clean tokens (see `spans.encode_spans`); images: the images among the call's tokens."""
        run_BT2 = images.run_BS2 if images is not None and self.sees_whole_images else None
        if self.block is not None:
            run_BT2 = block_runs(doc_start_BT, self.block, past_B)
        return encode_spans(doc_start_BT, self.window, past_B, run_BT2)

    def denoise_spans(self, start_BC: Tensor, doc_start_BC: Tensor, length_BC: Tensor, canvas_length: int) -> Spans:
        """Return the spans of canvases side by side (see `spans.denoise_spans`)."""
        return denoise_spans(start_BC, doc_start_BC, length_BC, canvas_length, self.window)

    def canvas_spans(self, start_B: Tensor, canvas_length: int) -> Spans:
        """Return the spans of the canvas after each row (see `spans.canvas_spans`)."""
        return canvas_spans(start_B, canvas_length, self.window)

    def rope(self, positions_BT: Tensor, dtype: torch.dtype) -> Rope:
        """Return cos and sin [B, T, d] for `norm_rope`, and the scale of queries [B, T, 1] if they have one."""
        device = positions_BT.device
        if device not in self._on:
            self._on[device] = self.frequencies.to(device)
        turned = angles(positions_BT, self._on[device], dtype)
        return turned if self.query_scale is None else (*turned, query_scale(positions_BT, *self.query_scale, dtype))
