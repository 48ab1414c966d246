"""`convert`: a causal model becomes a block-diffusion one that computes, before it is trained, what the other did.

`drafter_for`: a drafter is made for a model.
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

CANVAS_LENGTH = 256  # that of the released model


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
    """A causal model with what denoising needs: self-conditioning whose output is zero, and layer scalars of 1.

    Encoding gives what it gave, to the bit, unless `prefix` is "blocks" (see `Family`). Canvases are denoised by the
    causal model's weights, which see all of a canvas; what the self-conditioning is made of beside its last matrix is
    drawn from `seed`. Raises CheckpointError for a model that denoises already, and for a family whose models cannot be
    made to.
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
    """A drafter with random weights for a model, which need not be loaded: its layers are like the model's.

    block: tokens of a block, the one that stands included; mask: the name of the mask token (None: as `mask_token`
    finds it). Raises CheckpointError for a model that cannot have one.
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
    """The model with a row of the embedding table for every token of a tokenizer; itself where it has them.

    New rows are the mean of the others, so that the new tokens begin as no token in particular.
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
    """Add tokens to a tokenizer; CheckpointError for none, and for one that is empty, twice there, or known already."""
    if not tokens:
        raise CheckpointError("--add-tokens: the file holds no token; write one on each line")
    known = dict.fromkeys(tokenizer.get_vocab(), "it is in the vocabulary already")
    for token in tokens:
        if (why := known.get(token) or (None if token.strip() else "it is empty")) is not None:
            raise CheckpointError(f"--add-tokens: {token!r} cannot be added: {why}; leave it out")
        known[token] = "it stands there twice"
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in tokens])
