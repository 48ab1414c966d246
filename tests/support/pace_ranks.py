"""The ranks of `test_pace.py`: one of two works long, fails, is told to stop, or meets a bad row."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from blockdiff.errors import DataError, RunError
from blockdiff.parallel import ranks as room
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.signals import Interrupted, Stopped
from blockdiff.training.checkpoint_content import steps_saved
from blockdiff.training.optimiser import build
from tests.support.toy_objective import ToyObjective, slots, toy_batches
from tests.support.toy_trainer import Options, train

TIMEOUT, BEAT = 3.0, 0.5  # seconds after which a rank hangs, and between two signs of life
ENDLESS = 1000  # pieces of work that nobody waits for


def everything(ranks: Ranks, directory: Path) -> None:
    """Run all scenarios and write to `directory` what this rank says of each."""
    with mock.patch.object(room, "BEAT", BEAT):
        said = {name: words(scenario, ranks, directory / name) for name, scenario in SCENARIOS.items()}
    (directory / f"said-{ranks.rank}.json").write_text(json.dumps(said))


def words(scenario: Callable[[Ranks, Path], Any], ranks: Ranks, run: Path) -> Any:
    """The result of a scenario, or the line with which it ends, and the steps that are saved then."""
    try:
        found = scenario(ranks, run)
    except (RunError, DataError, Stopped, Interrupted) as error:
        found = f"{type(error).__name__}: {error}"
    ranks.barrier()
    return [found, list(steps_saved(run))]


def pieces(ranks: Ranks, count: int, seconds: float = 0.0, work: Callable[[], None] = lambda: None) -> int:
    """Rank 1 is done at once; rank 0 has so many pieces of work, so many seconds long: returns how many it has done."""
    done = 0
    with ranks.at_own_pace("measuring") as look:
        for _ in range(count if ranks.is_main else 0):
            look()
            time.sleep(seconds)
            work()
            done += 1
    return done


def long(ranks: Ranks, run: Path) -> int:
    """Work that takes one rank longer than the timeout."""
    beats = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT))
    return pieces(replace(ranks, timeout=TIMEOUT, beats=beats), 3, TIMEOUT / 2)


def failed(ranks: Ranks, run: Path) -> None:
    def fail() -> None:
        raise RunError("the held-out loss is not finite")

    pieces(ranks, 3, work=fail)


def stopped(ranks: Ranks, run: Path) -> None:
    """The rank that waits is told to stop."""
    pieces(replace(ranks, is_stopping=lambda: 0 if ranks.is_main else 15), ENDLESS, BEAT)


def first(ranks: Ranks, run: Path) -> bool:
    """A file of the main process is there when the others go on."""
    with ranks.main_first("reading the data"):
        if ranks.is_main:
            run.mkdir()
            (run / "read").touch()
        return (run / "read").exists()


def failed_first(ranks: Ranks, run: Path) -> None:
    with ranks.main_first("reading the data"):
        raise RunError("a bad row")


def toy_run(ranks: Ranks, run: Path, meet: Callable[[int], None]) -> None:
    """Nine steps, saved after every third; `meet(step)` comes before a step's batches."""
    objective = ToyObjective()
    optimiser = build(objective, lr=0.1)
    draw = toy_batches(slots(ranks, 4), 4)

    options = Options(steps=9, log_every=1, save_every=3)
    batches = lambda step: meet(step) or draw(step)  # noqa: E731
    train(objective, optimiser, lambda _: 0.1, batches, options, ranks, output=run)


def told_to_stop(ranks: Ranks, run: Path) -> None:
    """One of the ranks is told to stop while the batches of step 5 are read."""
    reached = [0]
    is_stopping = lambda: 15 if ranks.rank == 1 and reached[0] >= 5 else 0  # noqa: E731
    toy_run(replace(ranks, is_stopping=is_stopping), run, lambda step: reached.__setitem__(0, step))


def bad_row(ranks: Ranks, run: Path, broken: tuple[int, ...] = (0, 1)) -> None:
    """The row is met while step 5 is read, after the save of step 3."""

    def meet(step: int) -> None:
        if step == 5 and ranks.rank in broken:
            raise DataError(f"rows.jsonl:{7 + ranks.rank}: not valid JSON")

    toy_run(ranks, run, meet)


def bad_row_on_one_rank(ranks: Ranks, run: Path) -> None:
    bad_row(ranks, run, broken=(1,))


SCENARIOS = {
    each.__name__: each
    for each in (long, failed, stopped, first, failed_first, told_to_stop, bad_row, bad_row_on_one_rank)
}
