"""The ranks of `test_image_ranks.py`: rows with images on the first, of text on the second."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdiff.canvas import PADDING_ROW, lay_out
from blockdiff.checkpoint import draw_weights, empty, empty_image_side, with_image_side
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.errors import CheckpointError
from blockdiff.objective import Objective
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import split
from blockdiff.tensor_pieces import Piece
from blockdiff.training.kinds.canvas_heldout import heldout
from tests.objective.test_images import L, rows
from tests.support.mesh_ranks import held, stepped, write_pieces
from tests.support.oracle import our_config, widen_routers
from tests.support.pictures import gemma_config

MESHES: dict[str, dict[str, Any]] = {
    "DDP": {},
    "FSDP2": {"shard": "full"},
    "tensor": {"tensor": 2},
}


def trained(mesh: Mesh, trains_images: bool) -> dict[str, Piece]:
    """Losses, gradients and weights of two plain SGD steps in micro-batches of one row, and held-out losses."""
    model = empty(our_config(gemma_config(random.Random(3), use_bidirectional_attention="vision")), kernels="torch")
    model.image_side = empty_image_side(model.config).requires_grad_(trains_images)
    if mesh.is_split:
        split(model, mesh, torch.float64)
    draw_weights(model, 3, "float64", mesh.ranks.device)
    widen_routers(model)
    objective = Objective(model.train(), Linear(), UniformCorruption(96), seed=11, sweep=mesh.is_split)
    mine = [lay_out([row], L, pad_id=0) for row in rows(model)[mesh.ranks.row_rank :: mesh.ranks.row_world]]
    pieces = stepped(objective, mesh, [mine or [lay_out([PADDING_ROW], L, pad_id=0)]] * 2)
    record = heldout(objective, mine, mesh.ranks)  # one batch more on the first rank, and the images
    found = [record["heldout_canvas_loss"], record["heldout_ar_loss"], record["heldout_corrupted_loss"]]
    return pieces | {"held-out losses": held(torch.tensor(found, dtype=torch.float64), mesh.ranks)}


def seen(mesh: Mesh) -> Piece:
    """Hidden states of a row with images, by a model that gets its image side when it is split already."""
    model = empty(our_config(gemma_config(random.Random(3))), kernels="torch")
    if mesh.is_split:
        split(model, mesh, torch.float64)
    with_image_side(draw_weights(model, 3, "float64", mesh.ranks.device))
    row = rows(model)[0]
    with torch.no_grad():
        return held(model.encode(torch.tensor([row.tokens]), images=[row.images]).hidden, mesh.ranks)


def everything(ranks: Ranks, directory: Path) -> None:
    """Train over every mesh, or alone, with an image side that trains and with one that stands still."""
    meshes = {"": Mesh(ranks)}
    if ranks.world > 1:
        alike = {name: replace(ranks, ranks_per_row=said.get("tensor", 1)) for name, said in MESHES.items()}
        meshes = {name: Mesh.of(alike[name], **said) for name, said in MESHES.items()}
    for name, mesh in meshes.items():
        for trains_images in (True, False):
            write_pieces(directory / f"{name}: {trains_images}: {ranks.rank}", trained(mesh, trains_images))
        if name == "FSDP2":
            with pytest.raises(CheckpointError, match=r"^images are not for a model whose weights are sharded without"):
                seen(mesh)
        else:
            write_pieces(directory / f"{name}: seen: {ranks.rank}", {"hidden": seen(mesh)})
