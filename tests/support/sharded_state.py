"""The ranks of `test_sharded_state.py`, one, two and four: a run whose gradients are given, saved and resumed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from blockdiff.errors import RunError
from blockdiff.parallel.ranks import Ranks
from blockdiff.seeding import Stream, uniform
from blockdiff.tensor_pieces import like, piece_of
from blockdiff.training import checkpoint_writer
from blockdiff.training.checkpoint_content import ALONE, steps_saved
from blockdiff.training.checkpoint_reader import restore
from blockdiff.training.checkpoint_writer import CheckpointWriter
from blockdiff.training.optimiser import Ema
from tests.support.spread import How, spread
from tests.support.toy_objective import ToyObjective, save_checkpoint

FACTS = {"seed": 3}


class Toy:
    """A toy objective that is spread in some way, with what trains it."""

    def __init__(self, how: How, seed: int = 0) -> None:
        self.objective = spread(ToyObjective(seed), how)
        groups = [{"params": [parameter]} for parameter in self.objective.parameters()]  # each may have another mesh
        self.optimiser = torch.optim.AdamW(groups, lr=0.1, fused=False, foreach=False)  # whose sums have no tails
        self.average = Ema(self.objective, 0.9)
        self.step = 0

    def train(self, last: int) -> Toy:
        """Steps with gradients that depend on the step and the place in the whole tensor alone."""
        while self.step < last:
            self.step += 1
            for index, parameter in enumerate(self.objective.parameters()):
                drawn = uniform(9, Stream.WEIGHTS, (self.step, index), parameter.numel()).view(parameter.shape) - 0.5
                block = piece_of(parameter).block
                parameter.grad = like(parameter, drawn[block.slices].to(parameter.dtype).contiguous())
            self.optimiser.step()
            self.average.update(self.step)
        return self

    def save(self, run: Path, ranks: Ranks) -> Path:
        """Write a checkpoint of the step."""
        return save_checkpoint(run, self.step, self.objective, self.optimiser, FACTS, ranks, average=self.average)

    def restore(self, run: Path, ranks: Ranks) -> Toy:
        """Go on from the last checkpoint."""
        checkpoint = list(steps_saved(run).values())[-1]
        parts = self.objective, self.optimiser, FACTS
        self.step = restore(checkpoint, *parts, average=self.average, ranks=ranks)
        return self


def whole_run(directory: Path, last: int) -> None:
    """The run that nothing interrupts, on one process."""
    Toy("none").train(last).save(directory, ALONE)


def go_on(ranks: Ranks, directory: Path, ways: dict[int, How]) -> None:
    """Go on with the run in `directory`, if there is one, step by step, each spread in its own way, and save each."""
    for last, how in ways.items():
        toy = Toy(how, seed=7)
        if steps_saved(directory / "run"):
            toy.restore(directory / "run", ranks)
        else:
            toy = Toy(how)
        toy.train(last).save(directory / "run", ranks)


def refused(ranks: Ranks, directory: Path, how: How) -> None:
    """Every rank is refused; what each says is left beside its log."""
    message = "nothing"
    try:
        Toy(how).restore(directory / "run", ranks)
    except RunError as error:
        message = str(error)
    (directory / f"said-{ranks.rank}.txt").write_text(message)


def blind(ranks: Ranks, directory: Path) -> None:
    """Rank 1 is on a machine that does not see the run directory of rank 0."""
    toy = Toy("full").train(1)
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(Path, "is_dir", lambda path: False)
        with pytest.raises(RunError, match=r"rank 1 does not see .* rank 0 writes there.*a disk that all machines"):
            toy.save(directory / "run", ranks)


def full_disk(ranks: Ranks, directory: Path, how: How, in_background: bool) -> None:
    """The disk of rank 1 is full in the second save: each rank gets one line, and the first save stays."""
    run, toy = directory / "run", Toy(how).train(1)
    saver = CheckpointWriter(run, ranks, in_background)
    saver.start(1, toy.objective, toy.optimiser, FACTS, toy.average)
    saver.wait()

    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    said = "nothing"
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            patch.setattr(checkpoint_writer, "write_stream", full)
        try:
            saver.start(2, toy.objective, toy.optimiser, FACTS, toy.average)
            while not saver.poll():
                time.sleep(0.01)
        except RunError as error:
            said = str(error)
    (directory / f"said-{ranks.rank}.txt").write_text(said)
    ranks.barrier()
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["step-1"] or ranks.rank, left


def save_while_training(ranks: Ranks, directory: Path, how: How) -> None:
    """A save in the background holds the step at which it was begun, although training goes on meanwhile."""
    run, toy = directory / "run", Toy(how).train(2)
    may_write = directory / f"may-write-{ranks.rank}"
    original = checkpoint_writer.write_stream

    def waiting(*arguments: Any) -> str:
        while not may_write.exists():
            time.sleep(0.01)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_writer, "write_stream", waiting)
        saver = CheckpointWriter(run, ranks, in_background=True)
        saver.start(2, toy.objective, toy.optimiser, FACTS, toy.average)
        toy.train(4)
        assert saver.poll() == 0
        assert saver.step == 2
        assert not steps_saved(run)
        if ranks.rank == 1:
            may_write.touch()
            saver._thread.join()
        assert saver.poll() == 0  # rank 1 is done, rank 0 is not
        assert not steps_saved(run)
        may_write.touch()
        assert saver.wait() == 2
    assert list(steps_saved(run)) == [2]
    ranks.barrier()  # rank 0 could have saved step 4 before the other has looked
    assert saver.wait() == saver.poll() == saver.step == 0
    saver.start(4, toy.objective, toy.optimiser, FACTS, toy.average)
    assert saver.wait() == 4


def killed(ranks: Ranks, directory: Path, how: How, victim: int, moment: int, in_background: bool) -> None:
    """A rank is killed at some moment of its second save; the others end with one line."""
    run, toy = directory / "run", Toy(how).train(1)
    toy.save(run, ranks)
    calls = 0

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == moment and ranks.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for place, name in [(os, "fsync"), (Path, "rename"), (Path, "write_text"), (Path, "unlink")]:
        setattr(place, name, dying(getattr(place, name)))
    said = "saved"
    try:
        saver = CheckpointWriter(run, ranks, in_background)
        with ranks.guarded("step 2"):
            toy.train(2)
            saver.start(2, toy.objective, toy.optimiser, FACTS, toy.average)
            saver.wait()
    except RunError as error:
        said = str(error)
    (directory / f"said-{ranks.rank}.txt").write_bytes(said.encode())
    os._exit(0)
