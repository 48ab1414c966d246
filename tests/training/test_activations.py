"""Activation checkpointing: the same numbers to the bit, less kept, nothing renamed."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from blockdiff.canvas import Canvas, CleanRow, lay_out
from blockdiff.checkpoint import init
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.objective import Objective
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import replicate
from blockdiff.training.step import autocast, checkpoint_activations
from tests.support.oracle import tiny_config

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


def objective() -> Objective:
    model = init(tiny_config(canvas_length=8), seed=3, device="cpu", kernels="torch")
    return Objective(model, Linear(), UniformCorruption(model.vocab_size), seed=11)


def batch(coins: tuple[bool, bool] = (True, False)):
    rows = []
    for sample, coin in enumerate(coins):
        tokens = [2, *((7 * sample + 3 * i) % 300 + 3 for i in range(19 + sample))]
        canvases = [
            Canvas(tokens[start : start + 8], start, t=0.3 + sample / 4, coin=coin, address=(0, sample, k))
            for k, start in enumerate((3, 11))
        ]
        rows.append(CleanRow(tokens, canvases, sample_id=sample))
    return lay_out(rows, 8, pad_id=0)


def losses_and_gradients(module, given, precision=None):
    with autocast(CPU, precision):
        losses = module(given)
    (losses["canvas"] + losses["ar"]).backward()
    gradients = {name.removeprefix("module.objective."): p.grad for name, p in module.named_parameters()}
    return losses, gradients


def assert_same_bits(got, expected):
    assert torch.equal(got[0]["canvas"], expected[0]["canvas"]) and torch.equal(got[0]["ar"], expected[0]["ar"])
    assert got[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        other = got[1][name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or torch.equal(other, gradient), name


@pytest.mark.parametrize("precision", [None, "bfloat16"])
@pytest.mark.parametrize("coins", [(True, False), (False, False)])
def test_losses_and_gradients_are_those_without_it_to_the_bit(precision, coins):
    expected = losses_and_gradients(objective(), batch(coins), precision)
    recomputing = objective()
    checkpoint_activations(recomputing.model)
    assert_same_bits(losses_and_gradients(recomputing, batch(coins), precision), expected)
    assert sum(float(g.abs().sum()) for g in expected[1].values() if g is not None) > 0


KEPT = []  # torch's DDP may wait for ever when it is dropped while a thread of gloo still drops the last exchange


def test_under_ddp_too():
    expected = losses_and_gradients(objective(), batch())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        recomputing = objective()
        checkpoint_activations(recomputing.model)
        wrapped = replicate(recomputing, Mesh(Ranks(CPU, 0, world=2)))
        KEPT.append(wrapped)
        assert_same_bits(losses_and_gradients(wrapped, batch()), expected)
    finally:
        dist.destroy_process_group()


def kept_bytes(module, given) -> int:
    """Bytes of the storages that the backward of a forward holds on to, parameters aside."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(given)
    return sum(size for size, _ in kept.values())


def test_less_is_kept_for_the_backward():
    plain, recomputing = objective(), objective()
    checkpoint_activations(recomputing.model)
    assert kept_bytes(recomputing, batch()) < 0.4 * kept_bytes(plain, batch())


def test_names_stay_and_a_copy_computes_with_its_own_weights():
    model = objective().model
    names = list(model.state_dict())
    checkpoint_activations(model)
    once = [layer.forward for layer in model.layers]
    checkpoint_activations(model)
    assert all(layer.forward is forward for layer, forward in zip(model.layers, once, strict=True))
    assert list(model.state_dict()) == names
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for p in copied.layers.parameters():
            p.mul_(0.5)
    tokens = torch.arange(3, 13)[None]
    assert not torch.equal(model.encode(tokens).hidden, copied.encode(tokens).hidden)


def test_a_pass_without_gradients_is_no_checkpoint(monkeypatch):
    model = objective().model
    checkpoint_activations(model)
    monkeypatch.setattr("blockdiff.training.step.checkpoint", None)
    with torch.no_grad():
        assert model.encode(torch.arange(3, 13)[None]).hidden.isfinite().all()
