"""The ranks of `test_lost_ranks.py`: a toy run in which one dies, hangs, is told to stop, or takes long.

They are forked after the imports, so that a scenario takes a second.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from blockdiff.canvas import Batch
from blockdiff.errors import DataError, RunError
from blockdiff.metrics import MetricsLog
from blockdiff.parallel import ranks as room
from blockdiff.parallel import watch as watch_room
from blockdiff.parallel.ranks import Ranks, from_accelerate
from blockdiff.parallel.signals import Interrupted, Stopped, caught
from blockdiff.parallel.watch import watched
from blockdiff.training.checkpoint_content import steps_saved
from blockdiff.training.checkpoint_reader import restore
from blockdiff.training.optimiser import build
from blockdiff.training.run import hold_run, prune
from tests import losing_meshes as meshes
from tests.forked import HUNG, rank_variables
from tests.toy_objective import ToyObjective, save_checkpoint, slots, toy_batches
from tests.toy_trainer import Options, train

TIMEOUT = 3.0  # seconds: where that is what a scenario is about, a hung rank is noticed after so many
BEAT = 0.5  # seconds between two signs of life
ENDLESS = round(HUNG / BEAT)  # pieces of work that nobody waits for
AT_A_TIME = 8


def toy_run(ranks: Ranks, run: Path, disturb: Callable[[int], None] = lambda step: None, in_save: bool = False) -> None:
    """Nine steps, saved after every third; `disturb(step)` comes between a step's batches or within a save."""
    objective = ToyObjective()
    optimiser = build(objective, lr=0.1)
    with hold_run(run, True, ranks) as found:
        pass
    start = restore(found, objective, optimiser, {}, ranks=ranks) if found else 0
    draw = toy_batches(slots(ranks, 4), 4)
    log = MetricsLog(run / "metrics.jsonl")
    logged = log.cut(start) if ranks.is_main else []

    def batches(step: int) -> list[Batch]:
        if not in_save:
            disturb(step)
        return draw(step)

    def save(step: int) -> None:
        if in_save:
            disturb(step)
        save_checkpoint(run, step, objective, optimiser, {}, ranks)
        if ranks.is_main:
            prune(run, 2)

    with caught(speaks=False) as signals:
        train(
            objective,
            optimiser,
            lambda _: 0.1,
            batches,
            Options(steps=9, log_every=1, save_every=3),
            ranks,
            log=log.append,
            save=save,
            is_stopping=signals.is_stopping,
            logged=logged,
            start=start,
        )


def on_rank(rank: int, number: int, at: int) -> Callable[[Ranks], Callable[[int], None]]:
    """Something that sends rank `rank` a signal in step `at`."""

    def disturb(ranks: Ranks) -> Callable[[int], None]:
        return lambda step: os.kill(os.getpid(), number) if (ranks.rank, step) == (rank, at) else None

    return disturb


def killed(ranks: Ranks, run: Path) -> None:
    toy_run(ranks, run, on_rank(1, signal.SIGKILL, 5)(ranks))


def main_killed(ranks: Ranks, run: Path) -> None:
    toy_run(ranks, run, on_rank(0, signal.SIGKILL, 5)(ranks))


def killed_while_saving(ranks: Ranks, run: Path) -> None:
    toy_run(ranks, run, on_rank(1, signal.SIGKILL, 6)(ranks), in_save=True)


def main_killed_while_saving(ranks: Ranks, run: Path) -> None:
    toy_run(ranks, run, on_rank(0, signal.SIGKILL, 6)(ranks), in_save=True)


def main_killed_while_meeting(ranks: Ranks, run: Path) -> None:
    """Rank 0, at which the ranks meet, is killed before they have made their groups: this is never reached."""


def die_while_meeting(rank: int) -> None:
    """Let rank 0 be killed as soon as all ranks have met."""
    new_group = torch.distributed.new_group

    def met(**given: Any) -> Any:
        torch.distributed.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return new_group(**given)

    torch.distributed.new_group = met


def killed_in_backward(ranks: Ranks, run: Path) -> None:
    """Rank 1 is killed while DDP sums gradients, and what rank 0 then frees waits for threads that need Python."""
    sys.setswitchinterval(3600)  # those get it only when it is handed over
    try:
        with ranks.guarded("step 1"):
            model = DistributedDataParallel(torch.nn.Linear(4, 4))
            if not ranks.is_main:
                model.module.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            model(torch.ones(2, 4)).sum().backward()
    except RunError:
        ranks.close()
        raise


def hung(ranks: Ranks, run: Path) -> None:
    toy_run(ranks, run, on_rank(1, signal.SIGSTOP, 5)(ranks))


def told_to_stop(ranks: Ranks, run: Path) -> None:
    toy_run(ranks, run, on_rank(1, signal.SIGTERM, 5)(ranks))


def long_work(ranks: Ranks, run: Path) -> None:
    """Work that one rank does before the others may take longer than the timeout."""
    with ranks.main_first("reading the data"):
        if ranks.is_main:
            time.sleep(1.5 * TIMEOUT)
            run.mkdir(exist_ok=True)
            (run / "read").touch()
        assert (run / "read").exists()
    toy_run(ranks, run)


def failed_work(ranks: Ranks, run: Path) -> None:
    with ranks.main_first("reading the data"):
        raise RunError("a bad row")


def measuring(ranks: Ranks, run: Path, work: Callable[[int], None], pieces: int = 4, seconds: float = BEAT) -> None:
    """Rank 1 is done at once; rank 0 has some pieces of work, so many seconds long, and tells of each."""
    with caught(speaks=False) as signals, ranks.guarded("the evaluation after step 5"):
        ranks = replace(ranks, is_stopping=signals.is_stopping)
        try:
            with ranks.at_own_pace("measuring") as look:
                for piece in range(pieces if ranks.is_main else 0):
                    look()
                    (run.parent / f"{run.name}-piece-{piece}").touch()
                    time.sleep(seconds)
                    work(piece)
        except Interrupted:
            raise Stopped(5, max(ranks.gather(signals.is_stopping()))) from None
        assert ranks.gather(ranks.rank) == [0, 1]
        assert ranks.sum(torch.tensor(ranks.rank)) == 1


def long_measuring(ranks: Ranks, run: Path) -> None:
    measuring(ranks, run, lambda piece: None, seconds=TIMEOUT / 2)


def failed_measuring(ranks: Ranks, run: Path) -> None:
    def fail(piece: int) -> None:
        raise RunError("the held-out loss is not finite")

    measuring(ranks, run, fail)


def killed_measuring(ranks: Ranks, run: Path) -> None:
    measuring(ranks, run, lambda piece: os.kill(os.getpid(), signal.SIGKILL))


def killed_while_waiting(ranks: Ranks, run: Path) -> None:
    """Rank 1, which waits, is lost: the work ends before its next piece."""
    after(ranks, 3 * BEAT, signal.SIGKILL)
    measuring(ranks, run, lambda piece: None, pieces=ENDLESS)


def hung_measuring(ranks: Ranks, run: Path) -> None:
    measuring(ranks, run, lambda piece: os.kill(os.getpid(), signal.SIGSTOP))


def told_to_stop_measuring(ranks: Ranks, run: Path) -> None:
    """The rank that waits is told to stop, and the one that works leaves."""
    after(ranks, BEAT, signal.SIGTERM)
    measuring(ranks, run, lambda piece: None, pieces=ENDLESS)


def after(ranks: Ranks, seconds: float, number: int) -> None:
    """Send rank 1 a signal some seconds from now."""
    if not ranks.is_main:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()


def bad_row(ranks: Ranks, run: Path, broken: tuple[int, ...] = (0, 1)) -> None:
    """The row is met while step 5 is read, after the save of step 3."""

    def meet(step: int) -> None:
        if step == 5 and ranks.rank in broken:
            raise DataError(f"rows.jsonl:{7 + ranks.rank}: not valid JSON")

    toy_run(ranks, run, meet)


def bad_row_on_one_rank(ranks: Ranks, run: Path) -> None:
    bad_row(ranks, run, broken=(1,))


def lost_elsewhere(ranks: Ranks, run: Path, victim: int, number: int) -> None:
    """A rank gets a signal while the others wait in what does not fail when it is lost."""
    os.dup2(os.open(run.parent / f"{run.name}-{ranks.rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    watch_room.GRACE = BEAT
    with watched(ranks, lambda: "step 5"):
        if ranks.rank == victim:
            os.kill(os.getpid(), number)
        threading.Event().wait()


def killed_elsewhere_of_two_by_two(ranks: Ranks, run: Path) -> None:
    lost_elsewhere(ranks, run, 2, signal.SIGKILL)


def main_killed_elsewhere_of_two_by_two(ranks: Ranks, run: Path) -> None:
    lost_elsewhere(ranks, run, 0, signal.SIGKILL)


def hung_elsewhere(ranks: Ranks, run: Path) -> None:
    lost_elsewhere(ranks, run, 1, signal.SIGSTOP)


def failed_elsewhere(ranks: Ranks, run: Path) -> None:
    """Rank 1 leaves with an error of its own, and its process lives on."""
    os.dup2(os.open(run.parent / f"{run.name}-{ranks.rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    watch_room.GRACE = BEAT
    try:
        with watched(ranks, lambda: "step 5"):
            if ranks.rank == 1:
                raise RunError("a bad row")
            threading.Event().wait()
    except RunError:
        until = time.monotonic() + HUNG
        while not (run.parent / f"{run.name}-0.txt").read_text() and time.monotonic() < until:
            time.sleep(BEAT)
        raise


def busy_and_early_of_two_by_two(ranks: Ranks, run: Path) -> None:
    """All are busy for longer than the timeout, then each leaves long before the next one does."""
    watch_room.GRACE = BEAT
    with watched(ranks, lambda: "step 5"):
        time.sleep(TIMEOUT * (1.2 + 0.2 * ((ranks.rank + 1) % ranks.world)))


def left_by_torchrun(ranks: Ranks, run: Path) -> None:
    """The launcher is killed in step 5, so that the ranks have another parent."""
    os.environ["TORCHELASTIC_RUN_ID"], watch_room.BEAT = "none", BEAT

    def leave(step: int) -> None:
        if step == 5:
            os.getppid = lambda: 1
            time.sleep(4 * BEAT)

    with watched(ranks, lambda: "step 5"):
        toy_run(ranks, run, leave)


def work_worth_its_end(ranks: Ranks, run: Path) -> None:
    """Rank 1 is killed while it waits for rank 0, which goes on for much longer than the seconds of grace."""
    watch_room.GRACE = BEAT
    after(ranks, BEAT, signal.SIGKILL)
    with watched(ranks, lambda: "step 5") as ranks, ranks.main_first("saving step 5"):
        until = time.monotonic() + HUNG
        while not ranks.watch.loss and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(8 * BEAT)
        (run.parent / f"{run.name}-piece-0").touch()


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        # those that wait longest begin first
        *(long_measuring, busy_and_early_of_two_by_two, long_work, hung, hung_measuring, hung_elsewhere),
        meshes.hung_of_two_by_two,
        *(killed, main_killed, killed_while_saving, main_killed_while_saving, killed_in_backward),
        main_killed_while_meeting,
        *(told_to_stop, failed_work, failed_measuring, killed_measuring, killed_while_waiting),
        *(left_by_torchrun, told_to_stop_measuring, bad_row, bad_row_on_one_rank),
        *(killed_elsewhere_of_two_by_two, main_killed_elsewhere_of_two_by_two, failed_elsewhere, work_worth_its_end),
        *(meshes.killed_of_two_by_two, meshes.poisoned_of_one_by_two),
    )
}
TIMED = (
    *(long_measuring, long_work, hung, hung_measuring, hung_elsewhere, meshes.hung_of_two_by_two),
    busy_and_early_of_two_by_two,
)


def as_rank(rank: int, world: int, port: int, scenario: Callable[[Ranks, Path], None], run: Path) -> None:
    """Be one rank of a scenario and end the process as the command line would."""
    os.environ |= rank_variables(rank, world, port)
    words, code = "finished", 0
    try:
        room.BEAT = BEAT
        watch_room.GRACE = HUNG  # what it is not about must not depend on it
        if scenario is main_killed_while_meeting:
            die_while_meeting(rank)
        ranks = from_accelerate(timeout=TIMEOUT if scenario in TIMED else HUNG)
        scenario(ranks, run)
        ranks.close()
    except (RunError, DataError) as error:
        words, code = str(error), 1
    except Stopped as stopped:
        words, code = str(stopped), stopped.exit_code
    (run.parent / f"{run.name}-{rank}.txt").write_text(words)
    os._exit(code)


def outcome(name: str, directory: Path) -> dict[str, Any]:
    """Run a scenario: exit codes (negative: the signal), last words of all ranks, seconds, checkpoints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run, began, codes = directory / name, time.perf_counter(), {}
    children, world = {}, 4 if name.endswith("two_by_two") else 2
    for rank in range(world):
        child = os.fork()
        if not child:
            as_rank(rank, world, port, SCENARIOS[name], run)
        children[child] = rank
    while children:
        child, status = os.waitpid(-1, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            stopped = child
            continue
        codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        if len(children) == 1 and name.startswith("hung"):
            os.kill(stopped, signal.SIGKILL)
    words = [path.read_text() if (path := directory / f"{name}-{rank}.txt").exists() else "" for rank in range(world)]
    pieces = len(list(directory.glob(f"{name}-piece-*")))
    seconds = round(time.perf_counter() - began, 1)
    return {
        "name": name,
        "codes": [codes[rank] for rank in range(world)],
        "words": words,
        "seconds": seconds,
        "pieces": pieces,
        "saved": list(steps_saved(run)),
    }


def everything(directory: Path) -> None:
    """Run all scenarios and write the outcome of each to `directory`.

    They mostly wait, so several run at a time, each watched by a process of its own.
    """
    meshes.make_inputs(directory)
    running = 0
    for name in SCENARIOS:
        if running == AT_A_TIME:
            os.wait()
            running -= 1
        if not os.fork():
            found = outcome(name, directory)
            (directory / f"{name}.json").write_text(json.dumps(found))
            os._exit(0)
        running += 1
    while running:
        os.wait()
        running -= 1
