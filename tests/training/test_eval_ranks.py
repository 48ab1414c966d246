"""Three processes evaluate and sample as one does."""

from __future__ import annotations

import json

import pytest
import torch

from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from tests.support.eval_ranks import figures, write_figures
from tests.support.forked import run_ranks

WORLD = 3


@pytest.fixture(scope="module")
def of_meshes(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(WORLD, write_figures, directory)
    return [json.loads((directory / f"found-{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.fixture(params=["none", "full"])
def found(of_meshes, request):
    """The findings of each rank, with whole weights or with pieces of them."""
    return [rank[request.param] for rank in of_meshes]


@pytest.fixture(scope="module")
def alone():
    return json.loads(json.dumps(figures(Mesh(Ranks(torch.device("cpu"))))))


@pytest.mark.parametrize("part", ["heldout", "fewer than ranks"])
def test_every_rank_has_the_heldout_figures_of_one_process(found, alone, part):
    for rank in found:
        assert rank[part] == found[0][part]
        assert rank[part].keys() == alone[part].keys()
        for name, value in alone[part].items():
            if name != "heldout_levels":
                assert rank[part][name] == pytest.approx(value, rel=1e-6), name
        for level, expected in zip(rank[part]["heldout_levels"], alone[part]["heldout_levels"], strict=True):
            assert level == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("part", ["sampled", "fewer prompts than ranks"])
def test_every_rank_has_the_texts_and_figures_of_one_process(found, alone, part):
    expected = alone[part]
    for rank in found:
        assert rank[part]["texts"] == expected["texts"]
        assert {**rank[part]["record"], "sample_seconds": 0} == {**expected["record"], "sample_seconds": 0}


def test_an_error_of_one_rank_ends_the_evaluation_of_all(found):
    said = [rank["failed"] for rank in found]
    assert said[-1] == "DataError: a row is broken"
    assert all(each.startswith("RunError: another rank failed") for each in said[:-1])
    assert [rank["interrupted"] for rank in found] == ["Interrupted: "] * WORLD
