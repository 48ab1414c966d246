"""The loop around optimiser steps: measuring, saving, ending early, stopping, skipping; and after a kill."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch

from blockdiff.errors import RESUME, DataError, RunError
from blockdiff.metrics import of_kind, reproducible
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.signals import Stopped
from blockdiff.training.optimiser import build
from blockdiff.training.step import MAX_SKIPS, sample_ids
from tests.support.toy_objective import ToyObjective, slots, toy_batch, toy_batches
from tests.support.toy_trainer import Options, train

pytestmark = pytest.mark.quick

ALONE = Ranks(torch.device("cpu"))


class Loop:
    """A toy run of 6 steps and what it called, in order; `records` is its log."""

    def __init__(self, objective=None, **settings):
        self.calls, self.records = [], list(settings.get("logged") or ())
        self.objective = objective or ToyObjective()
        self.optimiser = settings.pop("optimiser", None) or build(self.objective, lr=0.1)
        known = Options.__dataclass_fields__
        options = {key: settings.pop(key) for key in list(settings) if key in known}
        self.options = Options(**{"steps": 6, "log_every": 1, **options})
        self.callbacks = {
            "evaluate": lambda step: self.called("evaluate", step) or {"heldout_ar_loss": self.loss(step)},
            "sample": lambda step: self.called("sample", step) or {"sample_accuracy": step / 10},
            "save": lambda step: self.called("save", step),
            **settings,
        }

    loss = staticmethod(lambda step: 1.0 / (1 + step))

    def called(self, name, step):
        self.calls.append(f"{name} {step}")

    def run(self):
        batches = toy_batches(slots(ALONE, 4, 2), 4)
        return train(
            self.objective,
            self.optimiser,
            lambda _: 0.1,
            batches,
            self.options,
            ALONE,
            log=self.records.append,
            **self.callbacks,
        )


def test_a_checkpoint_comes_before_what_is_measured_of_it_and_everything_at_the_end():
    loop = Loop(save_every=2, eval_every=2, sample_every=3)
    assert loop.run() == 6
    assert loop.calls == [
        *("evaluate 0", "sample 0"),
        *("save 2", "evaluate 2", "sample 3"),
        *("save 4", "evaluate 4", "save 6", "evaluate 6", "sample 6"),
    ]


@pytest.mark.parametrize(
    ("logged", "first"),
    [
        ([], ["evaluate 4", "sample 4"]),
        (["heldout"], ["sample 4"]),
        (["sample"], ["evaluate 4"]),
        (["heldout", "sample"], []),
        (["skipped"], ["evaluate 4", "sample 4"]),
    ],
)
def test_what_the_kill_left_unmeasured_after_the_checkpoint_is_measured_first(logged, first):
    before = [{"step": 2, "kind": "heldout"}, {"step": 2, "kind": "sample"}, {"step": 4, "kind": "train"}]
    loop = Loop(
        start=4,
        logged=[*before, *({"step": 4, "kind": kind} for kind in logged)],
        save_every=2,
        eval_every=2,
        sample_every=2,
    )
    loop.run()
    assert loop.calls == [*first, "save 6", "evaluate 6", "sample 6"]


def test_a_run_that_was_killed_after_its_last_checkpoint_only_measures():
    loop = Loop(start=6, logged=[{"step": 6, "kind": "train"}])
    assert loop.run() == 6
    assert loop.calls == ["evaluate 6", "sample 6"]


def test_the_best_step_is_saved_where_no_checkpoint_is_due():
    loop = Loop(save_every=4, eval_every=1, sample=None, is_best=lambda step: step in (0, 3, 4))
    loop.run()
    assert [call for call in loop.calls if "save" in call] == ["save 3", "save 4", "save 6"]


def test_an_early_end_is_saved_and_sampled_and_stays_the_end():
    settings = {"eval_every": 2, "should_stop": lambda step: step >= 4}
    loop = Loop(**settings)
    assert loop.run() == 4
    assert loop.calls == ["evaluate 0", "evaluate 2", "evaluate 4", "save 4", "sample 4"]
    again = Loop(start=4, logged=[{"step": 4, "kind": "heldout"}, {"step": 4, "kind": "sample"}], **settings)
    assert again.run() == 4
    assert again.calls == []
    killed = Loop(start=4, logged=[{"step": 4, "kind": "heldout"}], **settings)
    assert killed.run() == 4
    assert killed.calls == ["sample 4"]


def stopping_in(*steps):
    """is_stopping() that is asked once a step and caught SIGTERM in the first of `steps`."""
    asked = iter(range(1, 100))
    return lambda: int(signal.SIGTERM) if next(asked) >= steps[0] else 0


def test_a_signal_saves_the_steps_that_were_taken_and_leaves():
    loop = Loop(save_every=2, is_stopping=stopping_in(4))
    with pytest.raises(Stopped, match=r"SIGTERM.*step 3") as stopped:
        loop.run()
    assert (stopped.value.step, stopped.value.exit_code) == (3, 143)
    assert loop.calls == ["save 2", "save 3"]
    assert loop.records[-1]["step"] == 3


def test_a_signal_right_after_a_checkpoint_does_not_save_it_again():
    loop = Loop(save_every=3, is_stopping=stopping_in(4))
    with pytest.raises(Stopped):
        loop.run()
    assert loop.calls == ["save 3"]


def test_a_signal_before_an_evaluation_leaves_it_to_the_resumed_run():
    stop = False
    loop = Loop(eval_every=3, save_every=3, is_stopping=lambda: 2 * stop)

    def save(step):
        nonlocal stop
        stop = True  # caught while saving
        loop.called("save", step)

    loop.callbacks["save"] = save
    with pytest.raises(Stopped, match=r"SIGINT.*step 3") as stopped:
        loop.run()
    assert stopped.value.exit_code == 130
    assert loop.calls == ["evaluate 0", "save 3"]
    again = Loop(start=3, logged=loop.records, eval_every=3, save_every=3)
    again.run()
    assert again.calls == ["evaluate 3", "save 6", "evaluate 6", "sample 6"]


@pytest.mark.parametrize("kind", ["evaluate", "sample"])
def test_a_signal_within_an_evaluation_leaves_it_between_two_pieces_and_saves(kind):
    caught, pieces = [], []

    def is_stopping():
        return int(bool(caught) and caught[0])

    def take(step):
        with replace(ALONE, is_stopping=is_stopping).at_own_pace("measuring") as look:
            for piece in range(4):
                look()
                pieces.append((step, piece))
                if step == 3 and piece == 1:
                    caught.append(signal.SIGTERM)
        return {"heldout_ar_loss": 1.0} if kind == "evaluate" else {"sample_accuracy": 1.0}

    every = {"eval_every": 3, "sample_every": 3}
    loop = Loop(**every, **{kind: take}, is_stopping=is_stopping)
    with pytest.raises(Stopped, match=r"SIGTERM.*step 3"):
        loop.run()
    assert [piece for piece in pieces if piece[0] == 3] == [(3, 0), (3, 1)]
    assert loop.calls[-1] == "save 3"  # though none was due
    kinds = {record["kind"] for record in loop.records if record["step"] == 3}
    assert kinds == ({"train"} if kind == "evaluate" else {"train", "heldout"})
    again = Loop(start=3, logged=loop.records, **every)
    again.run()
    assert f"{kind} 3" in again.calls


def test_outside_a_run_nothing_interrupts_an_evaluation():
    with ALONE.at_own_pace("measuring") as look:
        look()


@pytest.mark.parametrize(
    ("at", "settings", "end", "saves"),
    [
        (4, {"save_every": 2}, f"; the run is saved at step 3, {RESUME}", ["save 2", "save 3"]),
        (3, {"save_every": 2}, f"; the run is saved at step 2, {RESUME}", ["save 2"]),
        (1, {}, "", []),
    ],
)
def test_data_that_cannot_be_read_in_the_middle_of_a_run_saves_the_steps_before(monkeypatch, at, settings, end, saves):
    loop = Loop(evaluate=None, sample=None, **settings)
    draw = toy_batches

    def meeting(*parts):
        read = draw(*parts)

        def batches(step):
            if step == at:
                raise DataError("rows.jsonl:7: not valid JSON")
            return read(step)

        return batches

    monkeypatch.setitem(globals(), "toy_batches", meeting)
    with pytest.raises(DataError) as refused:
        loop.run()
    assert str(refused.value) == "rows.jsonl:7: not valid JSON" + end
    assert loop.calls == saves


class Spoilt(ToyObjective):
    """Gives a canvas loss that is not finite when one of some samples is in the batch."""

    def __init__(self, samples):
        super().__init__()
        self.samples = set(samples)

    def forward(self, batch):
        losses = super().forward(batch)
        bad = self.samples & set(batch.sample_id_B.tolist())
        return losses | {"canvas": losses["canvas"] * float("nan")} if bad else losses


def weights_of(loop):
    return torch.cat([parameter.detach().flatten() for parameter in loop.objective.parameters()])


def test_a_skipped_step_is_logged_and_leaves_weights_optimiser_and_average_alone():
    seen, taken = {}, []
    loop = Loop(Spoilt([9]), non_finite="skip", evaluate=None, sample=None, after_step=taken.append)
    moments = lambda: torch.cat([s["exp_avg"].flatten() for s in loop.optimiser.state.values()])  # noqa: E731
    loop.callbacks["on_step"] = lambda step: seen.update({step: (weights_of(loop), moments().clone())})
    loop.run()
    assert taken == [1, 2, 4, 5, 6]  # step 3 has samples 8 to 11
    assert [torch.equal(seen[step][0], seen[step - 1][0]) for step in (2, 3, 4)] == [False, True, False]
    assert torch.equal(seen[3][1], seen[2][1])
    skip = {"step": 3, "kind": "skipped", "skipped": 1}
    assert loop.records[2] == {**skip, "not_finite": "canvas loss", "not_finite_ids": [8, 9]}
    assert [record["skipped"] for record in loop.records] == [0, 0, 1, 1, 1, 1]


def test_a_resumed_run_goes_on_counting_the_skipped_steps():
    def loop(**settings):
        return Loop(Spoilt([1, 9, 17]), non_finite="skip", evaluate=None, sample=None, **settings)

    whole = loop()
    whole.run()
    half = loop(steps=4)
    half.run()
    rest = loop(start=4, logged=half.records, optimiser=half.optimiser)
    rest.objective.load_state_dict(half.objective.state_dict())
    rest.optimiser = half.optimiser
    rest.objective = half.objective
    rest.run()
    assert reproducible(rest.records) == reproducible(whole.records)
    assert [record["skipped"] for record in rest.records] == [1, 1, 2, 2, 3, 3]
    assert torch.equal(weights_of(rest), weights_of(whole))


def test_more_than_twenty_skipped_steps_in_a_row_end_the_run():
    def loop(**settings):
        return Loop(Spoilt(range(24)), non_finite="skip", evaluate=None, sample=None, **settings)

    half = loop(steps=MAX_SKIPS)
    assert half.run() == MAX_SKIPS
    last = rf"step {MAX_SKIPS + 1}: the canvas loss is not finite .* {MAX_SKIPS} steps before"
    with pytest.raises(RunError, match=last):
        loop(steps=50).run()
    with pytest.raises(RunError, match=last):
        loop(steps=50, start=MAX_SKIPS, logged=half.records).run()


def test_skipped_steps_with_others_between_do_not_end_the_run():
    loop = Loop(Spoilt(range(20)), steps=80, non_finite="skip", evaluate=None, sample=None)
    loop.run()  # every sixth step has the samples 20 to 23 only
    assert len(of_kind(loop.records, "skipped")) == 67


def test_a_loss_that_is_not_finite_while_its_gradient_is_stops_the_run_too():
    class Infinite(ToyObjective):
        def forward(self, batch):
            losses = super().forward(batch)
            return losses | {"ar": losses["ar"] + torch.inf}

    with pytest.raises(RunError, match=r"step 1: .*next-token loss"):
        Loop(Infinite(), evaluate=None, sample=None).run()


def test_the_samples_of_a_packed_row_are_all_named():
    batch = toy_batch([3, 5])
    address = batch.address_BC3.clone()
    address[0, 0, 1] = 11  # another sample's canvas in the first row
    batch = batch.__class__(**{**vars(batch), "address_BC3": address})
    assert sample_ids(batch) == [3, 5, 11]


def test_records_know_the_epoch_and_the_speed_of_scored_tokens():
    loop = Loop(steps_per_epoch=4.0, evaluate=None, sample=None)
    loop.run()
    assert [record["epoch"] for record in loop.records] == [0.25, 0.5, 0.75, 1.0, 1.25, 1.5]
    for record in loop.records:
        assert 0 < record["scored_tokens_per_second"] < record["tokens_per_second"]
        assert 0.01 < record["memory_gib"] < 100
