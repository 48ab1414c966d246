"""The causal model that Llama and MiniMax M3 build on: with a `canvas_length` in its config it denoises, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from blockdiff.kernels import Kernels
from blockdiff.layers.mlp import SelfConditioning
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.model import BlockDiffusionModel


class CausalModel(BlockDiffusionModel):
    """A model with unscaled embeddings and logits without a cap, causal, and with `config.canvas_length` a denoiser.

    Self-conditioning is then an MLP without an outer norm, of the width `intermediate` and with this activation.
    """

    def __init__(self, config: Any, kernels: str | Kernels, intermediate: int, activation: str):
        super().__init__(config, kernels)
        text = config.get_text_config()
        self.denoises, self.canvas_length = denoises(config), getattr(config, "canvas_length", None) or 1
        hidden, self.vocab_size = text.hidden_size, text.vocab_size
        is_tied = bool(config.tie_word_embeddings)
        self.vocabulary = Vocabulary(self.vocab_size, hidden, None, self.kernels, scale=1.0, is_tied=is_tied)
        self.self_conditioning = None
        if self.denoises:
            sizes = hidden, intermediate, text.rms_norm_eps, self.kernels
            self.self_conditioning = SelfConditioning(*sizes, activation, is_normed=False)


def denoises(config: Any) -> bool:
    """True for a config whose models have canvases; the others are causal alone."""
    return bool(getattr(config, "canvas_length", None))


def wrong_canvas_length(config: Any) -> Iterator[str]:
    """The reason why a `canvas_length` is refused, as `config_checks` has such reasons."""
    canvas_length = getattr(config, "canvas_length", None)
    if canvas_length is not None and (not isinstance(canvas_length, int) or canvas_length < 0):
        yield f"canvas_length is {canvas_length!r}; it must be a number of tokens, or null for a causal model"
