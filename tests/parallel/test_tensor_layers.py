"""The layers that ranks split, one by one: each of the mistakes that such layers are known to make is a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forked import run_ranks
from tests.support.tensor_layers import layers

pytestmark = pytest.mark.quick
Found = dict[str, Any]


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory) -> list[Found]:
    """The findings of every rank of a group."""
    directory: Path = tmp_path_factory.mktemp("layers")
    run_ranks(request.param, layers, directory)
    return [read(directory, rank) for rank in range(request.param)]


def read(directory: Path, rank: int) -> Found:
    """The file of a rank: tensors by name, those of a group in a mapping, and the sizes."""
    found: Found = {"sizes": json.loads((directory / f"sizes-{rank}.json").read_text())}
    for key, tensor in load_file(directory / f"found-{rank}").items():
        group, _, name = key.rpartition("/")
        if group:
            found.setdefault(group, {})[name] = tensor
        else:
            found[key] = tensor
    return found


def test_the_row_parallel_layer_returns_the_sum_and_not_the_none_of_all_reduce(found):
    for of_rank in found:
        torch.testing.assert_close(of_rank["mlp out"], of_rank["mlp out of one"])
        torch.testing.assert_close(of_rank["attention out"], of_rank["attention out of one"])
        torch.testing.assert_close(of_rank["fused out"], of_rank["fused out of one"])
        assert torch.equal(of_rank["mlp out"], found[0]["mlp out"]), "the same on all ranks"


def test_a_bias_is_added_once_and_not_on_every_rank(found):
    """The attention has biases everywhere; that of its row-parallel layer is so large that twice it would show."""
    for of_rank in found:
        out = of_rank["attention out"]
        assert float((out - of_rank["bias"]).abs().max()) < 10 < float(of_rank["bias"].abs().min())
        for name in ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"):
            torch.testing.assert_close(of_rank["attention grads"][name], of_rank["attention grads of one"][name])


def test_sizes_are_divided_by_the_ranks_once(found):
    world = len(found)
    for of_rank in found:
        sizes = of_rank["sizes"]
        assert sizes["heads"] == 8 // world and sizes["kv_heads"] == max(1, 2 // world)
        assert sizes["fused"] == (8 // world + 2 * max(1, 2 // world)) * 8, "heads of queries, of keys and of values"
        assert sizes["q_proj"] == [[64 // world, 32], 64 // world], "weight, and out_features"
        assert sizes["o_proj"] == [[32, 64 // world], 64 // world], "weight, and in_features"
        assert sizes["gate_proj"] == [[48 // world, 32], 48 // world]
        assert sizes["down_proj"] == [[32, 48 // world], 48 // world]


def test_every_rank_has_its_share_of_gate_and_of_up_and_not_of_one_alone(found):
    world = len(found)
    for rank, of_rank in enumerate(found):
        for name in ("gate_proj", "up_proj"):
            assert torch.equal(of_rank["held"][name], of_rank["whole"][name].chunk(world)[rank])


def test_gradients_are_not_multiplied_by_the_ranks(found):
    for of_rank in found:
        for part in ("mlp", "attention", "fused"):
            expected = of_rank[f"{part} grads of one"]
            assert expected.keys() == of_rank[f"{part} grads"].keys() >= {"input"}
            for name, grad in expected.items():
                torch.testing.assert_close(of_rank[f"{part} grads"][name], grad, msg=f"{part}: {name}")
