"""CUDA graphs: work on a GPU is captured once and then replayed with one launch instead of one per operation.

A replay uses the same memory and the same host values as the capture. Captured work therefore reads and writes fixed
buffers, reads no value on the host, and gets its changing inputs from those buffers.
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

MOST_GRAPHS = 64  # kept at once; they share memory for their results, and each needs some more

Work = Callable[[], object]


class BrokenCapture(Exception):
    """A capture that could not be ended; its stream and its memory pool are no longer usable."""


class Capture(Protocol):
    """A way to capture work on a device."""

    def warm_up(self, work: Work) -> None:
        """Run work in the same way as before a capture."""

    def capture(self, work: Work) -> Work:
        """Record work without running it, and return a function that replays it."""


class CudaCapture:
    """Captures work as CUDA graphs that share one memory pool, so only one may run at a time."""

    def __init__(self, device: torch.device):
        self.device = device
        with torch.cuda.device(device):
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()

    def warm_up(self, work: Work) -> None:
        """Run work on the capturing stream, so that one-time initialisations happen there and not in a capture."""
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                work()
            current.wait_stream(self._stream)

    def capture(self, work: Work) -> Work:
        """Capture work as a graph and return its replay.

        torch raises RuntimeError for work that cannot be captured. BrokenCapture is raised if the capture could not
        even be ended, as after an operation that invalidates it.
        """
        graph = torch.cuda.CUDAGraph()
        # Other threads may make calls that a capture forbids.
        options = dict(pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream()
            with torch.cuda.stream(self._stream):
                torch.cuda.current_blas_handle()  # each thread has its own, and none can be made while it captures
            refusal: RuntimeError | None = None
            try:
                with torch.cuda.graph(graph, **options):  # type: ignore[arg-type]
                    try:
                        work()
                    except RuntimeError as error:
                        refusal = error
            except RuntimeError as error:
                raise BrokenCapture(str(refusal or error)) from error
            finally:
                torch.cuda.set_stream(current)  # if a capture fails at its end, torch stays on the capturing stream
        if refusal is not None:
            raise refusal
        return graph.replay


def step_capture(model: BlockDiffusionModel) -> Capture | None:
    """Return a capture for a model's steps; None off CUDA, or if a step does more than launch kernels.

    A step does more if weights are gathered within it, if layers keep a selection from the first step, or if ops run in
    torch. The NCCL collectives of tensor parallelism are captured too: all ranks make the same calls.
    """
    if model.device.type != "cuda" or any(kind.keeps_selection for kind in model.kinds.values()):
        return None
    if not model.kernels.is_capturable:
        return None
    if any(map(is_spread, model.parameters())) and not _exchanges_alone(model):
        return None
    return CudaCapture(model.device)


def _exchanges_alone(model: BlockDiffusionModel) -> bool:
    """True if the ranks of a split model only exchange tensors on the device by NCCL during a step."""
    split = model.vocabulary.split
    if not isinstance(split, SharedRows) or model.gathered_on is not None:
        return False
    return bool(dist.get_backend(split.group) == "nccl")


class Graphs:
    """A cache of captured work, by key. Work runs at its first call, is captured at its second, and then replayed.

    The key must contain everything that differs between graphs. The `most` graphs used last are kept. Work that cannot
    be captured runs normally, after one warning.

    capture: how work is captured (None: work always runs normally); buckets: the row counts to which captured work is
    padded, so that few graphs are needed.
    """

    def __init__(self, capture: Capture | None, buckets: Sequence[int] = (), most: int = MOST_GRAPHS):
        self._capture, self._most = capture, most
        self.buckets = buckets if self.captures else ()
        self._replays: OrderedDict[Hashable, Work | None] = OrderedDict()  # None: it ran once
        self._is_refused = False
        self._memory: Hashable = None  # the addresses of the weights when work was captured

    @property
    def captures(self) -> bool:
        """True if work is captured."""
        return self._capture is not None

    def padding(self, rows: int) -> int:
        """The number of rows that pad `rows` to the next bucket; 0 beyond the last bucket."""
        return next((bucket for bucket in self.buckets if bucket >= rows), rows) - rows

    @property
    def keys(self) -> Collection[Any]:
        """The keys of all work that has run or been captured."""
        return self._replays.keys()

    def run(self, key: Hashable, work: Work) -> None:
        """Run work, or replay the graph that was captured under this key."""
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
        """Forget all captured work if `memory`, the addresses of the weights, has changed: graphs read the old ones."""
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
    """Return the row counts to pad to, up to at least `most`; each needs a graph, so large ones are further apart."""
    return [*range(1, 4), *range(4, 32, 4), *range(32, most + 16, 16)]


def warn_of_no_graphs(error: Exception) -> None:
    """Warn that steps are no longer captured, and why."""
    reason = str(error).strip().partition("\n")[0]
    warnings.warn(f"denoising steps run without CUDA graphs: {reason}; graphs=False says so", stacklevel=3)


class HostCopy:
    """An asynchronous copy of a device buffer to the host; `read` waits until it has arrived."""

    def __init__(self, buffer: Tensor):
        self._buffer = buffer
        self._host = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=buffer.is_cuda)
        self._has_come = torch.cuda.Event() if buffer.is_cuda else None

    def send(self, count: int) -> None:
        """Start the copy of the first `count` rows; it runs after the work that the device already has."""
        self._host[:count].copy_(self._buffer[:count], non_blocking=True)
        if self._has_come is not None:
            self._has_come.record(torch.cuda.current_stream(self._buffer.device))

    def read(self, count: int) -> Tensor:
        """Return the first `count` rows on the host, after waiting for the last `send`."""
        if self._has_come is not None:
            self._has_come.synchronize()
        return self._host[:count]
