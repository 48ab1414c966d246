"""`--tensor-parallel`: several processes run one command together; only the first prints and writes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from blockdiff.parallel.mesh import Mesh

GRACE = 5.0  # seconds in which the other processes may report their errors after one has failed
_LOOK = 0.1  # seconds between two checks whether processes have ended
_PIPE = "BLOCKDIFF_LAUNCHER"  # environment variable with the file descriptor of a process's pipe to its launcher


def join(count: int, device: str, model: str) -> Mesh | None:
    """Join the `count` processes that run one model together, and return their mesh; None if `count` is 1.

    If no launcher has started the processes, this process launches them and exits with their code. All but the first
    print nothing on stdout from here on. Raises typer.BadParameter if another number of processes was started or this
    machine has fewer cores or GPUs, and RunError if the model cannot be split into `count` equal parts.
    """
    if count == 1:
        return None
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started == 1:
        _refuse(count, device, model)
        sys.exit(launch(count, [sys.executable, "-m", "blockdiff", *sys.argv[1:]]))
    if started != count:
        raise typer.BadParameter(f"{started} processes were started for {count}", param_hint="--tensor-parallel")
    end_with_launcher()
    if device == "cpu":
        os.environ["ACCELERATE_USE_CPU"] = "true"
    from blockdiff.parallel.mesh import Mesh
    from blockdiff.parallel.ranks import from_accelerate

    ranks = replace(from_accelerate(), ranks_per_row=count)
    if not ranks.is_main:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (to the end of the process)
    return Mesh.of(ranks, tensor=count)


def _refuse(count: int, device: str, model: str) -> None:
    """Raise typer.BadParameter if there are fewer than `count` cores or GPUs, RunError if the model does not divide."""
    import torch

    from blockdiff.checkpoint import empty, read_config
    from blockdiff.checkpoint.opening import model_files
    from blockdiff.devices import resolve_device
    from blockdiff.parallel.tensor import refuse_uneven

    is_on_gpu = resolve_device(device).type == "cuda"
    there = torch.cuda.device_count() if is_on_gpu else os.cpu_count() or 1
    if count > there:
        what = "GPU" if is_on_gpu else "core"
        raise typer.BadParameter(
            f"this machine has {there} {what}{'s' * (there != 1)}; a process needs one of its own",
            param_hint="--tensor-parallel",
        )
    refuse_uneven(empty(read_config(model_files(model, with_weights=False).weights), "torch"), count)


def launch(count: int, command: Sequence[str]) -> int:
    """Run a command in `count` processes of one group, and return the first exit code that is not 0, else 0.

    SIGTERM and SIGINT are passed on to the processes. They end when this process does (`end_with_launcher`). Their
    error is printed once (`terminal.say_error`).
    """
    from torch.distributed import TCPStore

    # as torchrun does: the processes meet in a store of this process, which chose a free port and keeps it
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    threads = str(max(1, (os.cpu_count() or 1) // count))
    group = {"OMP_NUM_THREADS": threads, **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    group |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    group |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    reading, _ = os.pipe()  # this process alone has the other end
    with TemporaryDirectory() as errors:
        processes = []
        for rank in range(count):
            directory = Path(errors, str(rank))
            directory.mkdir()
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), _PIPE: str(reading)}
            variables["TORCHELASTIC_ERROR_FILE"] = str(directory / "error.json")
            # in its own session it gets a signal of the terminal only once, from `_ended`
            process = subprocess.Popen(command, env=group | variables, pass_fds=[reading], start_new_session=True)
            processes.append(process)
        return _ended(processes)


def _ended(processes: list[subprocess.Popen[bytes]]) -> int:
    """Wait until all processes have ended, or one has failed for GRACE seconds; end the rest.

    Returns the first exit code that is not 0, or 0; for an end by signal n it is 128 + n.
    """

    def pass_on(number: int, frame: Any) -> None:
        for each in processes:
            each.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    rest = GRACE
    while None in (codes := [each.poll() for each in processes]) and rest > 0:
        time.sleep(_LOOK)
        rest -= _LOOK * any(codes)
    for each in processes:
        each.kill()
    code = next((each for each in codes if each), 0)
    return code if code >= 0 else 128 - code


def end_with_launcher() -> None:
    """End this process with exit code 1 as soon as its launcher ends for any reason, if `launch` started it.

    A thread waits for the pipe between them to close.
    """
    if _PIPE in os.environ:
        Thread(target=_await_end, args=(int(os.environ[_PIPE]),), daemon=True).start()


def _await_end(reading: int) -> None:
    os.read(reading, 1)
    os._exit(1)
