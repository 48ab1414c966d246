"""The training loop on one process: what it divides by, when it stops, what it logs, that it learns."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch
from torch import nn

from blockdiff.canvas import Canvas, CleanRow, lay_out
from blockdiff.checkpoint import init
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.errors import RunError
from blockdiff.objective import Objective
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.optimiser import build
from blockdiff.training.schedule import CosineDecay, learning_rate
from tests.support.oracle import TWO_LAYERS, tiny_config
from tests.support.toy_objective import ToyObjective, slots, toy_batch, toy_batches
from tests.support.toy_trainer import Options, train

pytestmark = pytest.mark.quick

ALONE = Ranks(torch.device("cpu"))


def frozen_rate(objective: nn.Module) -> torch.optim.Optimizer:
    """An optimiser that leaves weights and gradients as they are."""
    return torch.optim.SGD(objective.parameters(), lr=0.0)


def run(objective, batches, steps=1, optimiser=None, rate=0.0, **settings):
    """Train and return the records; settings go to Options, or to the loop where it knows them."""
    loop = {k: settings.pop(k) for k in ("evaluate", "save", "on_step", "start", "logged") if k in settings}
    options = Options(steps=steps, **{"log_every": 1, "clip": 0.0, **settings})
    records: list[dict] = []
    optimiser = optimiser or frozen_rate(objective)
    train(objective, optimiser, lambda _: rate, batches, options, ALONE, log=records.append, **loop)
    return records


def gradients(objective: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}


def test_any_split_of_the_batch_gives_the_same_gradient_and_losses():
    found = []
    for micro in (8, 4, 2, 3):
        objective = ToyObjective()
        records = run(objective, toy_batches(slots(ALONE, 8, micro), 8), ar_weight=0.7)
        found.append((gradients(objective), records[0]))
    (expected, first), *others = found
    for grads, record in others:
        assert grads.keys() == expected.keys()
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)
        for key in ("loss", "canvas_loss", "ar_loss", "grad_norm"):
            assert record[key] == pytest.approx(first[key], rel=1e-5)


def test_the_loss_is_a_mean_over_tokens_not_over_micro_batches():
    # One micro-batch scores 4 canvas tokens, the other 8: a mean of means would weigh them alike.
    parts = [toy_batch([0]), toy_batch([1])]
    objective = ToyObjective()
    record = run(objective, lambda step: parts, ar_weight=0.5)[0]
    got = gradients(objective)
    losses = [objective(part) for part in parts]
    canvas = sum(one["canvas"] for one in losses) / sum(part.canvas_count() for part in parts)
    ar = sum(one["ar"] for one in losses) / sum(part.ar_count() for part in parts)
    assert [part.canvas_count() for part in parts] == [4, 8]
    assert record["canvas_loss"] == pytest.approx(canvas.item())
    assert record["ar_loss"] == pytest.approx(ar.item())
    assert record["loss"] == pytest.approx((canvas + 0.5 * ar).item())
    objective.zero_grad()
    (canvas + 0.5 * ar).backward()
    for name, gradient in gradients(objective).items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-7)


def test_a_logged_step_has_what_the_run_directory_promises():
    before = [{"step": 0, "kind": "train", "seconds": 10.0}]
    records = run(ToyObjective(), toy_batches([range(4)], 4), steps=5, log_every=2, rate=0.25, logged=before)
    assert [record["step"] for record in records] == [2, 4, 5]
    keys = ["step", "kind", "loss", "canvas_loss", "ar_loss", "grad_norm", "lr", "skipped"]
    keys += ["tokens_per_second", "scored_tokens_per_second", "seconds", "memory_gib"]
    assert list(records[0]) == keys
    assert records[0]["lr"] == 0.25
    assert 10.0 < records[0]["seconds"] <= records[1]["seconds"]
    assert records[0]["tokens_per_second"] > 0


def test_tokens_per_second_counts_clean_and_canvas_tokens_but_no_padding():
    batch = toy_batch([0, 1, 2])  # rows of 9, 10 and 11 tokens, with 1, 2 and 1 canvases of 4
    record = run(ToyObjective(), lambda step: time.sleep(0.05) or [batch])[0]
    assert record["tokens_per_second"] * record["seconds"] == pytest.approx(30 + 16, rel=0.05)


def test_evaluation_and_saving_come_when_due_and_at_the_end():
    saved, shown = [], []
    records = run(
        ToyObjective(),
        toy_batches([range(4)], 4),
        steps=7,
        log_every=100,
        eval_every=3,
        save_every=2,
        evaluate=lambda step: {"heldout_canvas_loss": float(step)},
        save=saved.append,
        on_step=shown.append,
    )
    assert [(r["step"], r["heldout_canvas_loss"]) for r in records if "heldout_canvas_loss" in r] == [
        (0, 0.0),
        (3, 3.0),
        (6, 6.0),
        (7, 7.0),
    ]
    assert saved == [2, 4, 6, 7]
    assert shown == [1, 2, 3, 4, 5, 6, 7]


def test_without_intervals_a_run_evaluates_and_saves_at_its_end_only():
    calls = []
    settings = {
        "evaluate": lambda step: calls.append(("evaluate", step)) or {},
        "save": lambda step: calls.append(("save", step)),
    }
    run(ToyObjective(), toy_batches([range(4)], 4), steps=3, **settings)
    assert calls == [("save", 3), ("evaluate", 3)]


def test_the_batches_a_resumed_run_asks_for_are_those_of_its_steps():
    asked = []

    def batches(step):
        asked.append(step)
        return [toy_batch([step])]

    run(ToyObjective(), batches, steps=6, start=4)
    assert asked == [5, 6]


class Broken(ToyObjective):
    """Gives a loss that is not finite, in one part, when a sample is in the batch."""

    def __init__(self, sample: int, part: str, value: float) -> None:
        super().__init__()
        self.sample, self.part, self.value = sample, part, value

    def forward(self, batch):
        losses = super().forward(batch)
        if self.sample in batch.sample_id_B.tolist():
            return losses | {self.part: losses[self.part] * self.value}
        return losses


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("part", "words"), [("canvas", "canvas loss"), ("ar", "next-token loss")])
def test_a_loss_that_is_not_finite_stops_the_run_with_step_and_sample_ids(part, words, value):
    objective, saved = Broken(sample=9, part=part, value=value), []
    optimiser = torch.optim.SGD(objective.parameters(), lr=0.1)
    with pytest.raises(RunError, match=rf"step 3: .*{words}.*sample ids 8, 9"):
        run(
            objective,
            toy_batches(slots(ALONE, 4, 2), 4),
            5,
            optimiser,
            rate=0.1,
            save=saved.append,
            save_every=1,
        )
    assert saved == [1, 2]
    assert all(parameter.isfinite().all() for parameter in objective.parameters())


class Exploding(ToyObjective):
    """Finite losses whose gradient is not."""

    def forward(self, batch):
        losses = super().forward(batch)
        return losses | {"canvas": losses["canvas"] + (self.norm.sum() - self.norm.sum()).abs().sqrt()}


def test_a_gradient_that_is_not_finite_stops_the_run_too():
    with pytest.raises(RunError, match=r"step 1: .*gradient.*sample ids 0, 1, 2, 3"):
        run(Exploding(), toy_batches(slots(ALONE, 4, 2), 4))


def test_clipping_bounds_the_step_and_the_log_shows_the_norm_before_it():
    objective = ToyObjective()
    before = {name: p.detach().clone() for name, p in objective.named_parameters()}
    optimiser = torch.optim.SGD(objective.parameters(), lr=1.0)
    record = run(objective, toy_batches([range(8)], 8), optimiser=optimiser, rate=1.0, clip=0.01)[0]
    moves = [(p.detach() - before[name]).flatten() for name, p in objective.named_parameters()]
    assert record["grad_norm"] > 0.1
    assert float(torch.cat(moves).norm()) == pytest.approx(0.01, rel=1e-3)


def test_the_learning_rate_is_that_of_the_step():
    objective = ToyObjective()
    optimiser = torch.optim.SGD(objective.parameters(), lr=123.0)
    seen = []
    options = Options(steps=3, log_every=1)
    rates = {1: 0.5, 2: 0.25, 3: 0.125}
    batches = toy_batches([range(4)], 4)
    optimiser.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"]))
    train(objective, optimiser, rates.get, batches, options, ALONE)
    assert seen == [0.5, 0.25, 0.125]


def test_a_step_with_nothing_to_score_has_a_zero_gradient():
    objective = ToyObjective()
    record = run(objective, lambda step: [toy_batch([1] if step == 1 else [], canvases=step == 1)], steps=2)[1]
    assert (record["loss"], record["grad_norm"]) == (0.0, 0.0)
    assert all(not gradient.any() for gradient in gradients(objective).values())


def test_momentum_carries_parameters_on_that_a_step_did_not_reach():
    objective = ToyObjective()
    optimiser = build(objective, lr=0.1, weight_decay=0.0)
    seen = []
    optimiser.register_step_post_hook(lambda *_: seen.append(objective.signal.weight.detach().clone()))
    run(objective, lambda step: [toy_batch([1], coin=step == 1)], steps=2, optimiser=optimiser, rate=0.1)
    assert not torch.equal(seen[0], seen[1])


def test_bfloat16_autocast_reaches_the_objective_and_leaves_weights_in_fp32():
    objective, seen = ToyObjective(), []
    objective.mix.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    run(objective, toy_batches([range(4)], 4), autocast="bfloat16")
    assert seen == [torch.bfloat16]
    assert {gradient.dtype for gradient in gradients(objective).values()} == {torch.float32}


@pytest.mark.portable
def test_the_real_objective_overfits_one_batch():
    model = init(tiny_config(canvas_length=8, **TWO_LAYERS), device="cpu")
    objective = Objective(model, Linear(), UniformCorruption(model.vocab_size))
    rows = []
    for row in range(4):  # the prompt tells which response; at t = 0.9 little else does
        response = range(40 + 8 * row, 48 + 8 * row)
        canvas = Canvas(response, 3, t=0.9, coin=row < 2, address=(0, row, 0))
        rows.append(CleanRow([2, 20 + row, 30 + row, *response], [canvas], sample_id=row))
    batch = lay_out(rows, 8, pad_id=0)
    steps = 60
    lr = partial(learning_rate, CosineDecay(), peak=1e-2, steps=steps, warmup_steps=5)
    records: list[dict] = []
    options = Options(steps, log_every=1)
    train(objective, build(objective, lr=1e-2), lr, lambda _: [batch], options, ALONE, log=records.append)
    assert records[0]["canvas_loss"] > 5.0
    assert records[-1]["canvas_loss"] < 0.02
    assert records[-1]["ar_loss"] < 0.2  # which of the four prompts this is, no model can tell: log(4) / 10


def test_the_real_objective_trains_under_bfloat16_autocast():
    model = init(tiny_config(canvas_length=8), device="cpu")
    objective = Objective(model, Linear(), UniformCorruption(model.vocab_size))
    canvas = Canvas(range(40, 48), 3, t=0.5, coin=True)
    batch = lay_out([CleanRow([2, 20, 30, *range(40, 48)], [canvas])], 8, pad_id=0)
    full = run(objective, lambda _: [batch])[0]
    expected = gradients(objective)
    mixed = run(objective, lambda _: [batch], autocast="bfloat16")[0]
    got = gradients(objective)
    assert mixed["loss"] == pytest.approx(full["loss"], rel=0.02)
    assert got.keys() == expected.keys()
    for name in expected:
        assert got[name].dtype == torch.float32
        assert got[name].any(), name  # a weight first used without gradients must not be cached without them
