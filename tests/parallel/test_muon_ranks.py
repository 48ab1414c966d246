"""Muon over every mesh moves weights as one process does, whether matrices are whole on a rank or split over ranks."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.tensor_pieces import fill_piece, gathered
from blockdiff.training import muon
from blockdiff.training import optimiser as optim
from tests.support.forked import run_ranks
from tests.support.mesh_ranks import MESHES, made

MESHES_OF = {
    2: ("DDP", "FSDP2", "experts", "tensor"),
    4: ("FSDP2 x experts", "FSDP2 x tensor"),
}
STEPS = 2


def moved(mesh: Mesh) -> dict[str, torch.Tensor]:
    """The weights and adapters after STEPS steps along gradients that are drawn, the same ones over any mesh."""
    objective = made(mesh, "diffusion_gemma", torch.float64, True, True).requires_grad_(True)
    optimiser = optim.build(objective, name="muon", lr=0.1, weight_decay=0.3)
    weights, generator = optim.trainable(objective), torch.Generator().manual_seed(2)
    for _ in range(STEPS):
        for name in sorted(weights):
            parameter = weights[name]
            parameter.grad = torch.empty_like(parameter)
            fill_piece(parameter.grad, torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
        optimiser.step()
    return {name: gathered(parameter).contiguous() for name, parameter in weights.items()}


def over_meshes(ranks: Ranks, directory: Path, names: tuple[str, ...]) -> None:
    warnings.simplefilter("error", FutureWarning)  # what torch is about to drop
    for name in names:
        mesh = Mesh.of(replace(ranks, ranks_per_row=MESHES[name].get("tensor", 1)), **MESHES[name])
        with patch.object(muon, "stacked", wraps=muon.stacked) as exchange:
            found = moved(mesh)
        assert exchange.call_count == STEPS  # one for the matrices of all sizes
        sums = [float(x.double().sum()) for x in found.values()]
        assert ranks.gather(sums) == [sums] * ranks.world  # to the bit
        if ranks.is_main:
            save_file(found, directory / name)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    found = {}
    for world, names in MESHES_OF.items():
        found[world] = tmp_path_factory.mktemp(str(world))
        run_ranks(world, partial(over_meshes, names=names), found[world])
    return found


@pytest.fixture(scope="module")
def alone():
    """The weights that one process moves."""
    return moved(Mesh(Ranks(torch.device("cpu"))))


@pytest.mark.parametrize(("world", "mesh"), [(n, mesh) for n, meshes in MESHES_OF.items() for mesh in meshes])
def test_any_mesh_moves_the_weights_as_one_process_does(several, alone, world, mesh):
    got = load_file(several[world] / mesh)
    assert got.keys() == alone.keys()
    for name, wanted in alone.items():
        assert float((got[name] - wanted).norm()) <= 1e-9 * float(wanted.norm()), name
