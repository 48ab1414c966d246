"""The causal model that Llama and MiniMax M3 build on: with a `canvas_length` in its config it denoises, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from blockdiff.kernels import Kernels
from blockdiff.layers.mlp import SelfConditioning
from blockdiff.layers.vocabulary import Vocabulary
from blockdiff.models.family import Family
from blockdiff.models.model import BlockDiffusionModel


class CausalModel(BlockDiffusionModel):
    """A model with unscaled embeddings and uncapped logits: causal, and with a `config.canvas_length` a denoiser.

    Self-conditioning, if the family has it, is then an MLP without an outer norm, of width `intermediate` with this
    activation. is_tied: whether the head is the embedding table.
    """

    def __init__(self, config: Family, kernels: str | Kernels, intermediate: int, activation: str, is_tied: bool):
        super().__init__(config, kernels)
        self.vocabulary = Vocabulary(
            config.vocab_size, config.hidden_size, None, self.kernels, scale=1.0, is_tied=is_tied
        )
        self.self_conditioning = None
        if self.denoises and config.has_self_conditioning:
            sizes = config.hidden_size, intermediate, config.rms_norm_eps, self.kernels
            self.self_conditioning = SelfConditioning(*sizes, activation, is_normed=False)
        self.vocabulary.makes_signal = config.has_self_conditioning or not self.denoises


def canvases(theirs: Any) -> dict[str, Any]:
    """Return the config's fields about canvases; without a `canvas_length` the model is causal, with length 1."""
    canvas_length = getattr(theirs, "canvas_length", None)
    return {"canvas_length": canvas_length or 1, "denoises": bool(canvas_length)}


def wrong_canvas_length(theirs: Any) -> Iterator[str]:
    """Yield the reason why the `canvas_length` is refused, if it is (see `config_checks`)."""
    canvas_length = getattr(theirs, "canvas_length", None)
    if canvas_length is not None and (not isinstance(canvas_length, int) or canvas_length < 0):
        yield f"canvas_length is {canvas_length!r}; it must be a number of tokens, or null for a causal model"
