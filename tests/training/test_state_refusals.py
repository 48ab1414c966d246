"""A checkpoint never leads into another run, and what is wrong with one is a line."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockdiff.errors import RunError
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.checkpoint_reader import restore
from blockdiff.training.optimiser import Ema, build
from blockdiff.training.run import hold_run
from tests.support import forked
from tests.support.toy_objective import ToyObjective
from tests.support.toy_run import ALONE, FACTS, enter, run_to


class OneOfFour(Ranks):
    """A rank that thinks the others see what it sees."""

    def gather(self, value):
        return [value] * 4

    def at_own_pace(self, doing):
        return nullcontext()


@pytest.mark.quick
@pytest.mark.parametrize("sign", ["metrics.jsonl", "checkpoints"])
def test_an_existing_run_is_not_started_over(tmp_path, sign):
    (tmp_path / sign).mkdir() if sign == "checkpoints" else (tmp_path / sign).write_text("")
    with pytest.raises(RunError, match=r"no checkpoint yet.*--resume"):
        enter(tmp_path, resume=False)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["recipe.yaml", "data.json", "model"])
@pytest.mark.parametrize("resume", [False, True])
def test_files_of_somebody_else_are_not_written_over(tmp_path, name, resume):
    (tmp_path / name).write_text("mine")
    for overwrite in {False, not resume}:
        with (
            pytest.raises(RunError, match=f"{name}: .*already"),
            hold_run(tmp_path, resume, ALONE, overwrite),
        ):
            pass
    assert (tmp_path / name).read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_the_refusal_says_how_far_the_run_got(tmp_path):
    run_to(tmp_path, 4)
    with pytest.raises(RunError, match="step 4"):
        enter(tmp_path, resume=False)


def test_a_directory_with_other_files_can_be_used(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert enter(tmp_path, resume=False) is None


def test_two_processes_do_not_train_into_one_directory(tmp_path):
    run = tmp_path / "run"
    with hold_run(run, True, ALONE):
        unfinished = run / "checkpoints" / ".step-2.1234.tmp"  # what the first one is just saving
        unfinished.mkdir()
        file = run / "checkpoints" / ".step-7.5678.tmp"
        file.write_text("")
        words = "run: another process trains into this directory; wait for its end or stop it"
        with pytest.raises(AssertionError, match=words):
            forked.run(enter, run, log=tmp_path / "log")
        assert unfinished.is_dir()
    assert enter(run) is None
    assert not unfinished.exists() and not file.exists()


@pytest.mark.quick
def test_every_fact_that_differs_is_named_with_both_values(tmp_path):
    objective, optimiser = run_to(tmp_path, 2)
    changed = {"seed": 4, "optim.lr": 0.1, "optim.clip": 2.0}
    words = r"started with optim\.clip null, not 2\.0; seed 3, not 4;"
    with pytest.raises(RunError, match=words):
        restore(tmp_path / "checkpoints" / "step-2", objective, optimiser, changed)


def test_an_average_asked_for_since_is_refused_by_its_key_not_by_a_missing_file(tmp_path):
    objective, optimiser = run_to(tmp_path, 2)
    facts = {**FACTS, "optim.ema": 0.9}
    with pytest.raises(RunError, match=r"optim\.ema null.*0\.9"):
        restore(tmp_path / "checkpoints" / "step-2", objective, optimiser, facts, average=Ema(objective, 0.9))


def test_a_run_that_kept_no_average_cannot_go_on_with_one(tmp_path):
    objective, optimiser = run_to(tmp_path, 2)
    with pytest.raises(RunError, match=r"step-2: .*ema\.safetensors"):
        restore(tmp_path / "checkpoints" / "step-2", objective, optimiser, FACTS, average=Ema(objective, 0.9))


def test_another_number_of_processes_is_one_warning(tmp_path):
    objective, optimiser = run_to(tmp_path, 2)
    checkpoint = tmp_path / "checkpoints" / "step-2"
    four = OneOfFour(torch.device("cpu"), rank=0, world=4)
    with pytest.warns(UserWarning, match="saved by 1 process, resumed by 4") as told:
        assert restore(checkpoint, objective, optimiser, FACTS, ranks=four) == 2
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore(checkpoint, objective, optimiser, FACTS, ranks=ALONE)
        restore(checkpoint, objective, optimiser, FACTS, ranks=replace(four, rank=1))


def test_another_model_is_refused_by_the_name_of_a_tensor_and_left_alone(tmp_path):
    run_to(tmp_path, 2)
    checkpoint = tmp_path / "checkpoints" / "step-2"
    wider = ToyObjective()
    wider.mix = torch.nn.Linear(8, 9, bias=False)
    before = {name: tensor.clone() for name, tensor in wider.state_dict().items()}
    with pytest.raises(RunError, match=r"mix\.weight .*\[8, 8\].*\[9, 8\]"):
        restore(checkpoint, wider, build(wider, lr=0.1), FACTS)
    assert all(torch.equal(before[name], tensor) for name, tensor in wider.state_dict().items())


def test_a_parameter_frozen_since_is_named(tmp_path):
    run_to(tmp_path, 2)
    frozen = ToyObjective()
    frozen.mix.requires_grad_(False)
    with pytest.raises(RunError, match=r"mix\.weight .*trained"):
        restore(tmp_path / "checkpoints" / "step-2", frozen, build(frozen, lr=0.1), FACTS)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("optimiser.safetensors", lambda content: content[:-4096] + bytes(4096)),
        ("trainer.json", lambda content: b"{}"),
        ("trainer.json", lambda content: b"[]"),
        ("trainer.json", lambda content: content.replace(b'"facts"', b'"fact"')),
        ("trainer.json", lambda content: content.replace(b'"digests": {', b'"digests": 7, "others": {')),
        ("trainer.json", lambda content: content.replace(b'"step": 2', b'"step": 4')),
        ("trainer.json", lambda content: content.replace(b'"weight_decay": 0.0001', b'"weight_decay": 0.0007')),
    ],
)
def test_what_was_changed_in_a_checkpoint_is_noticed_in_one_line(tmp_path, name, damage):
    objective, optimiser = run_to(tmp_path, 2)
    file = tmp_path / "checkpoints" / "step-2" / name
    before = file.read_bytes()
    file.write_bytes(damage(before))
    assert file.read_bytes() != before
    with pytest.raises(RunError, match=r"step-2: (.* remove it|.*earlier)"):
        restore(file.parent, objective, optimiser, FACTS)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["model.safetensors", "optimiser.safetensors", "trainer.json"])
def test_a_damaged_checkpoint_is_one_line_with_what_to_do(tmp_path, name):
    objective, optimiser = run_to(tmp_path, 2)
    checkpoint = tmp_path / "checkpoints" / "step-2"
    whole = (checkpoint / name).read_bytes()
    (checkpoint / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match=r"step-2: .*earlier one"):
        restore(checkpoint, objective, optimiser, FACTS)


@pytest.mark.parametrize("damage", [Path.unlink, lambda log: log.write_text(log.read_text().replace("1", "2"))])
def test_a_log_that_was_removed_or_edited_is_one_warning(tmp_path, damage):
    objective, optimiser = run_to(tmp_path, 2)
    damage(tmp_path / "metrics.jsonl")
    with pytest.warns(UserWarning, match=r"metrics\.jsonl: was removed or edited since step 2 was saved"):
        restore(tmp_path / "checkpoints" / "step-2", objective, optimiser, FACTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one rank says it for all
        other = OneOfFour(torch.device("cpu"), rank=1, world=4)
        restore(tmp_path / "checkpoints" / "step-2", objective, optimiser, FACTS, ranks=other)
