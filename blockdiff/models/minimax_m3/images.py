"""The image side of MiniMax M3: its vision tower, and the projector that merges neighbouring patches into a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from blockdiff.images import ImageInput
from blockdiff.models.image_side import ImageSide

# transformers' processor needs torchvision. Qwen2-VL's, which has a PIL version, cuts alike with these sizes.
PIXELS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 451_584}
BEFORE, AFTER = "]<]start of image[>[", "]<]end of image[>["  # their ids are not in the config


class MiniMaxM3Images(ImageSide):
    """`vision_tower` and `multi_modal_projector` of transformers; the patches of a call's images are one sequence.

    config: transformers' config of the whole model.
    """

    released_tokens = PIXELS["longest_edge"] // 28**2
    vision_tower: Any
    multi_modal_projector: Any

    def __init__(self, config: Any):
        from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
            MiniMaxM3VLMultiModalProjector,
            MiniMaxM3VLVisionModel,
        )

        tower, projector = MiniMaxM3VLVisionModel(config.vision_config), MiniMaxM3VLMultiModalProjector(config)
        super().__init__(vision_tower=tower, multi_modal_projector=projector)

    def features(self, inputs: Sequence[ImageInput]) -> Tensor:
        """Return the embeddings of images; a patch sees only the patches of its own image."""
        pixels = torch.cat([each.values["pixel_values"] for each in inputs])
        grids = torch.stack([each.values["image_grid_thw"] for each in inputs])
        seen = self.vision_tower(pixel_values=pixels, grid_thw=grids).last_hidden_state
        features: Tensor = self.multi_modal_projector(seen.squeeze(0))
        return features

    def blank(self, tokens: int = 1) -> ImageInput:
        """Return a blank image of `tokens` tokens side by side."""
        config = self.vision_tower.config
        side = config.spatial_merge_size
        width = config.num_channels * config.temporal_patch_size * config.patch_size**2
        pixels, grid = torch.zeros(side * side * tokens, width), torch.tensor([1, side, side * tokens])
        return ImageInput({"pixel_values": pixels, "image_grid_thw": grid}, tokens, digest=b"")


def processor_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Convert a `preprocessor_config.json` for Qwen2-VL's processor; unchanged if its processor is not MiniMax's."""
    if "MiniMax" not in str(values.get("image_processor_type")):
        return values
    size = values.get("size")  # the released file has one that nothing uses
    is_used = isinstance(size, Mapping) and PIXELS.keys() <= size.keys()
    return {**values, "image_processor_type": "Qwen2VLImageProcessor", "size": size if is_used else PIXELS}
