"""The ranks of `test_plan_mesh.py`: steps over a mesh whose tensors are traced, on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from blockdiff import checkpoint
from blockdiff.models.adapters import draw_adapters
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import replicate, split
from blockdiff.tensor_pieces import is_spread
from blockdiff.training.build import make_mesh
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.recomputation import checkpoint_activations
from blockdiff.training.starting_model import computed_in
from tests.support.peaks import peak_memories
from tests.support.recipes import largest_batch, start, without_weights

CPU = torch.device("cpu")


def held(recipe: Recipe, ranks: Ranks, tokens: int) -> int:
    """The peak of live bytes of a rank's step above what it held before, gradients among them."""
    base, mesh = start(recipe), make_mesh(recipe, ranks)
    objective = without_weights(recipe, base)
    model = objective.model.train()
    if recipe.train.activation_checkpointing:
        checkpoint_activations(model)
    if mesh.is_split:
        split(model, mesh, torch.float32, computed_in(recipe))
    checkpoint.draw_weights(model, 0, "float32", CPU)
    draw_adapters(model, 0, CPU, torch.float32)
    module: nn.Module = replicate(objective.train(), mesh)
    batch = largest_batch(recipe, model, tokens, recipe.train.batch_size * mesh.tensor // ranks.world)

    def work() -> None:
        losses = module(batch)
        (losses["canvas"] + losses["ar"]).backward()

    def release() -> None:
        objective.zero_grad(set_to_none=True)

    # DDP has its gradients in buckets that it keeps, so they are in no trace. What gloo's threads hold for FSDP2's
    # exchanges goes when they are scheduled: the least of several traces has none of it.
    traces = 4 if mesh.shard == "full" else 1
    is_replicated = mesh.shard == "none" and mesh.tensor == 1
    buckets = sum(p.nbytes for p in objective.parameters() if is_replicated and p.requires_grad and not is_spread(p))
    return buckets + min(peak_memories(work, CPU, release, traces))


def traced(ranks: Ranks, directory: Path, tree: dict[str, Any], cases: list[list[str]], tokens: int) -> None:
    """Write the peak of every case, a list of overrides of the recipe `tree`, as rank 0 has it."""
    found = [held(read_recipe(tree, case), ranks, tokens) for case in cases]
    if ranks.is_main:
        (directory / "held.json").write_text(json.dumps(found))
