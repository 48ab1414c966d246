"""CUDA graphs: work on a GPU is captured once, and then launched whole instead of operation by operation.

Captured work runs again exactly as it was: on the same memory, with the same numbers of the host. So it reads and
writes buffers that stay where they are, asks for no value on the host, and what changes stands in those buffers.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from blockdiff.models.model import BlockDiffusionModel
from blockdiff.parallel.tensor_vocabulary import SharedRows
from blockdiff.tensor_pieces import is_spread

MOST_GRAPHS = 64  # kept at once; they share the memory of what they compute, and each takes some of its own

Work = Callable[[], object]


class BrokenCapture(Exception):
    """A capture that could not be ended: the stream and the memory that captured serve for nothing any more."""


class Capture(Protocol):
    """The way in which work is captured on some device."""

    def warm_up(self, work: Work) -> None:
        """Run work the way it runs before it is captured."""

    def capture(self, work: Work) -> Work:
        """Record work without running it; returns the function that runs it."""


class CudaCapture:
    """Work on a CUDA device as CUDA graphs, whose memory is one pool: none runs while another does."""

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def warm_up(self, work: Work) -> None:
        """Run work on the stream that captures, so that what a first run sets up there is set up."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                work()
            current.wait_stream(self._stream)

    def capture(self, work: Work) -> Work:
        """Capture work as a graph and return its replay.

        torch raises RuntimeError for work that cannot be captured; BrokenCapture says that the capture could not even
        be ended, as after an operation that invalidates it.
        """
        graph = torch.cuda.CUDAGraph()
        # Other threads may do what is forbidden while this one captures.
        how = dict(pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(self._stream):
                torch.cuda.current_blas_handle()  # each thread has its own, and none can be made while it captures
            refusal: RuntimeError | None = None
            try:
                with torch.cuda.graph(graph, **how):  # type: ignore[arg-type]
                    try:
                        work()
                    except RuntimeError as error:
                        refusal = error
            except RuntimeError as error:
                raise BrokenCapture(str(refusal or error)) from error
            finally:
                torch.cuda.set_stream(current)  # torch leaves the stream that captures where a capture fails at its end
        if refusal is not None:
            raise refusal
        return graph.replay


def step_capture(model: BlockDiffusionModel) -> Capture | None:
    """The way in which steps of a model can be captured; None off CUDA, and where a step does more than launch.

    That is where weights are gathered within it, where layers keep what they select in the first one, and where ops run
    in torch. What the ranks of tensor parallelism exchange by NCCL is captured with the rest: they make the same calls.
    """
    if model.device.type != "cuda" or any(kind.keeps_selection for kind in model.kinds.values()):
        return None
    if not model.kernels.is_capturable:
        return None
    if any(map(is_spread, model.parameters())) and not _exchanges_alone(model):
        return None
    return CudaCapture(model.device)


def _exchanges_alone(model: BlockDiffusionModel) -> bool:
    """True where all that the ranks of a split model do in a step is to exchange tensors on the device."""
    split = model.vocabulary.split
    if not isinstance(split, SharedRows) or model.gathered_on is not None:
        return False
    return bool(dist.get_backend(split.group) == "nccl")


class Graphs:
    """Work by a key that says all that differs from one graph to another: run once, then captured, then replayed.

    Those used last are kept, `most` of them. What cannot be captured runs as it is, with one warning.

    capture: the way in which work is captured (None: it is not, and runs as it is); buckets: the counts that rows of
    captured work are padded to, so that there are few graphs.
    """

    def __init__(self, capture: Capture | None, buckets: Sequence[int] = (), most: int = MOST_GRAPHS):
        self._capture, self._most = capture, most
        self.buckets = buckets if self.captures else ()
        self._replays: OrderedDict[Hashable, Work | None] = OrderedDict()  # None: it ran once
        self._is_refused = False
        self._memory: Hashable = None  # where the weights lay when work was captured

    @property
    def captures(self) -> bool:
        """True where work is captured."""
        return self._capture is not None

    def padding(self, rows: int) -> int:
        """The number of rows by which so many are padded; 0 beyond the last bucket."""
        return next((bucket for bucket in self.buckets if bucket >= rows), rows) - rows

    @property
    def keys(self) -> Collection[Any]:
        """The keys of work that has run or was captured."""
        return self._replays.keys()

    def run(self, key: Hashable, work: Work) -> None:
        """Run work, or replay what was captured under this key."""
        if self._capture is None:
            work()
            return
        if self._is_refused or key not in self._replays:
            self._capture.warm_up(work)
            self._replays[key] = None
        elif (replay := self._replays[key] or self._captured(self._capture, work)) is None:
            self._capture.warm_up(work)
        else:
            self._replays[key] = replay
            replay()
        self._replays.move_to_end(key)
        while len(self._replays) > self._most:
            self._replays.popitem(last=False)

    def follow(self, memory: Hashable) -> None:
        """Forget all that ran or was captured where the weights lie elsewhere now: it read them where they were."""
        if memory is not self._memory and memory != self._memory:
            self._replays.clear()
            self._memory = memory

    def _captured(self, capture: Capture, work: Work) -> Work | None:
        try:
            return capture.capture(work)
        except RuntimeError as error:
            self._is_refused = True
            warn_of_no_graphs(error)
            return None


def row_counts(most: int) -> list[int]:
    """The counts that rows are padded to, up to so many: each has a graph, and padding costs a fourth at most."""
    return [*range(1, 4), *range(4, 32, 4), *range(32, most + 16, 16)]


def warn_of_no_graphs(error: Exception) -> None:
    """Warn that steps are not captured any more, and why."""
    reason = str(error).strip().partition("\n")[0]
    warnings.warn(f"denoising steps run without CUDA graphs: {reason}; graphs=False says so", stacklevel=3)


class HostCopy:
    """A copy of a device's buffer on the host: it is sent for, and the host waits for it when it reads."""

    def __init__(self, buffer: Tensor):
        self._buffer = buffer
        self._host = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=buffer.is_cuda)
        self._has_come = torch.cuda.Event() if buffer.is_cuda else None

    def send(self, count: int) -> None:
        """Send the first `count` rows once the device has done what it was asked for."""
        self._host[:count].copy_(self._buffer[:count], non_blocking=True)
        if self._has_come is not None:
            self._has_come.record(torch.cuda.current_stream(self._buffer.device))

    def read(self, count: int) -> Tensor:
        """The first `count` rows that were sent, on the host."""
        if self._has_come is not None:
            self._has_come.synchronize()
        return self._host[:count]
