"""The image side of a model: transformers' own modules, which make embeddings of images.

It is built where a model needs it, and its weights are the model's under names that begin with `image_side.`.
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
    """The modules of a family that see images: `side(inputs) -> features [sum of the inputs' tokens, D]`.

    A family's own says in `features` how its modules are called for several images at once. In training nothing of
    the forward is kept but the images: the backward runs the modules again. released_tokens: the most tokens that the
    released models' processor makes of an image.
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
        """The embeddings of images, one image after the other."""
        raise NotImplementedError

    def blank(self, tokens: int = 1) -> ImageInput:
        """An image without content: for a rank that runs the modules only because others do, and for plans."""
        raise NotImplementedError


def _fix_constants(part: nn.Module) -> None:
    """Make plain tensors of a module's buffers that no checkpoint has, which are frequencies of RoPE.

    The modules may have been made without memory, and a cast to another dtype would round them.
    """
    for module in part.modules():
        if module._non_persistent_buffers_set:
            config: Any = module.config
            with torch.device("cpu"):
                made = type(module)(config)
            for name in sorted(module._non_persistent_buffers_set):
                delattr(module, name)
                setattr(module, name, made.get_buffer(name).detach().clone())  # an nn.Buffer would be one again


def stacked(tensors: Iterable[Tensor], filling: float) -> Tensor:
    """Tensors of unequal length as one, [tensors, longest, ...], filled up behind the shorter ones."""
    return nn.utils.rnn.pad_sequence(list(tensors), batch_first=True, padding_value=filling)
