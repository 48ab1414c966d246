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
from blockdiff.errors import RunError
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, draw_adapters, targets
from blockdiff.objective import Objective
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import replicate
from blockdiff.training.recomputation import checkpoint_activations
from blockdiff.training.step import autocast
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
    monkeypatch.setattr("blockdiff.training.recomputation._Call", None)
    with torch.no_grad():
        assert model.encode(torch.arange(3, 13)[None]).hidden.isfinite().all()


def test_dropout_of_adapters_is_drawn_again_as_it_was():
    def found(recomputes: bool):
        module = objective().train()
        adapt(module.model, targets(module.model, {"attention": LowRank(4, 8, dropout=0.5), "mlp": LowRank(2, 4)}))
        draw_adapters(module.model, 0, CPU, torch.float32)
        for name, parameter in module.named_parameters():
            if name.endswith("lora_B"):
                parameter.data.normal_(generator=torch.Generator().manual_seed(len(name)))
        if recomputes:
            checkpoint_activations(module.model)
        torch.manual_seed(4)
        return losses_and_gradients(module, batch()), torch.rand(1)

    (expected, drawn), (got, drawn_after) = found(False), found(True)
    assert_same_bits(got, expected)
    assert torch.equal(drawn, drawn_after)  # and the draws afterwards are the next ones


class Kept(torch.nn.Module):
    """A model of one layer, which keeps `kept` tensors for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Identity()])
        self.kept, self.layers[0].forward = 3, self.run

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.kept):
            x = x.sin()
        return x


def test_a_graph_that_is_kept_goes_backward_again():
    model, x = Kept(), torch.linspace(-1, 1, 5).requires_grad_()
    truth = torch.autograd.grad(model.run(x).sum(), x)[0]
    checkpoint_activations(model)
    out = model.layers[0].forward(x).sum()
    for retain in (True, False):
        assert torch.equal(torch.autograd.grad(out, x, retain_graph=retain)[0], truth)


def test_a_layer_that_keeps_fewer_tensors_the_second_time_is_refused():
    model, x = Kept(), torch.ones(2, requires_grad=True)
    checkpoint_activations(model)
    out = model.layers[0].forward(x)
    model.kept = 2
    with pytest.raises(RunError, match="run again"):
        out.sum().backward()
