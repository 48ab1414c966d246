"""Encode and pass two in one call: the losses and gradients of the three passes, with fewer walks over the layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.checkpoint import init
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.diffusion.weight import ElboWeight
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, adapters_of, draw_adapters, targets
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.objective import Evaluation, Objective
from blockdiff.training.recomputation import checkpoint_activations
from tests.objective.test_objective import COINS, L, V, batch_of, rows, tokens
from tests.support.families import small_model
from tests.support.oracle import TWO_LAYERS, oracle, ours, tiny_config, widen_routers

Found = tuple[list[float], dict[str, Tensor]]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stop_gradient": {"stop_gradient": True},
    "leave_one_out": {"prediction": "leave_one_out", "weight": ElboWeight(5.0), "positions": "corrupted"},
}


def batches() -> dict[str, Batch]:
    """Unequal rows with two documents in one; no coin at all; a row without canvases; no canvas at all."""
    some = rows()
    return {
        "mixed": batch_of(some),
        "no coin": batch_of(rows(COINS["off"])),
        "a row without canvases": batch_of([some[0], CleanRow(tokens(50, 9), [], 7), some[1]]),
        "no canvas": batch_of([CleanRow(tokens(9, 1), [])]),
        "no next token scored": without_pairs(batch_of(some)),
    }


def without_pairs(batch: Batch) -> Batch:
    """A batch as `objective.ar_loss: none` makes it."""
    return replace(batch, is_ar_scored_BS=torch.zeros_like(batch.is_ar_scored_BS))


def objective_of(model: DiffusionGemma, one_sweep: bool, **options: Any) -> Objective:
    return Objective(model, Linear(), UniformCorruption(V), 5, sweep=one_sweep, **options)


def found(objective: Objective, batch: Batch) -> Found:
    objective.zero_grad(set_to_none=True)
    losses = objective(batch)
    (losses["canvas"] + 0.7 * losses["ar"]).backward()
    gradients = {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}
    return [loss.item() for loss in losses.values()], gradients


def assert_same(one: Found, other: Found, tolerance: float) -> None:
    assert one[0] == pytest.approx(other[0], rel=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, expected in other[1].items():
        error = (one[1][name].double() - expected.double()).norm()
        assert error <= tolerance * expected.double().norm(), f"{name}: {error / expected.norm():.1e}"


@pytest.fixture(scope="module")
def exact() -> DiffusionGemma:
    return ours(oracle(tiny_config(canvas_length=L, **TWO_LAYERS)))


def single(kernels: str = "torch", **text: Any) -> DiffusionGemma:
    model = init(tiny_config(canvas_length=L, **text), seed=3, device="cpu", kernels=kernels)
    widen_routers(model)
    return model


@pytest.mark.quick
@pytest.mark.parametrize("option", OPTIONS)
def test_one_sweep_has_the_losses_and_gradients_of_three_passes(exact, option):
    for batch in batches().values():
        one, three = (found(objective_of(exact, each, **OPTIONS[option]), batch) for each in (True, False))
        assert_same(one, three, 1e-12)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_in_fp32_they_differ_by_rounding(kernels):
    model = single(kernels, **TWO_LAYERS, num_experts=2)
    batch = batch_of(rows()[3:]) if kernels == "triton" else batches()["mixed"]  # its interpreter is slow
    one, three = (found(objective_of(model, each), batch) for each in (True, False))
    assert_same(one, three, 5e-6)


@pytest.mark.quick
def test_the_canvas_loss_does_not_reach_the_clean_rows_when_the_gradient_is_stopped(exact):
    """A token that stands only in a clean row gets a gradient through the keys that canvases see, or none."""
    [row] = [CleanRow([383, *row.tokens[1:]], row.canvases, 0) for row in rows()[:1]]
    for is_stopped in (True, False):
        objective = objective_of(exact, True, stop_gradient=is_stopped)
        objective.zero_grad(set_to_none=True)
        embedded: list[Tensor] = []

        def keep(module: Any, inputs: Any, out: Tensor, embedded: list[Tensor] = embedded) -> None:
            if torch.is_grad_enabled() and out.dim() == 3:
                out.retain_grad()
                embedded.append(out)

        hook = exact.vocabulary.register_forward_hook(keep)
        objective(batch_of([row]))["canvas"].backward()
        hook.remove()
        clean = next(x.grad for x in embedded if x.shape[1] > 3 * L)[:, : len(row.tokens)]
        assert bool(clean.any()) != is_stopped


def adapted(dropout: float = 0.0) -> DiffusionGemma:
    model = single(**TWO_LAYERS)
    adapt(model, targets(model, {part: LowRank(3, 6, dropout=dropout) for part in ("attention", "mlp", "experts")}))
    draw_adapters(model, 0, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        for module in adapters_of(model).values():
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("B"):
                    parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(7))
    return model.train()


@pytest.mark.quick
def test_adapters_learn_the_same_in_one_sweep():
    model, batch = adapted(), batches()["mixed"]
    one, three = (found(objective_of(model, each), batch) for each in (True, False))
    assert set(one[1]) == {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    assert_same(one, three, 5e-6)


@pytest.mark.quick
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputation_changes_nothing_and_draws_the_same_dropout_again(dropout):
    plain, again = adapted(dropout), adapted(dropout)
    checkpoint_activations(again)
    kept = []
    for model in (plain, again):
        torch.manual_seed(1)
        kept.append(found(objective_of(model, True), batches()["mixed"]))
    assert kept[0][0] == kept[1][0]
    assert all(torch.equal(kept[0][1][name], kept[1][1][name]) for name in kept[0][1])


@pytest.mark.quick
def test_evaluation_is_the_same_to_the_bit(exact):
    batch = batches()["mixed"]
    one, three = (objective_of(exact, each).evaluate(batch) for each in (True, False))
    assert all(torch.equal(x, y) for x, y in zip(one, three, strict=True)), Evaluation._fields


# -- what runs -----------------------------------------------------------------------------------------------


def calls(model: DiffusionGemma, batch: Batch) -> list[tuple[bool, int]]:
    """For every walk through the layers: whether it records gradients, and its number of tokens."""
    seen: list[tuple[bool, int]] = []
    hook = model.layers[0].register_forward_pre_hook(
        lambda module, inputs: seen.append((torch.is_grad_enabled(), inputs[0].shape[:2].numel()))
    )
    objective_of(model, True)(batch)
    hook.remove()
    return seen


def test_pass_one_encodes_what_its_canvases_see_and_nothing_else(exact):
    """One canvas of the first row, which starts at column 28, and one of the third, at column 19."""
    batch = batch_of(rows(lambda n: n in (1, 5)))
    assert calls(exact, batch) == [(False, 2 * (28 + L)), (True, batch.tokens_BS.numel() + batch.canvas_BCL.numel())]


FAMILIES = ["llama tied, denoising", "qwen3 sliding, denoising", "minimax_m3 denoising"]


def little_batch() -> Batch:
    """A row with two canvases, of which one has a coin, and a row without any, in the vocabulary of every family."""
    canvases = [Canvas([*range(9, 17)], 6 + 8 * n, t=0.5, coin=n == 1, address=(0, 0, n)) for n in range(2)]
    return lay_out([CleanRow([*range(3, 40)], canvases), CleanRow([*range(3, 20)], [])], 8, pad_id=0)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["diffusion_gemma", *FAMILIES[:2]])
def test_where_no_next_token_is_scored_the_last_layer_answers_canvases_alone(name):
    """Its MLP has the canvases' tokens; those of the layers before it have the clean ones, too."""
    model = single(**TWO_LAYERS) if name == "diffusion_gemma" else small_model(name, dtype=torch.float32)
    batch = little_batch()
    seen: list[int] = []
    hooks = [
        layer.mlp.down_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
        for layer in model.layers
    ]
    noisy, clean = batch.canvas_BCL[0].numel(), batch.tokens_BS.shape[1]
    for scored, last in ((batch, clean + noisy), (without_pairs(batch), noisy)):
        seen.clear()
        Objective(model, Linear(), UniformCorruption(model.vocab_size), 5, sweep=True)(scored)
        assert seen[-len(model.layers) :] == [*[clean + noisy] * (len(model.layers) - 1), last]
    assert len(hooks) > 1


@pytest.mark.quick
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("stop_gradient", [False, True])
def test_every_family_has_the_losses_and_gradients_of_three_passes_without_next_tokens(name, stop_gradient):
    """A gradient that is nothing but rounding, as that of a scalar before a norm, is held against all of them."""
    model, batch = small_model(name, dtype=torch.float32), without_pairs(little_batch())
    one, three = (
        found(
            Objective(model, Linear(), UniformCorruption(model.vocab_size), 5, sweep=each, stop_gradient=stop_gradient),
            batch,
        )
        for each in (True, False)
    )
    assert one[0] == pytest.approx(three[0], rel=1e-6)
    assert one[1].keys() == three[1].keys()
    largest = max(float(gradient.norm()) for gradient in three[1].values())
    for parameter, expected in three[1].items():
        error = float((one[1][parameter] - expected).norm())
        assert error <= 1e-5 * max(float(expected.norm()), 0.05 * largest), parameter


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gathers(model: BlockDiffusionModel, one_sweep: bool, batch: Batch) -> Counter[str]:
    """The number of times that each parameter of a model, sharded here, is gathered in a training step."""
    mesh = init_device_mesh("cpu", (1,))
    for part in model.config.units(model):
        fully_shard(part, mesh=mesh)
    gathered: Counter[str] = Counter()
    gather = FSDPParam.to_unsharded

    def counted(self: FSDPParam) -> None:
        gathered[str(self._param_fqn)] += 1
        gather(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FSDPParam, "to_unsharded", counted)
        objective = Objective(model, Linear(), UniformCorruption(model.vocab_size), 5, sweep=one_sweep)
        sum(objective(batch).values()).backward()
    return gathered


@pytest.mark.quick
@pytest.mark.parametrize("name", ["mixed", "no coin", "no canvas"])
def test_each_layer_is_gathered_three_times_a_step_whatever_the_coins(name, world_of_one):
    """Twice forward and once backward, against five times for three passes; the vocabulary 6 times, against 9."""
    one, three = (gathers(single(**TWO_LAYERS), each, batches()[name]) for each in (True, False))
    layers = [parameter for parameter in one if parameter.startswith("layers.")]
    assert len(layers) > 2 * 15
    assert {one[parameter] for parameter in layers} == {3}
    assert {three[parameter] for parameter in layers} == {5}
    assert (one["vocabulary.table"], three["vocabulary.table"]) == (6, 9)


@pytest.mark.quick
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("coins", [True, False])
def test_layers_of_every_family_are_gathered_three_times_a_step_with_and_without_a_coin(name, coins, world_of_one):
    rows = [CleanRow([*range(3, 40)], [Canvas([*range(9, 17)], 6, t=0.5, coin=coins, address=(0, 0, 0))])]
    found = gathers(small_model(name, dtype=torch.float32), True, lay_out(rows, 8, pad_id=0))
    layers = {count for parameter, count in found.items() if parameter.startswith("layers.")}
    assert layers == {3} and found["vocabulary.table"] == 6, found["vocabulary.table"]
