"""One process whose weights are sharded: masters and gradients in fp32, computing in bf16, and adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from blockdiff.checkpoint import draw_weights, empty
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapters_of, draw_adapters, targets
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.objective import Objective
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import split
from blockdiff.tensor_pieces import is_spread, local_of
from blockdiff.training.optimiser import build, trainable
from tests.models.test_sharded import batch
from tests.support.families import CONFIGS
from tests.support.oracle import TWO_LAYERS, our_config, tiny_config

pytestmark = pytest.mark.quick

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    yield Mesh.of(Ranks(CPU), "full")
    dist.destroy_process_group()


def made(mesh: Mesh | None, dtype: torch.dtype, computes_in: torch.dtype | None, is_adapted: bool):
    """A model, sharded over a mesh or whole, with values."""
    model = empty(our_config(tiny_config(canvas_length=8, **TWO_LAYERS)), kernels="torch")
    if is_adapted:
        adapt(model, targets(model, dict.fromkeys(("attention", "experts"), LowRank(4, 8))), [7])
    if mesh is not None:
        split(model, mesh, dtype, computes_in)
    draw_weights(model, 3, dtype, CPU)
    if is_adapted:
        draw_adapters(model, 4, CPU, dtype)
        for module in adapters_of(model).values():
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("lora_B"):
                    local_of(parameter).normal_(0.0, 0.1, generator=torch.Generator().manual_seed(6))
    return model.train()


def gradients(model: BlockDiffusionModel) -> dict[str, Tensor]:
    """Both losses and the gradients of everything that trains."""
    losses = [*Objective(model, Linear(), UniformCorruption(model.vocab_size), seed=11, sweep=True)(batch()).values()]
    sum(losses).backward()
    assert all(loss.dtype == torch.float32 for loss in losses)
    found = {name: local_of(p.grad) for name, p in trainable(model).items() if p.grad is not None}
    return {"losses": torch.stack(losses).detach(), **found}


def test_bf16_computes_and_fp32_masters_are_stepped(mesh):
    model = made(mesh, torch.float32, BF16, False)
    assert model.dtype == BF16 and all(is_spread(p) and p.dtype == torch.float32 for p in model.parameters())
    found, expected = gradients(model), gradients(made(None, BF16, None, False))
    for name, wanted in expected.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], wanted.float()), name
    before = local_of(model.norm.weight).clone()
    build(model, lr=1e-6).step()
    after = local_of(model.norm.weight)
    assert not torch.equal(before, after) and torch.equal(before.to(BF16), after.to(BF16))  # which bf16 would lose


def test_adapters_of_a_bf16_model_are_fp32_and_so_are_their_gradients(mesh):
    model = made(mesh, BF16, BF16, True)
    dtypes = {p.requires_grad: p.dtype for p in model.parameters()}
    assert dtypes == {True: torch.float32, False: BF16}
    found, expected = gradients(model), gradients(made(None, BF16, None, True))
    assert found.keys() == expected.keys() and len(found) > 10
    for name, wanted in expected.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], wanted), name


@pytest.mark.parametrize("name", CONFIGS)
def test_fsdp_exchanges_the_gradients_of_every_tensor_of_a_model(mesh, name):
    """So `exchange_others` has none of a model, whose gradients may be on the host where NCCL cannot add them up."""
    model = empty(our_config(CONFIGS[name]()), kernels="torch")
    parts = model.config.adapted_parts
    adapt(model, targets(model, dict.fromkeys(parts, LowRank(4, 8))), [7])
    split(model, replace(mesh, offload=True), torch.float32)
    assert all(map(is_spread, model.parameters())) and {p.device.type for p in model.parameters()} == {"cpu"}
