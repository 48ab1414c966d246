"""`convert`: make a block-diffusion model of a causal one; before training it computes the same.

`drafter_for`: make a drafter for a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken

from blockdiff.checkpoint.added import added_to, fill, tensor_shapes
from blockdiff.checkpoint.config import read_config
from blockdiff.checkpoint.create import drawn, init
from blockdiff.checkpoint.generation import special_tokens
from blockdiff.checkpoint.opening import load, model_files
from blockdiff.checkpoint.read import empty
from blockdiff.checkpoint.tokenizer import mask_token, rows_needed
from blockdiff.errors import CheckpointError
from blockdiff.layers.mlp import SelfConditioning
from blockdiff.models.family import NO_HEAD, families
from blockdiff.models.model import BlockDiffusionModel

CANVAS_LENGTH = 256  # as in the released model


@torch.no_grad()
def convert(
    path_or_hub_id: str | Path,
    canvas_length: int = CANVAS_LENGTH,
    seed: int = 0,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    kernels: str = "auto",
    prefix: str = "causal",
) -> BlockDiffusionModel:
    """Return a causal model with the parts for denoising: self-conditioning whose output is 0, and layer scalars of 1.

    Encoding gives the same results as before, to the bit, unless `prefix` is "blocks" (see `Family`). Canvases are
    denoised by the causal model's weights, and each token attends to its whole canvas. The matrices of
    self-conditioning are drawn from `seed`, except the last, which is 0. Raises CheckpointError if the model has
    canvases already, if its family cannot have them, and if `canvas_length` is below 1 or above the model's positions.
    """
    causal = load(path_or_hub_id, dtype, device, kernels)
    config = causal.config
    if config.denoises:
        raise CheckpointError(f"{path_or_hub_id}: a {config.model_type} with canvases already; give a causal model")
    if canvas_length < 1:
        raise CheckpointError(f"canvas_length {canvas_length} is no number of tokens; give 1 or more")
    if canvas_length > (positions := config.max_position_embeddings):
        raise CheckpointError(f"canvas_length {canvas_length} is more than the {positions} positions of the model")
    model = empty(config.with_canvases(canvas_length, prefix), causal.kernels)
    spread, draw = config.initializer_range, torch.Generator().manual_seed(seed)
    for name, shape in added_to(model).items():
        fill(model, name, drawn(model, name, shape, draw, spread).to(causal.device, causal.dtype))
    for name, tensor in causal.state_dict().items():
        fill(model, name, tensor)
    for module in model.modules():
        if isinstance(module, SelfConditioning):
            module.down_proj.weight.zero_()
    model.carried = causal.carried
    return model.eval()


def drafter_for(
    path_or_hub_id: str | Path,
    layers: int = 5,
    block: int = 16,
    seed: int = 0,
    dtype: str | torch.dtype = "float32",
    mask: str | None = None,
) -> BlockDiffusionModel:
    """Return a drafter with random weights for a model, with layers like the model's; the weights are not read.

    block: tokens of a block, including the known first one. mask: the name of the mask token (None: `mask_token` finds
    it). Raises CheckpointError if the model cannot have a drafter.
    """
    files = model_files(path_or_hub_id, with_weights=False)
    config, tokenizer = read_config(files.weights), files.tokenizer()
    if not config.predicts_next_tokens:
        raise CheckpointError(f"{path_or_hub_id}: {NO_HEAD}, and a drafter's tokens could not be verified")
    target = empty(config)
    special = special_tokens(config, files.generation(), tokenizer)
    mask_id = mask_token(tokenizer, target.vocab_size, mask, {*special.eos_ids, special.pad_id, tokenizer.bos_token_id})
    family = next(each for each in families().values() if each.makes_drafters)
    root, softcap = target.vocabulary.root, target.vocabulary.softcap
    return init(family.for_target(config, layers, block, mask_id, root, softcap), seed, dtype=dtype)


@torch.no_grad()
def with_rows_for(model: BlockDiffusionModel, tokenizer: Any) -> BlockDiffusionModel:
    """Return a model with an embedding row for every token of a tokenizer: the same model if it has them all.

    New rows are the mean of the others, so that a new token resembles no token in particular.
    """
    if (needed := rows_needed(tokenizer)) <= model.vocab_size:
        return model
    larger = empty(model.config.with_tokens(needed, {}), model.kernels)
    for name, shape in tensor_shapes(larger).items():
        tensor = model.state_dict()[name]
        if tuple(tensor.shape) != tuple(shape):
            mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
            tensor = torch.cat([tensor, mean.expand(shape[0] - len(tensor), *tensor.shape[1:])])
        fill(larger, name, tensor)
    larger.carried = model.carried
    return larger.eval()


def add_tokens(tokenizer: Any, tokens: Sequence[str]) -> None:
    """Add tokens to a tokenizer. CheckpointError if there are none, or one is empty, repeated or known already."""
    if not tokens:
        raise CheckpointError("--add-tokens: the file holds no token; write one on each line")
    known = dict.fromkeys(tokenizer.get_vocab(), "it is in the vocabulary already")
    for token in tokens:
        if (why := known.get(token) or (None if token.strip() else "it is empty")) is not None:
            raise CheckpointError(f"--add-tokens: {token!r} cannot be added: {why}; leave it out")
        known[token] = "it stands there twice"
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
