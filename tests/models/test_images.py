"""Images in rows against transformers, in fp64 on random configs: hidden states, logits and every gradient."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.closeness import relative_error
from tests.pictures import Row, gemma_config, image_row, padded, pair

EXACT = 1e-9


def close(found: Tensor, truth: Tensor) -> None:
    assert relative_error(found, truth) < EXACT


def arguments(row: Row) -> dict[str, Tensor]:
    """The images of a row as transformers takes them, all in one call."""
    values = [each.image.values for each in row.images]
    if "image_grid_thw" in values[0]:
        pixels = torch.cat([each["pixel_values"] for each in values])
        return {"pixel_values": pixels, "image_grid_thw": torch.stack([each["image_grid_thw"] for each in values])}
    of = {"pixel_values": 0, "image_position_ids": -1}
    return {
        name: torch.nn.utils.rnn.pad_sequence([each[name] for each in values], True, filling)
        for name, filling in of.items()
    }


def gemma_run(model: Any, row: Row, canvas_1L: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states of a row, and logits of a canvas behind it; `forward` drops the mask of images, so it is given."""
    tokens = torch.tensor([row.tokens])
    is_image = (tokens == model.config.image_token_id).long()
    like = torch.empty(1, tokens.shape[1], 1, dtype=torch.float64)
    masks = model.model.encoder.create_masks_for_generate(
        config=model.config.text_config,
        inputs_embeds=like,
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.arange(tokens.shape[1])[None],
        mm_token_type_ids=is_image,
    )
    out = model(input_ids=tokens, attention_mask=masks, decoder_input_ids=canvas_1L, **arguments(row))
    return out.encoder_last_hidden_state, out.logits


@pytest.mark.parametrize("seed", range(20))
def test_diffusion_gemma_with_images_is_that_of_transformers(seed, tmp_path):
    draw = random.Random(seed)
    config = gemma_config(draw)
    model, mine = pair(config, seed, tmp_path)
    rows = [image_row(config, draw, parts) for parts in (draw.randint(1, 3), draw.randint(1, 4))]
    canvas = torch.tensor([[draw.randrange(96) for _ in range(6)] for _ in rows])
    truths = [gemma_run(model, row, canvas[n : n + 1]) for n, row in enumerate(rows)]
    tokens, lengths = padded(rows)
    prefix = mine.encode(tokens, lengths, images=[row.images for row in rows])
    logits = mine.unembed(mine.denoise(canvas, prefix))
    for n, (hidden, truth) in enumerate(truths):
        close(prefix.hidden[n : n + 1, : lengths[n]], hidden)
        close(logits[n : n + 1], truth)
