"""Gather the tensors of a sharded model one after the other on all ranks, while rank 0 writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from blockdiff.checkpoint.stream import TensorSource
from blockdiff.errors import CheckpointError
from blockdiff.rank_json import from_all
from blockdiff.tensor_pieces import gathered, is_spread


class Gathering:
    """The order of gathering, in which all ranks take part while one of them writes.

    All ranks gather the tensors in `order`. A rank that does not write, or whose writing failed, gathers the rest and
    drops it, so that no other rank waits forever. If no tensor is sharded, every process writes for itself.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        spread: Any = next(filter(is_spread, tensors), None)
        self.is_sharded = spread is not None
        self._device = spread.device_mesh.device_type if self.is_sharded else "cpu"  # for exchanging errors
        self.is_writer = not self.is_sharded or dist.get_rank() == 0
        self.order: Sequence[TensorSource] = ()
        self._spread: set[int] = set()
        self._read: set[int] = set()

    def source(self, tensor: Tensor, dtype: torch.dtype | None = None) -> TensorSource:
        """Return the source of a tensor, cast to `dtype`; a sharded tensor is gathered when it is read."""
        if not is_spread(tensor):
            return TensorSource.of(tensor, dtype)
        target = dtype or tensor.dtype

        def read() -> Tensor:
            self._read.add(id(gathered_source))
            whole = gathered(tensor)
            return whole.to("cpu", target) if self.is_writer else whole

        gathered_source = TensorSource(tuple(tensor.shape), target, read)
        self._spread.add(id(gathered_source))
        return gathered_source

    def run(self, write: Callable[[], None]) -> None:
        """Call `write` on the rank that writes, and gather with the others. An error there is raised on all ranks."""
        if not self.is_sharded:
            write()
            return
        problem: Exception | None = None
        try:
            if self.is_writer:
                write()
        except Exception as error:
            problem = error
        for source in self.order:
            if id(source) in self._spread and id(source) not in self._read:
                source.read()
        problems = from_all(None if problem is None else str(problem), device=self._device)
        if problem is not None:
            raise problem
        if problems[0] is not None:
            raise CheckpointError(problems[0])
