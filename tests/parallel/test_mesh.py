"""Two and four processes train over every mesh as one process does: packed, with adapters, with recomputation."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from tests.forked import run_ranks
from tests.mesh_ranks import MESHES, SCENARIOS, all_meshes, trained

ALONE = Mesh(Ranks(torch.device("cpu")))
# What every tensor of two ranks may differ by from one process's, as a share of its norm.
LIMITS = {torch.float64: {"losses": 1e-10, "gradient": 1e-10, "weight": 1e-10}}
LIMITS[torch.float32] = {"losses": 1e-5, "gradient": 1e-5, "weight": 1e-6}
OVER = [*((2, mesh) for mesh in MESHES), (4, "FSDP2 x experts")]


@pytest.fixture(scope="module")
def one():
    """What one process finds, encoding in a sweep of its own (False) or together with pass two (True)."""
    return {(name, one_sweep): trained(ALONE, name, one_sweep) for name in SCENARIOS for one_sweep in (False, True)}


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The directories of what two ranks found over every mesh, and four over two dimensions."""
    two, four = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("four")
    run_ranks(2, all_meshes, two, list(MESHES), list(SCENARIOS))
    run_ranks(4, all_meshes, four, ["FSDP2 x experts"], list(SCENARIOS))
    return {2: two, 4: four}


@pytest.mark.parametrize(
    ("world", "mesh", "scenario"),
    [(world, mesh, scenario) for world, mesh in OVER for scenario in SCENARIOS],
)
def test_any_mesh_has_the_losses_gradients_and_weights_of_one_process(one, several, world, mesh, scenario):
    expected, got = one[scenario, mesh != "DDP"], load_file(several[world] / f"{mesh}: {scenario}")
    assert got.keys() == expected.keys()
    limits = LIMITS[SCENARIOS[scenario][0]]
    for name, wanted in expected.items():
        error = float((got[name].double() - wanted.double()).norm() / wanted.double().norm())
        assert error < limits[name.split()[0]], f"{name}: {error:.1e}"
