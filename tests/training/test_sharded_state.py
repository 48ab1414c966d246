"""Checkpoints of a run that is spread over ranks: written by all, resumed on any number, never torn."""

from __future__ import annotations

import json
import shutil
import warnings
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from blockdiff.errors import RunError
from blockdiff.training.checkpoint_content import ALONE, KINDS, SavedTensors, steps_saved
from blockdiff.training.checkpoint_reader import restore_weights
from blockdiff.training.run import hold_run
from tests.support import forked, sharded_state
from tests.support.sharded_state import Toy

CHAIN = [(4, "both"), (4, "experts"), (2, "none"), (2, "experts"), (2, "full"), (4, "full")]


def step_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, whichever ranks wrote them."""
    checkpoint = run / "checkpoints" / f"step-{step}"
    saved = SavedTensors(checkpoint, json.loads((checkpoint / "trainer.json").read_text())["digests"])
    return {f"{kind}/{name}": saved.read(kind, name) for kind in KINDS for name in saved.tensors(kind)}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> Path:
    """A run that goes on with another number of ranks, or spread in another way, after every step."""
    directory = tmp_path_factory.mktemp("chain")
    forked.run(sharded_state.whole_run, directory / "whole", len(CHAIN), log=directory / "log")
    for world, steps in groupby(enumerate(CHAIN, start=1), key=lambda step: step[1][0]):
        forked.run_ranks(world, sharded_state.go_on, directory, {step: how for step, (_, how) in steps})
    return directory


@pytest.fixture
def run(chain, tmp_path) -> Path:
    """The checkpoint of two ranks in the chain, to be damaged."""
    return Path(shutil.copytree(chain / "run", tmp_path / "run"))


def test_a_run_goes_on_with_any_number_of_ranks_and_any_mesh_to_the_bit(chain):
    assert_same(step_of(chain / "run", len(CHAIN)), step_of(chain / "whole", len(CHAIN)))
    with pytest.warns(UserWarning, match="saved by 4 processes, resumed by 1"):
        alone = Toy("none", seed=8).restore(chain / "run", ALONE)
    assert alone.step == len(CHAIN)
    whole = step_of(chain / "whole", len(CHAIN))
    for name, tensor in alone.objective.state_dict().items():
        assert torch.equal(tensor, whole[f"model/{name}"]), name
    other = Toy("none", seed=9)
    restore_weights(chain / "run" / "checkpoints" / "step-1", other.objective, other.average)
    assert_same(
        {f"ema/{name}": tensor for name, tensor in other.average.state().items()},
        {name: tensor for name, tensor in step_of(chain / "run", 1).items() if name.startswith("ema/")},
    )


def test_each_rank_writes_its_own_pieces_and_nobody_a_pickle(chain):
    for step, (world, how) in enumerate(CHAIN, start=1):
        checkpoint = chain / "run" / "checkpoints" / f"step-{step}"
        files = sorted(path.name for path in checkpoint.iterdir())
        if how == "none":
            assert files == ["ema.safetensors", "model.safetensors", "optimiser.safetensors", "trainer.json"]
            continue
        writers = range(world) if how != "experts" else range(2)  # of equal pieces one is written
        assert files == sorted(
            ["pieces.json", "trainer.json", *(f"{kind}-{rank}.safetensors" for kind in KINDS for rank in writers)]
        )
        held = [tensor.numel() for kind in KINDS for rank in writers
                for tensor in load_file(checkpoint / f"{kind}-{rank}.safetensors").values()]  # fmt: skip
        assert sum(held) == sum(tensor.numel() for tensor in step_of(chain / "run", step).values())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-1] + b"\x07"), "has changed since it was written"),
        (lambda file: file.write_bytes(file.read_bytes()[:-40]), "has changed since it was written"),
        (Path.unlink, "No such file or directory"),
        (lambda file: (file.unlink(), file.mkdir()), "Is a directory"),  # a disk that does not give the bytes
    ],
)
@pytest.mark.parametrize("file", ["optimiser-1.safetensors", "pieces.json"])
def test_a_damaged_file_of_one_rank_is_one_line_that_names_it(run, damage, words, file):
    shutil.rmtree(run / "checkpoints" / "step-6")
    shutil.move(run / "checkpoints" / "step-5", run / "checkpoints" / "kept")
    for step in (1, 3, 4):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    shutil.move(run / "checkpoints" / "kept", run / "checkpoints" / "step-5")
    damage(run / "checkpoints" / "step-5" / file)
    toy = Toy("none")
    before = {name: tensor.clone() for name, tensor in toy.objective.state_dict().items()}
    message = rf"step-5: cannot be read \({file}.*{words}\); remove it to resume from an earlier one"
    with pytest.raises(RunError, match=message.replace(".safe", r"\.safe")):
        toy.restore(run, ALONE)
    assert_same(before, dict(toy.objective.state_dict()))


def test_all_ranks_refuse_what_one_of_them_finds_damaged(run):
    file = run / "checkpoints" / "step-6" / "ema-2.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")
    forked.run_ranks(4, sharded_state.refused, run.parent, "full")
    said = {(run.parent / f"said-{rank}.txt").read_text() for rank in range(4)}
    assert len(said) == 1
    assert "step-6: cannot be read (ema-2.safetensors has changed since it was written); remove it" in said.pop()


def test_a_pieces_file_of_another_checkpoint_is_noticed(run):
    checkpoints = run / "checkpoints"
    shutil.copy(checkpoints / "step-2" / "pieces.json", checkpoints / "step-6" / "pieces.json")
    with pytest.raises(RunError, match=r"step-6: .*pieces\.json"):
        Toy("none").restore(run, ALONE)


@pytest.fixture(scope="module")
def saves(tmp_path_factory) -> Path:
    """Saves of two ranks, a folder for each case; that a rank does not see the run directory is one of them."""
    directory = tmp_path_factory.mktemp("saves")
    cases: dict[str, Any] = {"blind": sharded_state.blind}
    for how in ("none", "full"):
        cases[f"training, {how}"] = partial(sharded_state.save_while_training, how=how)
    for in_background in (False, True):
        cases[f"disk, {in_background}"] = partial(sharded_state.full_disk, how="full", in_background=in_background)
    forked.run_ranks(2, forked.in_turn, directory, cases)
    return directory


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_of_one_rank_is_one_line_and_the_last_checkpoint_stays(saves, in_background):
    folder = saves / f"disk, {in_background}"
    said = [(folder / f"said-{rank}.txt").read_text() for rank in range(2)]
    assert "another rank failed during saving step 2; its message says why" in said[0]
    assert "step-2: cannot be written (No space left on device" in said[1]
    assert "step 1 is saved: make room and go on with --resume" in said[1]
    assert list(steps_saved(folder / "run")) == [1]
    with pytest.warns(UserWarning, match="saved by 2 processes"):
        assert Toy("none").restore(folder / "run", ALONE).step == 1


def test_a_rank_that_does_not_see_the_run_directory_is_named_before_anything_is_written(saves):
    assert not list((saves / "blind" / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("how", ["none", "full"])
def test_a_save_in_the_background_has_the_step_it_was_begun_at(saves, tmp_path, how):
    whole = tmp_path / "whole"
    Toy("none").train(2).save(whole, ALONE)
    assert_same(step_of(saves / f"training, {how}" / "run", 2), step_of(whole, 2))


@pytest.mark.parametrize(("victim", "in_background"), [(0, True), (1, False)])
def test_a_rank_that_is_killed_in_a_save_leaves_a_complete_checkpoint(tmp_path, victim, in_background):
    reached = []
    for moment in range(1, 100, 5 - 2 * victim):
        directory = tmp_path / str(moment)
        directory.mkdir()
        codes = forked.wait_for_ranks(2, sharded_state.killed, directory, "full", victim, moment, in_background)
        assert codes[1 - victim] == 0  # it ended by itself, with one line
        with hold_run(directory / "run", True, ALONE) as checkpoint:
            assert checkpoint is not None
        with warnings.catch_warnings(action="ignore"):  # another number of processes
            reached.append(Toy("none").restore(directory / "run", ALONE).step)
        assert all(path.name.startswith("step-") for path in (directory / "run" / "checkpoints").iterdir())
        said = (directory / f"said-{1 - victim}.txt").read_text()
        if codes[victim] == 0:  # that save went through
            assert said == "saved"
            break
        assert said == "saved" or "another rank was lost during" in said
        assert reached[-1] == 2 or said != "saved"
    assert reached[-1] == 2
    assert reached[0] == 1
    assert reached == sorted(reached)
