"""Random pictures in rows of tokens, cut as the families' processors cut them, and both families' oracles for them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import blockdiff
from blockdiff.images import ImageInput, PlacedImage
from blockdiff.models.model import BlockDiffusionModel
from tests.support.families import m3_config
from tests.support.oracle import oracle as gemma_oracle
from tests.support.oracle import our_config, tiny_config

SPREAD = 0.4  # of the weights of image sides


@dataclass(frozen=True)
class Row:
    """A row of tokens, its images, and as transformers wants them."""

    tokens: list[int]
    images: list[PlacedImage]


def gemma_config(draw: random.Random, **text: Any) -> Any:
    """A tiny DiffusionGemma whose window is shorter than many images."""
    layers = draw.choice(([1, 0], [0, 1], [1, 1, 0]))
    values: dict[str, Any] = dict(
        vocab_size=96,
        hidden_size=draw.choice((16, 32)),
        intermediate_size=24,
        num_hidden_layers=len(layers),
        layer_types=["sliding_attention" if each else "full_attention" for each in layers],
        num_attention_heads=4,
        num_key_value_heads=draw.choice((1, 2)),
        head_dim=8,
        global_head_dim=16,
        num_experts=4,
        moe_intermediate_size=16,
        sliding_window=draw.choice((2, 3, 5, 9)),
        use_bidirectional_attention=draw.choice(("vision", "vision", None)),
    )
    values["layer_types"][-1] = "full_attention"
    config = tiny_config(canvas_length=6, **values | text)
    vision = config.vision_config
    vision.num_hidden_layers, vision.patch_size = draw.choice((1, 2)), draw.choice((2, 4))
    vision.pooling_kernel_size, vision.position_embedding_size = draw.choice((2, 3)), 24
    vision.standardize, vision.use_clipped_linears = draw.choice((True, False)), draw.choice((True, False))
    vision.hidden_size, vision.intermediate_size = 16, 24
    vision.num_attention_heads = vision.num_key_value_heads = draw.choice((1, 2))
    vision.head_dim = 8
    config.image_token_id, config.boi_token_id, config.eoi_token_id = 93, 94, 95
    return config


def minimax_config(draw: random.Random) -> Any:
    """A tiny MiniMax M3, of sparse and dense layers."""
    config = m3_config(topk=draw.choice((2, 3, 99)), index_block_size=draw.choice((2, 4)))
    vision = config.vision_config
    vision.num_hidden_layers, vision.patch_size = draw.choice((1, 2)), draw.choice((2, 4))
    vision.hidden_size, vision.num_attention_heads = 24, draw.choice((1, 2))
    vision.spatial_merge_size, vision.temporal_patch_size = 2, draw.choice((1, 2))
    return config


def picture(config: Any, draw: random.Random, largest: int = 3) -> ImageInput:
    """A picture of random pixels, of a random number of tokens in each direction."""
    wide, high = draw.randint(1, largest), draw.randint(1, largest)
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    vision = SimpleNamespace(**config.to_dict()["vision_config"])
    if config.model_type == "diffusion_gemma":
        k, width = vision.pooling_kernel_size, 3 * vision.patch_size**2
        y, x = torch.meshgrid(torch.arange(high * k), torch.arange(wide * k), indexing="ij")
        places = torch.stack([x, y], -1).reshape(-1, 2)
        values = {"pixel_values": torch.rand(len(places), width, generator=generator), "image_position_ids": places}
    else:
        k, width = vision.spatial_merge_size, 3 * vision.temporal_patch_size * vision.patch_size**2
        patches = torch.rand(wide * high * k * k, width, generator=generator)
        values = {"pixel_values": patches, "image_grid_thw": torch.tensor([1, high * k, wide * k])}
    return ImageInput(values, wide * high, draw.randbytes(8))


def image_row(config: Any, draw: random.Random, parts: int) -> Row:
    """A row of texts and pictures in turn; some pictures are adjacent, with nothing between them."""
    tokens, images = [], list[PlacedImage]()
    for part in range(parts):
        tokens += [draw.randrange(3, 90) for _ in range(draw.choice((0, 1, 4)) if part else 1)]
        images.append(PlacedImage(picture(config, draw), len(tokens)))
        tokens += [our_config(config).image_tokens()[1]] * images[-1].image.tokens
    tokens += [draw.randrange(3, 90) for _ in range(draw.randint(1, 5))]
    return Row(tokens, images)


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Rows as one tensor [B, S], and their lengths."""
    most = max(len(row.tokens) for row in rows)
    return torch.tensor([row.tokens + [0] * (most - len(row.tokens)) for row in rows]), torch.tensor(
        [len(row.tokens) for row in rows]
    )


def pair(config: Any, seed: int, directory: Path) -> tuple[Any, BlockDiffusionModel]:
    """transformers' model with an image side that matters, and ours, loaded from its files."""
    model = (gemma_oracle if config.model_type == "diffusion_gemma" else minimax_oracle)(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if not ("vision" in name or "projector" in name):
                continue
            if x.dim():
                near = 1.0 if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "std_scale")) else 0.0
                x.copy_(torch.randn(x.shape, generator=generator) * SPREAD + near)
            else:  # limits of clipped layers, which some numbers reach
                x.fill_(-1.5 if name.endswith("min") else 1.5)
    model.save_pretrained(directory)
    return model, blockdiff.with_image_side(blockdiff.load(directory, dtype="float64", device="cpu", kernels="torch"))


def minimax_oracle(config: Any, seed: int) -> Any:
    """transformers' MiniMax M3 in fp64, as `tests/models/test_minimax_m3.py` has it."""
    from tests.models.test_minimax_m3 import oracle

    return oracle(config, seed)
