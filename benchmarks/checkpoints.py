"""Checkpoints of a run against plain safetensors of the same bytes: MB/s of saving and loading, and host memory.

    python -m benchmarks.checkpoints --mib 384 --processes 1,2 --directory /tmp

What is saved are matrices and the two moments of their AdamW, fp32, on the host; several processes hold pieces of them
(FSDP2), and plain safetensors writes and reads each process's pieces as a file of its own. Both sides wait until
their files are on the disk. A checkpoint has digests beside, which are compared when it is read. Files are read from
the cache of the system. Tensors are compared first; the exit code is 1 if what is read is not what was saved.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks import machine
from blockdiff.files import sync
from blockdiff.parallel.ranks import Ranks, from_accelerate
from blockdiff.pieces import local_of
from blockdiff.training import state
from blockdiff.training.checkpoint_tensors import pack, weights_of
from blockdiff.training.saving import Saver

SIDE = 1024  # of a matrix; with its moments 12 MiB
FACTS = {"seed": 0}


@dataclass(frozen=True)
class Line:
    """One way to save or load: MB/s over all processes (median and all), and the most host memory a process took."""

    processes: int
    what: str
    megabytes: float
    megabytes_per_second: float
    seconds: list[float]
    peak_mib: float


class Peak:
    """The most anonymous memory of this process above what it had before, looked at every few milliseconds."""

    def __enter__(self) -> Peak:
        self._is_over, self.mib, self._before = threading.Event(), 0.0, _anonymous_mib()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.wait(0.002):
            self.mib = max(self.mib, _anonymous_mib() - self._before)


def _anonymous_mib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def trained(mib: int, ranks: Ranks, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Matrices and an AdamW that has stepped once, spread over the ranks where there are several."""
    torch.manual_seed(seed)
    matrices = max(1, mib // (12 * SIDE * SIDE >> 20))
    module = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(matrices)))
    if ranks.world > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(module, mesh=init_device_mesh("cpu", (ranks.world,)))
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    optimiser.zero_grad()
    return module, optimiser


def held(module: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """This process's part of everything that a checkpoint holds."""
    return {name: local_of(tensor) for name, tensor in (weights_of(module) | pack(module, optimiser)[0]).items()}


def measure(ranks: Ranks, folder: Path, mib: int, repeats: int) -> list[Line]:
    """All ways in turns; every rank measures, the slowest counts."""
    module, optimiser = trained(mib, ranks, seed=1)
    other, fresh = trained(mib, ranks, seed=2)
    mine, plain = held(module, optimiser), folder / f"plain-{ranks.rank}.safetensors"
    total = sum(ranks.gather(sum(tensor.nbytes for tensor in mine.values())))
    step, saver = 0, Saver(folder / "background", ranks, in_background=True)

    def save_plain() -> None:
        save_file({name: tensor.contiguous() for name, tensor in mine.items()}, plain)
        sync(plain)

    def load_plain() -> None:
        read, target = load_file(plain), held(other, fresh)
        for name, tensor in target.items():
            tensor.copy_(read[name])

    def save() -> None:
        nonlocal step
        step += 1
        state.save(folder, step, module, optimiser, FACTS, ranks)

    def load() -> None:
        state.restore(folder / "checkpoints" / f"step-{step}", other, fresh, FACTS, ranks=ranks)

    def begin() -> None:
        saver.start(step, module, optimiser, FACTS)

    ways: dict[str, Callable[[], None]] = {
        "save_file": save_plain,
        "save a checkpoint": save,
        "load_file": load_plain,
        "load a checkpoint": load,
        "save in the background: training stands still": begin,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks = dict.fromkeys(ways, 0.0)
    for repeat in range(repeats + 1):
        for name, work in ways.items():
            for tensor in held(other, fresh).values():
                tensor.zero_()
            os.sync()
            ranks.barrier()
            with Peak() as peak:
                before = time.perf_counter()
                work()
                took = time.perf_counter() - before
            if name.startswith("load") and any(
                not torch.equal(tensor, mine[key]) for key, tensor in held(other, fresh).items()
            ):
                sys.exit(f"{name}: what was read is not what was saved")
            if repeat:  # the first one makes files and caches
                seconds[name].append(max(ranks.gather(took)))
                peaks[name] = max(peaks[name], *ranks.gather(peak.mib))
        saver.wait()
        if ranks.is_main:
            state.prune(folder, 1)
            state.prune(folder / "background", 1)
    megabytes = total / 1e6
    return [
        Line(ranks.world, name, megabytes, megabytes / statistics.median(took), took, peaks[name])
        for name, took in seconds.items()
    ]


def in_process(variables: dict[str, str], folder: Path, mib: int, repeats: int) -> None:
    """What a process does; rank 0 leaves the lines in the folder."""
    os.environ |= variables
    ranks = from_accelerate()
    lines = measure(ranks, folder, mib, repeats)
    if ranks.is_main:
        (folder / "lines.json").write_text(json.dumps([asdict(line) for line in lines]))
    ranks.close()


def with_processes(world: int, directory: Path, mib: int, repeats: int) -> list[Line]:
    """Measure in processes of their own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder = Path(tempfile.mkdtemp(dir=directory))
    try:
        spawn, processes = multiprocessing.get_context("spawn"), []
        for rank in range(world):
            numbers: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
            variables = {name: str(number) for name, number in numbers.items()} if world > 1 else {}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "ACCELERATE_USE_CPU": "1"}
            processes.append(spawn.Process(target=in_process, args=(variables, folder, mib, repeats)))
            processes[-1].start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(1)
        return [Line(**line) for line in json.loads((folder / "lines.json").read_text())]
    finally:
        shutil.rmtree(folder)


def table(lines: list[Line]) -> str:
    """The lines as Markdown."""
    rows = [
        f"| {line.processes} | {line.what} | {line.megabytes:,.0f} | {line.megabytes_per_second:,.0f} | "
        f"{min(line.seconds):.2f} - {max(line.seconds):.2f} | {line.peak_mib:,.0f} |"
        for line in lines
    ]
    head = "| processes | what | MB | MB/s | seconds | peak MiB of a process |\n| --- | --- | --- | --- | --- | --- |"
    return "\n".join([head, *rows])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--mib", type=int, default=384, help="what is saved, in MiB (default 384)")
    parser.add_argument("--processes", default="1,2", help="numbers of processes (default 1,2)")
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats of each way, in turns (default 5)")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="the disk to measure")
    parser.add_argument("--output", type=Path, help="FILE.json; the table goes beside it as .md")
    options = parser.parse_args()
    lines: list[Line] = []
    for world in map(int, options.processes.split(",")):
        lines += with_processes(world, options.directory, options.mib, options.repeats)
    print(table(lines))
    if options.output is not None:
        record = machine.describe(torch.device("cpu"))
        contents = {"machine": record, "mib": options.mib, "lines": [asdict(line) for line in lines]}
        options.output.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
        versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
        commit = f"{str(record['commit'])[:12]}{' + changes' if record['dirty'] else ''}"
        heading = f"{record['device']}, {record['cores']} cores, {record['threads']} threads; {versions}; commit"
        how = f"{commit}; medians of {options.repeats} repeats in turns"
        options.output.with_suffix(".md").write_text(f"{heading} {how}\n\n{table(lines)}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
