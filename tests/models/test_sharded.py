"""Every way into a model goes through module calls: sharded by FSDP2, it trains, evaluates and samples as before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.checkpoint import init
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.objective import Objective
from blockdiff.sampling import Generation, Request, Sampler
from tests.support.oracle import TWO_LAYERS, tiny_config

pytestmark = pytest.mark.quick

L = 8


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> BlockDiffusionModel:
    config = tiny_config(canvas_length=L, **TWO_LAYERS)
    return init(config, seed=3, device="cpu", kernels="torch")


def sharded() -> BlockDiffusionModel:
    made, mesh = model(), init_device_mesh("cpu", (1,))
    for part in made.config.units(made):
        fully_shard(part, mesh=mesh)
    assert all(isinstance(part, FSDPModule) for part in (made, made.vocabulary, *made.layers))
    assert all(isinstance(p, DTensor) for p in made.parameters())
    return made


def batch() -> Batch:
    """One row has a canvas with and one without the self-conditioning signal, the other one canvas."""
    rows = []
    for sample in range(2):
        tokens = [2, *((7 * sample + 3 * i) % 300 + 3 for i in range(20))]
        starts = (3, 11)[: 2 - sample]
        canvases = [Canvas(tokens[s : s + L], s, t=0.6, coin=s == 3, address=(0, sample, s)) for s in starts]
        rows.append(CleanRow(tokens, canvases, sample))
    return lay_out(rows, L, pad_id=0)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(made: BlockDiffusionModel) -> list[Tensor]:
    """Losses, what evaluation says before and after an optimiser step, and the weights after it."""
    objective = Objective(made, Linear(), UniformCorruption(made.vocab_size), seed=11)
    optimiser = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    before = objective.evaluate(batch())
    losses = [*objective(batch()).values()]
    sum(losses).backward()
    optimiser.step()
    weights = [whole(p).detach() for p in made.parameters()]
    return [*losses, *before, *objective.evaluate(batch()), *weights]


def sampled(made: BlockDiffusionModel) -> list[list[int]]:
    """Two canvases for each of two prompts of unequal length."""
    sampler = Sampler(made, None, Generation(max_steps=3, max_new_tokens=2 * L, eos_ids=(383,)))
    requests = [Request(n, tokens=list(range(5, 9 + 3 * n))) for n in range(2)]
    return [result.tokens for result in sampler.generate(requests, seed=4)]


def test_a_sharded_model_trains_and_evaluates_as_the_whole_one_does(world_of_one):
    for one, other in zip(trained(sharded()), trained(model()), strict=True):
        assert torch.equal(one.detach(), other.detach())


def test_a_sharded_model_samples_as_the_whole_one_does(world_of_one):
    assert sampled(sharded()) == sampled(model())


def test_users_ops_reach_the_weights_of_a_sharded_model_too(world_of_one):
    prompt, canvas = torch.arange(4, 24).view(2, 10), torch.arange(30, 46).view(2, L)
    found = []
    for made in (sharded(), model()):
        with torch.no_grad():
            prefix = made.encode(prompt)
            logits = made.unembed(made.denoise(canvas, prefix))
            found.append(made.denoise(canvas, made.encode(prompt, prefix=prefix), made.soft_embedding(logits)))
    assert torch.equal(*found)
