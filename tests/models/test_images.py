"""Images in rows against transformers, in fp64 on random configs: hidden states, logits and every gradient."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.canvas import Batch, Canvas, CleanRow, joined, lay_out
from blockdiff.images import images_between, run_end
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.prefix import Prefix
from tests.models.test_minimax_m3 import gradient_of
from tests.support.closeness import relative_error
from tests.support.pictures import Row, gemma_config, image_row, minimax_config, padded, pair

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


def in_chunks(mine: BlockDiffusionModel, row: Row, draw: random.Random) -> Prefix:
    """A row encoded in calls of random lengths, each of which goes on to the end of a run of images."""
    prefix, first, hidden = None, 0, list[Tensor]()
    while first < len(row.tokens):
        end = run_end(row.images, min(first + draw.randint(1, 6), len(row.tokens)))
        chunk = torch.tensor([row.tokens[first:end]])
        prefix = mine.encode(chunk, None, prefix, [images_between(row.images, first, end)])
        hidden.append(prefix.hidden)
        first = end
    assert prefix is not None
    prefix.hidden = torch.cat(hidden, 1)
    return prefix


def packed(rows: Sequence[Row], canvases: Tensor) -> Batch:
    """The first two rows packed into one, and the first by itself, each with its canvas behind it."""
    clean = [
        CleanRow(row.tokens, [Canvas(canvas.tolist(), len(row.tokens))], images=row.images)
        for row, canvas in zip(rows, canvases, strict=True)
    ]
    return lay_out([joined(clean), clean[0]], canvases.shape[1], 0)


def as_in_training(mine: BlockDiffusionModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states of the clean rows of a batch and logits of its canvases, with gradients into the image side."""
    assert batch.images is not None
    images = batch.images.with_features(mine.image_features(batch.images.inputs))
    spans = {name: kind.encode_spans(batch.doc_start_BS, None, images) for name, kind in mine.kinds.items()}
    hidden, kv = mine(batch.tokens_BS, batch.positions_BS, spans, images=images)
    if not mine.denoises:
        return hidden, mine.unembed(hidden)
    canvases = batch.start_BC, batch.doc_start_BC, batch.length_BC, batch.canvas_BCL.shape[-1]
    spans = {name: kind.denoise_spans(*canvases) for name, kind in mine.kinds.items()}
    positions = (batch.start_BC - batch.doc_start_BC)[..., None] + torch.arange(canvases[-1])
    of_canvases, _ = mine(batch.canvas_BCL.flatten(1), positions.flatten(1), spans, kv, True)
    return hidden, mine.unembed(of_canvases)


def some_number(*tensors: Tensor) -> Tensor:
    """A number to which each of the tensors' numbers counts with a weight of its own."""
    return sum(
        ((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in tensors), torch.zeros(())
    )


@pytest.mark.parametrize("seed", range(8))
def test_diffusion_gemma_with_images_is_that_of_transformers_and_so_are_its_gradients(seed, tmp_path):
    draw = random.Random(seed)
    config = gemma_config(draw)
    model, mine = pair(config, seed, tmp_path)
    mine.image_side.requires_grad_(True)
    rows = [image_row(config, draw, parts) for parts in (draw.randint(1, 3), draw.randint(1, 4))]
    canvases = torch.tensor([[draw.randrange(3, 96) for _ in range(6)] for _ in rows])
    truths = [gemma_run(model, row, canvases[n : n + 1]) for n, row in enumerate(rows)]
    tokens, lengths = padded(rows)
    with torch.no_grad():
        prefix = mine.encode(tokens, lengths, images=[row.images for row in rows])
        logits = mine.unembed(mine.denoise(canvases, prefix))
        for n, (hidden, truth) in enumerate(truths):
            close(prefix.hidden[n : n + 1, : lengths[n]], hidden)
            close(logits[n : n + 1], truth)
        parts = in_chunks(mine, rows[1], draw)
        close(parts.hidden, truths[1][0])
        close(mine.unembed(mine.denoise(canvases[1:], parts)), truths[1][1])

    hidden, logits = as_in_training(mine, packed(rows, canvases))
    of_rows = (hidden[:1, : lengths[0]], hidden[:1, lengths[0] : lengths.sum()], hidden[1:, : lengths[0]])
    of_canvases = (*logits[:1].split(6, 1), logits[1:, :6])
    expected = [truths[n][part] for part in (0, 1) for n in (0, 1, 0)]
    for found, truth in zip((*of_rows, *of_canvases), expected, strict=True):
        close(found, truth)
    some_number(*of_rows, *of_canvases).backward()
    some_number(*expected).backward()
    names = mine.config.names
    for name, parameter in mine.named_parameters():
        if not name.startswith("self_conditioning."):  # there was no signal
            close(parameter.grad, model.get_parameter(names.to_hub(name)).grad)


@pytest.mark.parametrize("seed", range(6))
def test_minimax_m3_with_images_is_that_of_transformers_and_so_are_its_gradients(seed, tmp_path):
    draw = random.Random(seed)
    config = minimax_config(draw)
    model, mine = pair(config, seed, tmp_path)
    mine.image_side.requires_grad_(True)
    rows = [image_row(config, draw, parts) for parts in (draw.randint(1, 3), draw.randint(1, 4))]
    truths = []
    for row in rows:
        out = model(input_ids=torch.tensor([row.tokens]), output_hidden_states=True, **arguments(row))
        truths.append((out.hidden_states[-1], out.logits))
    with torch.no_grad():
        close(in_chunks(mine, rows[1], draw).hidden, truths[1][0])
    hidden, logits = as_in_training(mine, packed(rows, torch.zeros(2, 1, dtype=torch.int64)))
    first, second = (len(row.tokens) for row in rows)
    found = [x[b : b + 1, lo:hi] for x in (hidden, logits) for b, lo, hi in
             ((0, 0, first), (0, first, first + second), (1, 0, first))]  # fmt: skip
    expected = [truths[n][part] for part in (0, 1) for n in (0, 1, 0)]
    for each, truth in zip(found, expected, strict=True):
        close(each, truth)
    some_number(*found).backward()
    some_number(*expected).backward()
    grads = {re.sub(r"^model\.language_model\.", "", name): p.grad for name, p in model.named_parameters()}
    for name, parameter in mine.named_parameters():
        if name.startswith("image_side."):
            close(parameter.grad, grads["model." + name.removeprefix("image_side.")])
        elif ".indexer." not in name:
            close(parameter.grad, gradient_of(name, grads))
