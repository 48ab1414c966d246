"""Experts split over ranks: tokens travel to theirs and back, and everything is as in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from blockdiff.errors import RunError
from blockdiff.kernels import resolve
from blockdiff.layers.experts import Experts
from blockdiff.parallel.exchange import expert_parallel
from tests.support.expert_ranks import one_layer, whole_model
from tests.support.forked import in_turn, run_ranks


def test_two_ranks_have_the_outputs_losses_and_gradients_of_one_process(tmp_path: Path):
    """Of a layer, in every dtype and whatever its tokens choose, and of whole models."""
    targets = {
        "exact": partial(one_layer, is_adapted=False, dtype=torch.float64, kernels="torch", limit=1e-12),
        "adapted": partial(one_layer, is_adapted=True, dtype=torch.float64, kernels="torch", limit=1e-12),
        "narrow": partial(one_layer, is_adapted=False, dtype=torch.bfloat16, kernels="torch", limit=0.02),
        "triton": partial(one_layer, is_adapted=True, dtype=torch.float32, kernels="triton", limit=1e-5),
        "exact models": partial(whole_model, is_wide=True, limit=1e-10),
        "models": partial(whole_model, is_wide=False, limit=1e-5),
    }
    run_ranks(2, in_turn, tmp_path, targets)


def test_a_rank_may_have_no_token_and_an_expert_none_either(tmp_path: Path):
    run_ranks(4, one_layer, tmp_path, True, torch.float32, "torch", 1e-5)


@pytest.mark.quick
def test_experts_that_the_ranks_do_not_divide_are_refused():
    class Three:
        """A mesh of three ranks, as far as the refusal asks."""

        size = staticmethod(lambda: 3)
        get_local_rank = staticmethod(lambda: 0)

    with pytest.raises(RunError, match=r"^parallel\.experts: 3 .*4 experts"):
        expert_parallel(Experts(4, 8, 8, resolve("torch")), Three())


@pytest.mark.quick
def test_one_rank_alone_exchanges_with_itself_also_when_compiled():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, index = torch.randn(5, 8), torch.tensor([[0, 3], [1, 2], [4, 4], [3, 1], [2, 4]])
        weight = torch.rand(5, 2)
        module = Experts(4, 8, 8, resolve("torch"))
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter)
        expected = module(x, index, weight)
        expert_parallel(module, init_device_mesh("cpu", (1,)))
        assert torch.equal(module(x, index, weight), expected)
        module.compile(backend="eager")
        for tokens in (5, 3):  # other numbers of tokens than those it was compiled for
            torch.testing.assert_close(module(x[:tokens], index[:tokens], weight[:tokens]), expected[:tokens])
    finally:
        dist.destroy_process_group()
