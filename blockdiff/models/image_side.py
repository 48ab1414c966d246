"""The image side of a model: transformers' modules, which compute embeddings of images.

It is built when a model first needs it. Its weights are in the model under names that begin with `image_side.`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from blockdiff.images import ImageInput

IMAGE_SIDE = "image_side."  # begins the names of its tensors in a model


class ImageSide(nn.Module):
    """A family's modules for images: `side(inputs) -> features [sum of the inputs' tokens, D]`.

    A family's subclass implements `features`, which calls its modules for several images at once. In training only the
    images are saved; the backward runs the modules again. released_tokens: the most tokens of an image with the
    processor of the released models.
    """

    released_tokens: int

    def __init__(self, **parts: nn.Module):
        super().__init__()
        for name, part in parts.items():
            _fix_constants(part)
            self.add_module(name, part)

    def forward(self, inputs: Sequence[ImageInput]) -> Tensor:
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
            again: Tensor = checkpoint(self.features, inputs, use_reentrant=False)
            return again
        with torch.no_grad():
            return self.features(inputs)

    def features(self, inputs: Sequence[ImageInput]) -> Tensor:
        """Return the embeddings of images, concatenated [sum of their tokens, D]."""
        raise NotImplementedError

    def blank(self, tokens: int = 1) -> ImageInput:
        """Return a blank image of `tokens` tokens, for plans and for ranks that run the modules because others do."""
        raise NotImplementedError


def _fix_constants(part: nn.Module) -> None:
    """Replace a module's non-persistent buffers, which are RoPE's frequencies, by plain tensors with their values.

    The module may have been built on the meta device, and casting a buffer to another dtype would round it.
    """
    for module in part.modules():
        if module._non_persistent_buffers_set:
            config: Any = module.config
            with torch.device("cpu"):
                fresh = type(module)(config)
            for name in sorted(module._non_persistent_buffers_set):
                delattr(module, name)
                setattr(module, name, fresh.get_buffer(name).detach().clone())  # an nn.Buffer would be a buffer again


def stacked(tensors: Iterable[Tensor], filling: float) -> Tensor:
    """Stack tensors of unequal length to [tensors, longest, ...], padded at the end with `filling`."""
    return nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=filling)
