"""Random pictures as processors cut them, placed in rows, and transformers' arguments for the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from blockdiff.images import ImageInput, PlacedImage


def gemma_picture(config: Any, height: int, width: int, seed: int = 0) -> ImageInput:
    """A picture of so many tokens each way, for DiffusionGemma."""
    vision = config.vision_config
    k, generator = vision.pooling_kernel_size, torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(k * height), torch.arange(k * width), indexing="ij")
    pixels = torch.rand(x.numel(), 3 * vision.patch_size**2, generator=generator)
    values = {"pixel_values": pixels, "image_position_ids": torch.stack([x.flatten(), y.flatten()], -1)}
    return ImageInput(values, height * width, _digest(pixels, height, width))


def m3_picture(config: Any, height: int, width: int, seed: int = 0) -> ImageInput:
    """A picture of so many tokens each way, for MiniMax M3."""
    vision = config.vision_config
    m, generator = vision.spatial_merge_size, torch.Generator().manual_seed(seed)
    patch = vision.num_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.randn(m * height * m * width, patch, generator=generator)
    values = {"pixel_values": pixels, "image_grid_thw": torch.tensor([1, m * height, m * width])}
    return ImageInput(values, height * width, _digest(pixels, height, width))


def placed(parts: Sequence[list[int] | ImageInput], placeholder: int) -> tuple[list[int], list[PlacedImage]]:
    """The tokens of a row of texts and pictures, and where its pictures stand."""
    tokens, images = list[int](), list[PlacedImage]()
    for part in parts:
        if isinstance(part, ImageInput):
            images.append(PlacedImage(part, len(tokens)))
            tokens += [placeholder] * part.tokens
        else:
            tokens += part
    return tokens, images


def theirs_of(tokens: Sequence[int], images: Sequence[PlacedImage], dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments with which transformers' models see a row and its pictures."""
    row_1S = torch.tensor([list(tokens)])
    found = {"input_ids": row_1S}
    if not images:
        return found
    values = [each.image.values for each in images]
    if "image_grid_thw" in values[0]:
        found["pixel_values"] = torch.cat([each["pixel_values"] for each in values]).to(dtype)
        return found | {"image_grid_thw": torch.stack([each["image_grid_thw"] for each in values])}
    pad = torch.nn.utils.rnn.pad_sequence
    found["pixel_values"] = pad([each["pixel_values"] for each in values], batch_first=True).to(dtype)
    found["image_position_ids"] = pad(
        [each["image_position_ids"] for each in values], batch_first=True, padding_value=-1
    )
    is_image_1S = torch.zeros_like(row_1S)
    for each in images:
        is_image_1S[0, each.column : each.end] = 1
    return found | {"mm_token_type_ids": is_image_1S}


def _digest(pixels: Tensor, height: int, width: int) -> bytes:
    return hashlib.sha256(f"{height} x {width}".encode() + pixels.numpy().tobytes()).digest()
