"""Two and four processes train over every mesh as one process does: packed, with adapters, with recomputation."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from blockdiff.errors import CheckpointError, RecipeError, RunError
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.recipe_checks import refuse
from blockdiff.training.recipe_files import read_recipe
from blockdiff.training.starting_model import empty_model
from tests.support.expert_ranks import error
from tests.support.families import CONFIGS
from tests.support.forked import run_ranks
from tests.support.mesh_ranks import SCENARIOS, all_meshes, cases, read_whole, train_runs, trained, write_recipes
from tests.support.oracle import our_config
from tests.support.recipes import start

CPU = torch.device("cpu")
# What every tensor of several ranks may differ by from one process's, as a share of its norm.
LIMITS = {torch.float64: {"losses": 1e-10, "gradient": 1e-10, "weight": 1e-10}}
LIMITS[torch.float32] = {"losses": 1e-5, "gradient": 1e-5, "weight": 1e-6}
RUNS = {
    "all, sharded, offloaded": ["parallel.shard=full", "parallel.offload=true"],
    "adapters, sharded, experts split": ["parallel.shard=full", "parallel.experts=2"],
    "adapters over four bits, experts split": ["parallel.experts=2"],
    "adapters over four bits, together": ["parallel.tensor=2"],
    "drafter, sharded": ["parallel.shard=full"],
    "canvas, sharded": ["parallel.shard=full"],
    "head, replicated": [],
    "m3 head, sharded, experts split": ["parallel.shard=full", "parallel.experts=2"],  # over four ranks
}
TIMES = ("seconds", "tokens_per_second", "scored_tokens_per_second", "memory_gib", "sample_seconds")
TIMES += ("rollout_seconds", "update_seconds", "rollout_tokens_per_second")


@pytest.fixture(scope="module")
def one():
    """The findings of one process, encoding in a sweep of its own (False) or together with pass two (True)."""
    return functools.cache(partial(trained, Mesh(Ranks(CPU))))


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """The directories of what two ranks found over every mesh of theirs, and four over two dimensions."""
    two, four = tmp_path_factory.mktemp("two"), tmp_path_factory.mktemp("four")
    write_recipes(two)
    write_recipes(four)
    of_four = {name: changes for name, changes in RUNS.items() if name.startswith("m3")}
    run_ranks(2, all_meshes, two, {name: changes for name, changes in RUNS.items() if name not in of_four})
    run_ranks(4, all_meshes, four, of_four)
    for name in of_four:
        (four / name).rename(two / name)
    return {2: two, 4: four}


@pytest.mark.parametrize(
    ("name", "mesh", "scenario", "world"), [(*case, world) for world in (2, 4) for case in cases(world)]
)
def test_any_mesh_has_the_losses_gradients_and_weights_of_one_process(one, several, name, world, mesh, scenario):
    expected = {key: piece.local for key, piece in one(name, scenario, mesh != "DDP").items()}
    got = read_whole(several[world] / f"{name}: {mesh}: {scenario}: {rank}" for rank in range(world))
    assert got.keys() == expected.keys()
    limits = LIMITS[SCENARIOS[scenario][0]]
    if "tensor" in mesh:
        # the last layer's scalar stands before a norm, so its gradient is rounding alone
        last = max(re.findall(r"layers\.\d+\.decoder_scalar", " ".join(expected)), default="none")
        expected = {key: x for key, x in expected.items() if last not in key or key.startswith("weight")}
    for name, wanted in expected.items():
        off = error(got[name], wanted)
        assert off < limits[name.split()[0]], f"{name}: {off:.1e}"


@pytest.fixture(scope="module")
def alone(several):
    """The directory in which one process has trained both recipes, too."""
    train_runs(several[2], {name: [] for name in dict.fromkeys(run.split(",")[0] for run in RUNS)})
    return several[2]


def flat(records: list[dict]) -> list[dict]:
    """Records without times, whose lists of noise levels are spread out."""
    for record in records:
        for place, level in enumerate(record.pop("heldout_levels", [])):
            record |= {f"{place} {name}": value for name, value in level.items()}
        record |= {f"reward {name}": value for name, value in record.pop("rewards", {}).items()}
        record |= {f"place {n}": value for n, value in enumerate(record.pop("heldout_places", []))}
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_over_any_mesh_measures_samples_averages_and_exports_as_one_process_does(alone, run):
    kind = run.split(",")[0]
    records = [
        [json.loads(line) for line in (alone / name / "metrics.jsonl").read_text().splitlines()] for name in (kind, run)
    ]
    for expected, got in zip(*map(flat, records), strict=True):
        assert got.pop("kind") == expected.pop("kind")
        assert got == pytest.approx(expected, rel=1e-4)
    if kind != "drafter":
        texts = [(alone / name / "samples.jsonl").read_text() for name in (kind, run)]
        assert texts[0] == texts[1]
    file = "adapter/adapter_model.safetensors" if (alone / kind / "adapter").exists() else "model/model.safetensors"
    expected, got = (load_file(alone / name / file) for name in (kind, run))
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        assert float((got[name] - wanted).norm()) <= 1e-4 * float(wanted.norm()), name


@pytest.mark.quick
def test_what_does_not_divide_or_does_not_split_is_refused_in_one_line(tmp_path):
    with pytest.raises(RunError, match=r"^parallel\.experts: 3 .*4 processes.* 1, 2, 4$"):
        Mesh.of(Ranks(CPU, world=4), experts=3)
    with pytest.raises(RunError, match=r"^parallel\.tensor: 2 .*`torchrun .* 2 "):
        Mesh.of(Ranks(CPU), tensor=2)
    write_recipes(tmp_path)
    with pytest.raises(RecipeError, match=r" parallel\.offload .*parallel\.shard: full"):
        read_recipe(tmp_path / "all.yaml", ["parallel.offload=true"])
    with pytest.raises(RecipeError, match=r"^optim\.name: adamw_8bit"):
        refuse(read_recipe(tmp_path / "all.yaml", ["parallel.shard=full", "optim.name=adamw_8bit"]))
    with pytest.raises(RecipeError, match=r"^model\.quantize: parallel\.shard: full"):
        refuse(read_recipe(tmp_path / "adapters over four bits.yaml", ["parallel.shard=full"]))
    with pytest.raises(RecipeError, match=r"^model\.compile: "):
        refuse(read_recipe(tmp_path / "all.yaml", ["parallel.shard=full", "model.compile=true"]))


@pytest.mark.quick
def test_a_mesh_says_what_each_process_holds():
    ranks = Ranks(CPU, world=4)
    assert str(Mesh(ranks, "full", offload=True)) == ("4 processes, a piece of every tensor on each, kept on the host")
    assert str(Mesh(ranks, experts=2)) == "4 processes, all weights but the experts' on each, experts split over 2"
    assert str(Mesh(ranks, "full", 2)) == "4 processes, a piece of every tensor on each, experts split over 2"
    assert str(Mesh(ranks, tensor=4)) == "4 processes, every layer split over 4"
    assert str(Mesh(ranks, "full", tensor=2)) == (
        "4 processes, every layer split over 2, a piece of every tensor on each"
    )


@pytest.mark.quick
@pytest.mark.parametrize("changes", [["parallel.experts=2"], ["parallel.shard=full", "parallel.experts=2"]])
def test_a_mesh_that_a_family_does_not_have_is_refused_also_beside_one_that_it_has(tmp_path, changes):
    write_recipes(tmp_path)
    recipe = read_recipe(tmp_path / "all.yaml", changes)
    base = start(recipe)
    llama = replace(base, config=our_config(CONFIGS["llama tied, denoising"]()))
    with pytest.raises(CheckpointError, match=r"llama .*experts \(meshes: replicate, shard, tensor\)"):
        empty_model(recipe, llama)
    empty_model(read_recipe(tmp_path / "all.yaml", ["parallel.shard=full", "parallel.tensor=2"]), llama)
