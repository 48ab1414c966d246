"""Where this process stands among its ranks, and what they do together. The only place that knows DDP.

Accelerate starts the processes and names the device; the wrapping is ours. One process is a world of one.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from inspect import signature
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from blockdiff.errors import RunError
from blockdiff.parallel.signals import ASKED, Interrupted

BEAT = 2.0  # seconds between two signs of life of a rank that the others wait for
_LOST = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|socket|gloo|nccl", re.IGNORECASE)
_HUNG = re.compile(r"timed? ?out", re.IGNORECASE)
_DONE, _FAILED, _INTERRUPTED = 1, 2, 3


@dataclass(frozen=True)
class Ranks:
    """One rank of `world` processes that train one model on one global batch.

    timeout: seconds after which a rank that does not answer counts as hung. beats: a gloo group of its own, over which
    the ranks wait for work that may take longer.
    """

    device: torch.device
    rank: int = 0
    world: int = 1
    timeout: float = 600.0
    beats: Any = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the terminal."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a small tensor [*] over all ranks, [*] on this rank's device."""
        values = values.to(self.device, non_blocking=True)
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value` (plain Python data), by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.beats)
        return values

    def agree(self, value: Any) -> Any:
        """Rank 0's `value` (plain Python data), on all ranks."""
        return self.gather(value)[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.world > 1:
            dist.barrier()

    @contextmanager
    def main_first(self, doing: str = "the main process's work") -> Iterator[None]:
        """Rank 0 runs the body while the others wait, then they run it: reading data into a cache, writing files.

        It may take longer than the timeout: rank 0 gives signs of life meanwhile, and only their absence counts.
        Raises RunError on the ranks that wait when rank 0 fails or is lost, and on rank 0 when another one is lost.
        """
        if self.world == 1:
            yield
            return
        if not self.is_main:
            with self.guarded(doing):
                while not (state := self._beat(0)):
                    pass
            if state == _FAILED:
                raise RunError(f"the main process failed during {doing}; its own message says why")
            yield
            return
        is_over, errors = Event(), []

        def beat() -> None:
            try:
                while not is_over.wait(min(BEAT, self.timeout / 4)):
                    self._beat(0)
            except RuntimeError as error:
                errors.append(error)

        thread = Thread(target=beat, daemon=True)
        thread.start()
        state = _FAILED
        try:
            yield
            state = _DONE
        finally:
            is_over.set()
            thread.join()
            with self.guarded(doing) if state == _DONE else suppress(RuntimeError):
                if errors:
                    raise errors[0]
                self._beat(state)

    @contextmanager
    def at_own_pace(self, doing: str) -> Iterator[Callable[[], None]]:
        """Surrounds work that every rank does by itself, without the others: measuring, sampling.

        It may take any rank longer than the timeout: all give signs of life until the last one is done, and only
        their absence counts. Gives `look`, to be called between pieces of the work. Raises Interrupted on all ranks
        when one was asked to stop before the last was done (`signals.interruptible`), RunError on the others when one
        fails, and what gloo raises when one is lost, for `guarded`.
        """
        pace = _Pace(self, ASKED.get(), doing)
        pace.begin()
        state = _FAILED
        try:
            yield pace.look
            state = _DONE
        except Interrupted:
            state = _INTERRUPTED
        finally:
            pace.end(state)
        pace.refuse_failure()
        if pace.count[_INTERRUPTED] or state == _INTERRUPTED:
            raise Interrupted

    def _beat(self, state: int) -> int:
        """What rank 0 has to say: 0 = goes on, else it is done. All ranks call it together."""
        said = torch.tensor(state)
        dist.all_reduce(said, group=self.beats)
        return int(said)

    @contextmanager
    def guarded(self, doing: str) -> Iterator[None]:
        """Makes one RunError of the errors inside that mean that another rank is gone or does not answer."""
        try:
            yield
        except RuntimeError as error:
            if self.world == 1 or not (_LOST.search(str(error)) or isinstance(error, dist.DistError)):
                raise
            what = f"hung for {self.timeout:g} s" if _HUNG.search(str(error)) else "was lost"
            raise RunError(f"rank {self.rank}: another rank {what} during {doing}; go on with --resume") from error

    def wrap(self, objective: nn.Module) -> nn.Module:
        """What the loop calls: the objective itself, or with several ranks DDP, which averages gradients."""
        if self.world == 1:
            return objective
        # Buffers are constants; the switch that leaves them alone was renamed in torch 2.13.
        known = signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        leave: dict[str, Any] = {name: False}
        return DistributedDataParallel(_TouchEveryParameter(objective), gradient_as_bucket_view=True, **leave)

    def synchronise(self, module: nn.Module, now: bool) -> AbstractContextManager[Any]:
        """Surrounds forward and backward of a micro-batch; ranks exchange gradients only if `now`."""
        if isinstance(module, DistributedDataParallel) and not now:
            return module.no_sync()
        return nullcontext()

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


class _Pace:
    """What the ranks tell each other while each works at its own pace, from a thread beside the work."""

    def __init__(self, ranks: Ranks, is_asked: Callable[[], int], doing: str) -> None:
        self.ranks, self.is_asked, self.doing = ranks, is_asked, doing
        self.state = 0
        self.count = [0, 0, 0, 0, 0]  # ranks in each state, and those asked to stop
        self._is_over = Event()
        self._errors: list[Exception] = []
        self._thread = Thread(target=self._run, daemon=True) if ranks.world > 1 else None

    def begin(self) -> None:
        """Give the first sign of life."""
        if self._thread:
            self._thread.start()

    def look(self) -> None:
        """Raise Interrupted if a rank was asked to stop, or the error that says that one has failed or is lost."""
        if self._errors:
            raise self._errors[0]
        self.refuse_failure()
        if self.is_asked() or self.count[-1]:
            raise Interrupted

    def refuse_failure(self) -> None:
        """Raise RunError if the work of another rank has failed."""
        if self.count[_FAILED]:
            raise RunError(f"another rank failed during {self.doing}; its own message says why")

    def end(self, state: int) -> None:
        """Say how this rank's work ended and wait for the others."""
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
                said = torch.zeros(len(self.count), dtype=torch.int64)
                said[self.state] = 1
                said[-1] = bool(self.is_asked())
                dist.all_reduce(said, group=self.ranks.beats)
                self.count = said.tolist()
        except Exception as error:  # the work's own thread raises it
            self._errors.append(error)


def from_accelerate(cpu: bool = False, timeout: float = 600.0) -> Ranks:
    """Join the processes that `accelerate launch` or torchrun started; alone, a world of one.

    Without CUDA, or with `cpu`, they run on the CPU and talk through gloo (MPS has no float64, in which losses are
    summed). timeout: seconds that a rank waits for the others. Raises RunError when processes were started that would
    not know of each other, or when not all of them come.
    """
    from accelerate import PartialState

    asked_for_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    started = int(os.environ.get("WORLD_SIZE", "1"))
    on_cpu, limit = cpu or asked_for_cpu or not torch.cuda.is_available(), timedelta(seconds=timeout)
    try:
        state = PartialState(cpu=on_cpu, **({"timeout": limit} if started > 1 else {}))
    except dist.DistError:
        raise RunError(f"not all of the {started} processes joined within {timeout:g} s; start them again") from None
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
    world = state.num_processes
    beats = dist.new_group(backend="gloo", timeout=limit) if world > 1 else None
    return Ranks(device, state.process_index, world, timeout, beats)


def autocast(device: torch.device, precision: str | None) -> AbstractContextManager[Any]:
    """Surrounds a forward that computes in `precision`, "bfloat16" or None for the model's own."""
    if precision is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


class _Touch(torch.autograd.Function):
    """Identity on a loss that puts parameters into its graph without giving them a gradient."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return (gradients[0], *[None] * ctx.count)


class _TouchEveryParameter(nn.Module):
    """DDP waits for every parameter in every backward; a rank without a canvas or a coin leaves some unused.

    Touching them all keeps it from waiting forever, and costs neither a graph walk nor a zero gradient.
    """

    def __init__(self, objective: nn.Module) -> None:
        super().__init__()
        self.objective = objective

    def _trainable(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self.objective.parameters() if parameter.requires_grad)

    def forward(self, batch: Any) -> Any:
        losses = self.objective(batch)
        return losses._replace(canvas_sum=_Touch.apply(losses.canvas_sum, *self._trainable()))
