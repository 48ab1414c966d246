"""Checkpoints of a run: complete or absent, and exact."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from blockdiff import __version__
from blockdiff.errors import RunError
from blockdiff.files import seal
from blockdiff.metrics import MetricsLog
from blockdiff.training import checkpoint_writer
from blockdiff.training.checkpoint_content import steps_saved
from blockdiff.training.checkpoint_reader import restore, restore_weights
from blockdiff.training.optimiser import Ema, build
from tests.support import forked
from tests.support.toy_objective import ToyObjective, save_checkpoint, slots, toy_batches
from tests.support.toy_run import ALONE, FACTS, enter, numbers, run_to, saved, tensors_of
from tests.support.toy_trainer import Options, train


@pytest.mark.quick
def test_an_interrupted_run_equals_an_uninterrupted_one_to_the_bit(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_to(whole, 9)
    run_to(broken, 5)
    shutil.rmtree(broken / "checkpoints" / "step-5")  # killed after step 5, last saved at step 4
    run_to(broken, 9, resume=True, seed=99)  # whatever the weights were before the restore
    assert numbers(broken) == numbers(whole)
    assert [record["step"] for record in numbers(broken)] == list(range(1, 10))
    expected, got = tensors_of(whole, 9), tensors_of(broken, 9)
    assert expected.keys() == got.keys()
    assert "signal.weight/exp_avg_sq" in got
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_a_run_killed_before_its_first_checkpoint_resumes_at_step_0(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_to(whole, 3)
    broken.mkdir()
    (broken / "recipe.yaml").write_text("seed: 3\n")
    MetricsLog(broken / "metrics.jsonl").append({"step": 1, "loss": 123.0})
    run_to(broken, 3, resume=True)
    assert numbers(broken) == numbers(whole)


@pytest.mark.quick
def test_only_the_newest_checkpoints_stay(tmp_path):
    run_to(tmp_path, 9, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-8", "step-9"]
    assert list(steps_saved(tmp_path)) == [8, 9]


def test_every_nth_checkpoint_and_the_protected_ones_stay_too(tmp_path):
    objective = ToyObjective()
    optimiser = build(objective, lr=0.1)
    for step in range(1, 12):
        saved(tmp_path, step, objective, optimiser, keep_every=4, protect={3} if step < 9 else {7})
    assert list(steps_saved(tmp_path)) == [4, 7, 8, 10, 11]  # 3 went when 7 became the best
    saved(tmp_path, 12, objective, optimiser, 1, protect={10})
    assert list(steps_saved(tmp_path)) == [10, 12]


@pytest.mark.quick
def test_the_average_is_saved_and_goes_on_to_the_bit(tmp_path):
    def averaged(seed, steps, checkpoint=None):
        objective = ToyObjective(seed)
        optimiser, ema = build(objective, lr=0.1), Ema(objective, 0.9)
        start = restore(checkpoint, objective, optimiser, FACTS, average=ema) if checkpoint else 0
        batches = toy_batches(slots(ALONE, 4), 4)
        train(objective, optimiser, lambda _: 0.1, batches, Options(steps), ALONE, average=ema, start=start)
        return objective, optimiser, ema

    whole = averaged(0, 6)[2].state()
    objective, optimiser, ema = averaged(0, 3)
    path = save_checkpoint(tmp_path, 3, objective, optimiser, FACTS, average=ema)
    resumed = averaged(5, 6, path)[2].state()
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    other = ToyObjective(8)
    average = Ema(other, 0.9)
    restore_weights(path, other, average)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), objective.parameters(), strict=True))
    assert all(torch.equal(ema.state()[name], average.state()[name]) for name in whole)


def test_step_10_is_newer_than_step_9(tmp_path):
    for step in (9, 10):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    assert enter(tmp_path) == tmp_path / "checkpoints" / "step-10"


@pytest.mark.quick
def test_a_checkpoint_holds_no_pickle(tmp_path):
    run_to(tmp_path, 2)
    names = sorted(path.name for path in (tmp_path / "checkpoints" / "step-2").iterdir())
    assert names == ["model.safetensors", "optimiser.safetensors", "trainer.json"]


def test_saving_the_same_step_again_replaces_it(tmp_path):
    objective, optimiser = run_to(tmp_path, 2)
    with torch.no_grad():
        objective.norm.fill_(4.0)
    save_checkpoint(tmp_path, 2, objective, optimiser, FACTS)
    assert tensors_of(tmp_path, 2)["norm"].tolist() == [4.0] * 8


def die_at_every_moment(folder: Path) -> None:
    """Save step 6 of a run in `folder` again and again, each time in a process that dies one moment later."""
    run_to(folder / "0", 1)  # imports what a first step imports, once
    for moment in range(1, 40):
        child = os.fork()
        if child:
            status = os.waitpid(child, 0)[1]
            if status != signal.SIGKILL:
                os._exit(status)  # that save went through: every moment has been died at
        else:
            save_and_die(folder / str(moment), moment)
            os._exit(0)


def save_and_die(run: Path, moment: int) -> None:
    """Every write, sync, rename and removal of a save is a moment to die at."""
    objective, optimiser = run_to(run, 4)
    calls = 0

    def dying(function):
        def call(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    moments = [
        (checkpoint_writer, "write_stream"),
        (os, "fsync"),
        (shutil, "rmtree"),
        (Path, "rename"),
        (Path, "write_text"),
    ]
    for place, name in moments:
        setattr(place, name, dying(getattr(place, name)))
    saved(run, 6, objective, optimiser)


def test_a_kill_at_any_moment_of_a_save_leaves_a_complete_checkpoint(tmp_path):
    forked.run(die_at_every_moment, tmp_path, log=tmp_path.with_suffix(".log"))
    runs = sorted((path for path in tmp_path.iterdir() if path.name != "0"), key=lambda path: int(path.name))
    assert len(runs) > 10
    reached = []
    for path in runs:
        checkpoint = enter(path)
        objective = ToyObjective(5)
        reached.append(restore(checkpoint, objective, build(objective, lr=0.1), FACTS))
        assert all(path.name.startswith("step-") for path in (path / "checkpoints").iterdir())
    assert reached == sorted(reached)
    assert set(reached) == {4, 6}


@pytest.mark.parametrize(("wrote", "said"), [("0.0.9", "blockdiff 0.0.9"), (None, "an unreleased blockdiff")])
def test_a_checkpoint_of_another_format_is_refused_with_the_version_that_wrote_it(tmp_path, wrote, said):
    objective, optimiser = run_to(tmp_path, 2)
    checkpoint = tmp_path / "checkpoints" / "step-2"
    trainer = json.loads((checkpoint / "trainer.json").read_text())
    del trainer["seal"]
    assert trainer.pop("version") == __version__
    trainer |= {"format": 4} | ({} if wrote is None else {"version": wrote})
    (checkpoint / "trainer.json").write_text(json.dumps(trainer | {"seal": seal(trainer)}))
    with pytest.raises(RunError, match=f"step-2: .*{said}.*format 4.*{__version__}"):
        restore(checkpoint, objective, optimiser, FACTS)


@pytest.mark.parametrize(
    ("at", "error"),
    [
        ("write_stream", OSError(28, "No space left on device")),
        ("write_stream", SafetensorError("I/O error: No space left (os error 28)")),
        ("publish", OSError(28, "No space left on device")),
    ],
)
def test_a_full_disk_is_one_line_that_says_what_is_needed_and_what_is_saved(tmp_path, monkeypatch, at, error):
    def full(*_: object) -> None:
        raise error

    objective, optimiser = run_to(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_writer, at, full)
        words = r"step-4: cannot be written \(.*No space left .*; it needs [\d,]+ bytes, .* are free\); step 2 is saved"
        with pytest.raises(RunError, match=words):
            save_checkpoint(tmp_path, 4, objective, optimiser, FACTS)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
    with pytest.raises(OSError, match="'/dev/full'"):
        MetricsLog(Path("/dev/full")).append({"step": 1})


def test_what_an_objective_trains_beside_its_model_is_saved_too(tmp_path):
    class Weighted(torch.nn.Module):
        def __init__(self, start):
            super().__init__()
            self.model, self.weight = ToyObjective(), torch.nn.Parameter(torch.tensor([start]))

    objective, other = Weighted(2.0), Weighted(5.0)
    path = save_checkpoint(tmp_path, 1, objective, build(objective, lr=0.1), FACTS)
    assert {"weight", "norm", "mix.weight"} <= load_file(path / "model.safetensors").keys()
    restore(path, other, build(other, lr=0.1), FACTS)
    assert other.weight.tolist() == [2.0]


def test_the_state_of_another_optimiser_kind_survives_too(tmp_path):
    objective = ToyObjective()
    optimiser = torch.optim.SGD(objective.parameters(), lr=0.1, momentum=0.9)
    objective(toy_batches([range(4)], 4)(1)[0])["canvas"].backward()
    optimiser.step()
    path = save_checkpoint(tmp_path, 1, objective, optimiser, FACTS)
    again = ToyObjective(1)
    other = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    assert restore(path, again, other, FACTS) == 1
    for mine, theirs in zip(objective.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(optimiser.state[mine]["momentum_buffer"], other.state[theirs]["momentum_buffer"])
    assert json.loads((path / "trainer.json").read_text())["facts"] == FACTS


def test_what_an_optimiser_counts_in_its_groups_goes_on(tmp_path):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["taken"] = group.get("taken", 0) + 1
            return super().step(closure)

    objective = ToyObjective()
    optimiser = Counting(objective.parameters(), lr=0.1)
    optimiser.step()
    optimiser.step()
    path = save_checkpoint(tmp_path, 2, objective, optimiser, FACTS)
    other = Counting(objective.parameters(), lr=0.5)
    restore(path, objective, other, FACTS)
    assert (other.param_groups[0]["taken"], other.param_groups[0]["lr"]) == (2, 0.5)


def test_optimiser_state_that_no_file_can_hold_is_named(tmp_path):
    objective = ToyObjective()
    optimiser = torch.optim.SGD(objective.parameters(), lr=0.1)
    optimiser.state[objective.norm]["history"] = [torch.ones(1)]
    with pytest.raises(RunError, match="norm/history"):
        save_checkpoint(tmp_path, 1, objective, optimiser, FACTS)
    assert not steps_saved(tmp_path)
