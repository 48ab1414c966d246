"""`Ranks`: the processes of a run as seen from one of them, how they agree, and how they wait for one another.

Accelerate starts the processes and names the device. One process is a world of one.
"""

from __future__ import annotations

import atexit
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockdiff.devices import resolve_device
from blockdiff.errors import RESUME, RunError
from blockdiff.parallel.signals import Interrupted
from blockdiff.rank_json import from_all

BEAT = 2.0  # seconds between two signs of life of a rank that the others wait for
_LOST = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|socket|gloo|nccl", re.IGNORECASE)
_HUNG = re.compile(r"timed? ?out", re.IGNORECASE)
_DONE, _FAILED, _INTERRUPTED = 1, 2, 3
# Groups that this process has left, kept until it ends. If Python frees a group, other threads can run while the group
# waits for its own threads. If DDP's reducer freed it, they could not, and the group's threads may be waiting for
# Python: a rank whose work failed because another was lost would then never end.
_LEFT: list[Any] = []


@dataclass(frozen=True)
class Ranks:
    """The `world` processes that train one model on one global batch, as seen from rank `rank`.

    timeout: seconds after which a rank that does not answer counts as hung. beats: a separate gloo group, over which
    ranks wait for work that may take longer. is_stopping: the number of the signal that asked this rank to stop, 0 if
    none. local_rank: index among the ranks of its node. ranks_per_row: number of neighbouring ranks with the same rows,
    because they run every layer together (tensor parallelism).
    """

    device: torch.device
    rank: int = 0
    world: int = 1
    timeout: float = 600.0
    beats: Any = None
    is_stopping: Callable[[], int] = lambda: 0
    local_rank: int = 0
    ranks_per_row: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and to the terminal."""
        return self.rank == 0

    @property
    def row_rank(self) -> int:
        """The index of this rank, or of its group of ranks with the same rows."""
        return self.rank // self.ranks_per_row

    @property
    def row_world(self) -> int:
        """The number of ranks, or of groups of ranks with the same rows."""
        return self.world // self.ranks_per_row

    def sum_of_rows(self, values: Tensor) -> Tensor:
        """Sum a small tensor [*] over all rows; each rank passes the value of its own rows."""
        return self.sum(values) / self.ranks_per_row

    def sum(self, values: Tensor) -> Tensor:
        """Sum a small tensor [*] over all ranks; the result is on this rank's device."""
        values = values.to(self.device, non_blocking=True)
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, a JSON value (see `rank_json`), by rank."""
        return [value] if self.world == 1 else from_all(value, self.beats)

    def any(self, *answers: bool) -> list[bool]:
        """Return for each of several booleans whether it is True on any rank; all ranks must call it.

        It uses the group `beats`, so it waits for no device.
        """
        if self.world == 1:
            return list(answers)
        total = torch.tensor(answers, dtype=torch.int32)
        dist.all_reduce(total, dist.ReduceOp.MAX, group=self.beats)
        return [each > 0 for each in total.tolist()]

    def gather_rows(self, value: Any) -> list[Any]:
        """Return the `value`, a JSON value, of one rank for each `row_rank`, in this order."""
        return self.gather(value)[:: self.ranks_per_row]

    def agree(self, value: Any) -> Any:
        """Return rank 0's `value`, a JSON value, on all ranks."""
        return self.gather(value)[0]

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        if self.world > 1:
            dist.barrier()

    @contextmanager
    def main_first(self, doing: str = "the main process's work") -> Iterator[None]:
        """Run the body, such as filling a cache or writing files, on rank 0 first, then on the other ranks.

        It may take longer than the timeout, as in `at_own_pace`. Raises RunError on the waiting ranks if rank 0 fails
        or is lost, and on rank 0 if another rank is lost. doing: a name of the work for messages.
        """
        if self.is_main:
            with self.guarded(doing), self.at_own_pace(doing):
                yield
        else:
            self._wait_for(doing, turns=1)
            yield

    def from_main(self, doing: str, work: Callable[[], Any]) -> Any:
        """Run `work` on rank 0 and return its result, a JSON value, on all ranks; otherwise as `main_first`."""
        result = None
        with self.main_first(doing):
            if self.is_main:
                result = work()
        return self.agree(result)

    @contextmanager
    def node_first(self, doing: str) -> Iterator[None]:
        """Run the body on rank 0, then on the first rank of every other node, then on the others.

        For filling a cache, whether nodes share its disk or have their own. Otherwise as `main_first`.
        """
        turn = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        if turn == 2:
            self._wait_for(doing, turns=2)
            yield
            return
        self._wait_for(doing, turns=turn)
        with self.guarded(doing), self.at_own_pace(doing):
            yield
        self._wait_for(doing, turns=1 - turn)

    def _wait_for(self, doing: str, turns: int) -> None:
        """Wait `turns` times while others work at their own pace."""
        for _ in range(turns):
            with self.guarded(doing), self.at_own_pace(doing):
                pass

    @contextmanager
    def at_own_pace(self, doing: str) -> Iterator[Callable[[], None]]:
        """Run work that every rank does without the others, such as measuring or sampling.

        It may take longer than the timeout: all ranks send signs of life until the last one is done. Yields `look`,
        which the work must call between its pieces. Raises Interrupted on all ranks if work was abandoned because a
        rank was asked to stop, RunError on the others if a rank fails, and gloo's error if a rank is lost, for
        `guarded`.
        """
        heartbeat = _Heartbeat(self, doing)
        state = _FAILED
        try:
            yield heartbeat.look
            state = _DONE
        except Interrupted:
            state = _INTERRUPTED
        finally:
            heartbeat.end(state)
        heartbeat.refuse_failure()
        if heartbeat.count[_INTERRUPTED] or state == _INTERRUPTED:
            raise Interrupted

    @contextmanager
    def guarded(self, doing: str | Callable[[], str]) -> Iterator[None]:
        """Raise RunError for errors inside the `with` block that mean that another rank is lost or hung.

        doing: a name of the work for the message.
        """
        try:
            yield
        except RuntimeError as error:
            if self.world == 1 or not (_LOST.search(str(error)) or isinstance(error, dist.DistError)):
                raise
            what = f"hung for {self.timeout:g} s" if _HUNG.search(str(error)) else "was lost"
            work = doing if isinstance(doing, str) else doing()
            raise RunError(f"rank {self.rank}: another rank {what} during {work}; {RESUME}") from error

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if self.world > 1 and dist.is_initialized():
            _LEFT.append(dist.group.WORLD)
            dist.destroy_process_group()


class _Heartbeat:
    """The ranks' signs of life while each works by itself: a second thread sends the others its state."""

    def __init__(self, ranks: Ranks, doing: str) -> None:
        self.ranks, self.doing = ranks, doing
        self.state = 0
        self.count = [0, 0, 0, 0, 0]  # ranks in each state, and at the end those that were asked to stop
        self._is_over = Event()
        self._errors: list[Exception] = []
        self._thread = Thread(target=self._run, daemon=True) if ranks.world > 1 else None
        if self._thread:
            self._thread.start()

    def look(self) -> None:
        """Raise Interrupted if a rank was asked to stop, or an error if one has failed or is lost."""
        if self._errors:
            raise self._errors[0]
        self.refuse_failure()
        if self.ranks.is_stopping() or self.count[-1]:
            raise Interrupted

    def refuse_failure(self) -> None:
        """Raise RunError if the work of another rank has failed."""
        if self.count[_FAILED]:
            raise RunError(f"another rank failed during {self.doing}; its message says why")

    def end(self, state: int) -> None:
        """Send how this rank's work ended and wait for the others."""
        self.state = state
        if self._thread:
            self._is_over.set()
            self._thread.join()
        if self._errors and state != _FAILED:
            raise self._errors[0]

    def _run(self) -> None:
        # All ranks beat together, so one that is done waits within a beat and learns at once who else is.
        try:
            while self.count[_FAILED] == 0 and self.count[_DONE] + self.count[_INTERRUPTED] < self.ranks.world:
                self._is_over.wait(min(BEAT, self.ranks.timeout / 4))
                states = torch.zeros(len(self.count), dtype=torch.int64)
                states[self.state] = 1
                states[-1] = bool(self.ranks.is_stopping())
                dist.all_reduce(states, group=self.ranks.beats)
                self.count = states.tolist()
        except Exception as error:  # the work's own thread raises it
            self._errors.append(error)


@contextmanager
def _stacks_held_back() -> Iterator[None]:
    """Hold back stderr, where torch prints C++ stacks of a failed start; drop it after an error."""
    with tempfile.TemporaryFile() as held:
        stderr = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.truncate(0)
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            os.write(2, held.read())


def from_accelerate(timeout: float = 600.0) -> Ranks:
    """Join the processes that `accelerate launch` or torchrun started; alone, a world of one.

    Without CUDA, or with ACCELERATE_USE_CPU, they run on the CPU and talk through gloo (MPS has no float64, in which
    losses are summed). timeout: seconds that a rank waits for the others. They stay together until the program ends or
    `close`, so one program may train several times. Raises RunError if not all started processes join, if they would
    not know of each other, and if they have parted after an error.
    """
    from accelerate import PartialState

    asked_for_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    on_cpu, limit = asked_for_cpu or resolve_device("auto").type == "cpu", timedelta(seconds=timeout)
    try:
        with _stacks_held_back() if started > 1 else nullcontext():
            state = PartialState(cpu=on_cpu, **({"timeout": limit} if started > 1 else {}))
    except dist.DistError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise RunError(f"the {started} processes did not all join ({reason}); start them again") from None
    if state.num_processes > 1 and not dist.is_initialized():
        raise RunError("the processes of this program have parted after an error; start the program again")
    if started != state.num_processes:
        raise RunError(f"{started} processes started, {state.num_processes} joined; check the launcher")
    if started == 1 and "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ:
        # accelerate launch --cpu --num_processes N starts one process and says nothing.
        warnings.warn(
            "accelerate launch started one process although several were asked for; "
            "on the CPU launch with --multi_gpu --num_processes N (it needs no GPU) or with torchrun",
            stacklevel=2,
        )
    device = torch.device("cpu") if state.device.type == "cpu" else state.device
    ranks = Ranks(device, state.process_index, state.num_processes, timeout, local_rank=state.local_process_index)
    if ranks.world > 1:
        atexit.register(ranks.close)
        with ranks.guarded("the start"), _stacks_held_back():
            ranks = replace(ranks, beats=dist.new_group(backend="gloo", timeout=limit))
    return ranks
