"""Muon: the step of its formula beside torch's, matrices in batches and in one parameter, ranks that share the work."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from blockdiff.checkpoint import init
from blockdiff.kernels import resolve
from blockdiff.layers.experts import Experts
from blockdiff.training import optimiser as optim
from blockdiff.training.checkpoint_reader import restore
from blockdiff.training.muon import _Move, orthogonalised
from tests.support.little_net import learn, net
from tests.support.oracle import tiny_config
from tests.support.toy_objective import save_checkpoint

pytestmark = pytest.mark.quick
LR = 3e-2


def test_singular_values_come_near_one_and_singular_vectors_stay():
    matrices = torch.randn(5, 24, 40, generator=torch.Generator().manual_seed(1))
    (result,) = orthogonalised([matrices])
    values = torch.linalg.svdvals(result)
    assert 0.65 < values.min() and values.max() < 1.25
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    inner = u.mT @ result @ v.mT
    assert (inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))).abs().max() < 1e-4


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_it_takes_the_steps_of_torchs_muon(shape):
    """torch's computes in bf16, so that a step is only known to about a hundredth."""
    module = nn.Linear(shape[1], shape[0], bias=False)
    other = nn.Linear(shape[1], shape[0], bias=False)
    other.load_state_dict(module.state_dict())
    ours = optim.build(module, name="muon", lr=0.02, weight_decay=0.3, momentum=0.9)
    theirs = torch.optim.Muon(
        other.parameters(), lr=0.02, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    for seed in range(4):
        before = module.weight.detach().clone()
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        for one, optimiser in ((module, ours), (other, theirs)):
            one.weight.grad = gradient.clone()
            optimiser.step()
        moved, expected = module.weight.detach() - before, other.weight.detach() - before
        assert (moved - expected).norm() < 0.02 * expected.norm()
        other.load_state_dict(module.state_dict())


def test_experts_and_the_two_halves_of_gate_up_are_matrices_of_their_own():
    torch.manual_seed(0)
    experts = Experts(3, 24, 16, resolve("torch"))
    halves = nn.ParameterList([nn.Parameter(torch.randn(16, 24)) for _ in range(6)])
    with torch.no_grad():
        experts.down_proj.normal_()
        experts.gate_up_proj.copy_(torch.stack([torch.cat([halves[2 * e], halves[2 * e + 1]]) for e in range(3)]))
    gradients = torch.randn(3, 32, 24)
    experts.gate_up_proj.grad, experts.down_proj.grad = gradients, torch.randn(3, 24, 16)
    for e in range(3):
        halves[2 * e].grad, halves[2 * e + 1].grad = gradients[e, :16].clone(), gradients[e, 16:].clone()
    for module in (experts, halves):
        optim.build(module, name="muon", lr=0.1, weight_decay=0.1).step()
    expected = torch.stack([torch.cat([halves[2 * e], halves[2 * e + 1]]) for e in range(3)])
    torch.testing.assert_close(experts.gate_up_proj.detach(), expected.detach(), rtol=1e-5, atol=1e-6)


def test_norms_scales_and_the_embedding_table_take_adamws_steps():
    runs = []
    for name in ("adamw", "muon"):
        model = init(tiny_config(), seed=0, device="cpu", kernels="torch")
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optim.build(model, name=name, lr=0.01, weight_decay=0.1).step()
        runs.append(dict(model.named_parameters()))
    same = {name for name, x in runs[0].items() if torch.equal(x, runs[1][name])}
    assert same == {name for name, x in runs[0].items() if x.dim() == 1 or name == "vocabulary.table"}


@pytest.mark.portable
def test_it_learns_and_from_a_checkpoint_goes_on_to_the_bit(tmp_path):
    whole = net()
    expected = learn(whole, optim.build(whole, name="muon", lr=LR), range(1, 31), LR)
    assert expected[-1] < 0.1 * expected[0]
    module = net()
    optimiser = optim.build(module, name="muon", lr=LR)
    learn(module, optimiser, range(1, 16), LR)
    saved = save_checkpoint(tmp_path, 15, module, optimiser, {})
    again = net()
    fresh = optim.build(again, name="muon", lr=LR)
    assert restore(saved, again, fresh, {}) == 15
    assert learn(again, fresh, range(16, 31), LR) == expected[15:]


def test_a_matrix_without_gradient_stays_and_one_of_zeros_only_decays():
    module = net()
    optimiser = optim.build(module, name="muon", lr=0.1, weight_decay=0.5)
    before = [module[0].weight.detach().clone(), module[2].weight.detach().clone()]
    module[2].weight.grad = torch.zeros_like(module[2].weight)
    optimiser.step()
    assert torch.equal(module[0].weight, before[0])
    torch.testing.assert_close(module[2].weight.detach(), before[1] * 0.95)


def test_experts_that_are_kept_on_the_host_are_orthogonalised_on_the_devices_of_their_mesh():
    experts: Any = nn.Parameter(torch.randn(3, 8, 12))
    experts.placements, experts.device_mesh = (Shard(0),), SimpleNamespace(device_type="meta")
    move = _Move(experts, torch.randn(3, 8, 12), {"matrices": 2})
    assert move.is_local and move.matrices().device.type == "meta" and move.matrices().shape == (6, 4, 12)


def test_a_step_has_the_size_that_adamws_has():
    module = nn.Linear(64, 256, bias=False)
    before = module.weight.detach().clone()
    module.weight.grad = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    optim.build(module, name="muon", lr=0.01, weight_decay=0.0).step()
    assert math.sqrt((module.weight.detach() - before).square().mean()) == pytest.approx(0.2 * 0.01, rel=0.2)
