"""The image side of DiffusionGemma: Gemma 4's vision tower, and the projection of its features into the text model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blockdiff.images import ImageInput
from blockdiff.models.image_side import ImageSide, stacked


class GemmaImages(ImageSide):
    """`vision_tower` and `embed_vision` of transformers' encoder; images are padded to the longest of a call.

    vision_config: the content of that key of config.json; config: transformers' config of the whole model.
    """

    released_tokens = 280
    vision_tower: Any
    embed_vision: Any

    def __init__(self, vision_config: Mapping[str, Any], config: Any):
        from transformers import AutoConfig, AutoModel
        from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaMultimodalEmbedder

        vision = AutoConfig.for_model(**{"model_type": "gemma4_vision", **vision_config})
        tower, embedder = AutoModel.from_config(vision), DiffusionGemmaMultimodalEmbedder(vision, config.text_config)
        nn.init.normal_(embedder.embedding_projection.weight, std=config.initializer_range)
        super().__init__(vision_tower=tower, embed_vision=embedder)

    def features(self, inputs: Sequence[ImageInput]) -> Tensor:
        """Return the embeddings of images; padding has position -1, so the tower leaves it out."""
        pixels = stacked((each.values["pixel_values"] for each in inputs), 0.0)
        places = stacked((each.values["image_position_ids"] for each in inputs), -1)
        seen = self.vision_tower(pixel_values=pixels, pixel_position_ids=places).last_hidden_state
        features: Tensor = self.embed_vision(inputs_embeds=seen)
        return features

    def blank(self, tokens: int = 1) -> ImageInput:
        """Return a blank image of `tokens` tokens side by side."""
        config = self.vision_tower.config
        side, width = config.pooling_kernel_size, 3 * config.patch_size**2
        places = torch.cartesian_prod(torch.arange(side), torch.arange(side * tokens)).flip(-1)
        values = {"pixel_values": torch.zeros(len(places), width), "image_position_ids": places}
        return ImageInput(values, tokens, digest=b"")
