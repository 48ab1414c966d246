"""Processes that cost a test no imports: one server process imports what they need and forks each of them.

A target is a function of a module and is handed over by its name, so a process shares nothing with the test. Its
arguments are plain values, other such functions, and mappings of these.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from blockdiff.cli.main import main
from blockdiff.parallel.ranks import Ranks, from_accelerate
from blockdiff.training import export
from tests.support.meeting import meeting

ROOT = Path(__file__).parents[2]
HUNG = 600.0  # seconds after which something has hung, however slow the machine is
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        *("torch._dynamo", "torch.distributed.run", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
        *("accelerate", "datasets", "rich.progress", "rich.live", "IPython.core.interactiveshell", "matplotlib.pyplot"),
        *("transformers.models.gemma4.modeling_gemma4", "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl"),
        *("blockdiff.training.trainer", "blockdiff.sampling", "blockdiff.models.llama"),
        *("blockdiff.models.minimax_m3.model", "tests.support.families", "tests.support.oracle", __name__),
    ]
)


@contextlib.contextmanager
def started(target: Callable[..., None], *arguments: Any, log: Path, **variables: str) -> Iterator[ForkServerProcess]:
    """A process that runs `target(*arguments)` and is killed at the end of the context if it still runs then.

    log: the file its stderr goes to; its stdout goes nowhere. variables: what its environment has beside that of the
    first process.
    """
    with pytest.MonkeyPatch.context() as patch:  # for the server, which starts with the first process
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        # names, so that what their imports say goes to the log, too
        task = _named(target), [_named(argument) for argument in arguments]
        process = SERVER.Process(target=_begin, args=(*task, str(log), variables))
        process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def run(target: Callable[..., None], *arguments: Any, log: Path) -> None:
    """Run `target(*arguments)` in a process of its own; raises AssertionError with what it said when it fails."""
    with started(target, *arguments, log=log) as process:
        finish([process], [log])


def run_ranks(world: int, target: Callable[..., None], directory: Path, *arguments: Any) -> None:
    """Run `target(ranks, directory, *arguments)` in `world` processes; raises AssertionError when one of them fails."""
    with _ranks(world, directory, _join, target, directory, *arguments) as (processes, logs):
        finish(processes, logs)


def in_turn(ranks: Ranks, directory: Path, targets: Mapping[str, Callable[[Ranks, Path], None]]) -> None:
    """A target of `run_ranks` that is several, one after the other, each with the folder of its name."""
    for name, target in targets.items():
        (directory / name).mkdir(exist_ok=True)
        target(ranks, directory / name)


def run_command(world: int, words: Sequence[str], directory: Path) -> list[str]:
    """Run `blockdiff WORDS` in `world` processes, as a launcher starts them; returns what each said on stderr."""
    with _ranks(world, directory, _command, words) as (processes, logs):
        finish(processes, logs)
        return [log.read_text() for log in logs]


def wait_for_ranks(
    world: int, target: Callable[..., None], directory: Path, *arguments: Any, seconds: float = 300
) -> list[int | None]:
    """The same for ranks of which some are killed: wait for all, and return how each ended; None: not at all."""
    with _ranks(world, directory, _join, target, directory, *arguments) as (processes, _):
        for process in processes:
            process.join(seconds)
        return [process.exitcode for process in processes]


@contextlib.contextmanager
def _ranks(
    world: int, directory: Path, target: Callable[..., None], *arguments: Any
) -> Iterator[tuple[list[ForkServerProcess], list[Path]]]:
    logs = [directory / f"rank-{rank}.log" for rank in range(world)]
    with meeting(world) as variables, contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(started(target, *arguments, log=log, **own))
            for log, own in zip(logs, variables, strict=True)
        ]
        yield processes, logs


@dataclass(frozen=True)
class _Named:
    """A function of a module, with some of its arguments."""

    module: str
    name: str
    keywords: dict[str, Any]

    def found(self) -> Callable[..., Any]:
        """The function, imported."""
        return partial(getattr(importlib.import_module(self.module), self.name), **self.keywords)


def _named(value: Any) -> Any:
    """A value whose functions are replaced by their names."""
    if isinstance(value, Mapping):
        return {key: _named(each) for key, each in value.items()}
    if isinstance(value, partial):
        return _Named(value.func.__module__, value.func.__name__, value.keywords)
    return _Named(value.__module__, value.__name__, {}) if isinstance(value, FunctionType) else value


def _found(value: Any) -> Any:
    """A value whose names of functions are replaced by these again."""
    if isinstance(value, Mapping):
        return {key: _found(each) for key, each in value.items()}
    return value.found() if isinstance(value, _Named) else value


def _begin(target: _Named, arguments: Sequence[Any], log: str, variables: dict[str, str]) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ |= variables
    gc.freeze()
    gc.set_threshold(50_000)
    export.draw_curves = lambda *_, **__: None  # type: ignore[assignment]  # which takes longer than a short training
    os.fsync = lambda _: None  # type: ignore[assignment]  # no test cuts the power
    target.found()(*map(_found, arguments))


def _join(target: Callable[..., None], *arguments: Any) -> None:
    ranks = from_accelerate()
    target(ranks, *arguments)
    ranks.close()


def _command(words: Sequence[str]) -> None:
    sys.argv = ["blockdiff", *words]
    main()


def finish(processes: list[ForkServerProcess], logs: list[Path], seconds: float = HUNG) -> None:
    """Wait for the processes, but no longer when one has failed; raises AssertionError with how each ended, and why."""
    until = time.monotonic() + seconds
    while any(process.exitcode is None for process in processes):
        failed = any(process.exitcode for process in processes)
        if failed or time.monotonic() > until:
            break
        multiprocessing.connection.wait([process.sentinel for process in processes if process.exitcode is None], 1)
    codes = [process.exitcode for process in processes]  # before any is killed; None: it still runs
    if any(code != 0 for code in codes):
        raise AssertionError("\n".join(map(_ending, codes, logs)))


def _ending(code: int | None, log: Path) -> str:
    """The end of a process in words, with its log, if it lived long enough to open that."""
    how = "still ran" if code is None else f"ended with {code}"
    return f"{log.stem} {how}: " + (log.read_text() if log.exists() else "it had not opened its log")
