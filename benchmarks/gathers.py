"""What the ranks of a sharded training step send one another: one sweep beside three passes, over every mesh.

    python -m benchmarks.gathers --ranks 2 --size 15m

Three passes gather each layer five times, as trainers do that encode, denoise twice and go back through both. Ranks are
processes of this machine and talk through gloo; bytes are those that rank 0 gets from the others in one step.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import spawn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import machine
from benchmarks.models import Size, sizes
from benchmarks.training_step import rows_of
from blockdiff import checkpoint
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.objective import Objective
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks, from_accelerate
from blockdiff.parallel.shard import split
from blockdiff.training.activations import checkpoint_activations

CPU = torch.device("cpu")
KINDS = {"_allgather_base_": "gathered", "_reduce_scatter_base_": "scattered", "alltoall_base_": "exchanged"}
MESHES: dict[str, dict[str, Any]] = {
    "FSDP2": {"shard": "full"},
    "FSDP2 x experts": {"shard": "full", "experts": 2},
}


class Sent(TorchDispatchMode):
    """Within it, collectives are counted: how many there are of each kind, and how many bytes come from other ranks."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.rank, self.world = rank, world
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(function._schema.name.partition("::")[2])
        if function.namespace == "c10d" and kind is not None:
            received, given = args[0], args[1]
            self.calls[kind] += 1
            share = (self.world - 1) / self.world
            if kind == "exchanged" and args[3]:  # uneven parts, of which this rank's own stays here
                share = 1 - args[3][self.rank] / max(1, sum(args[3]))
            largest = max(received.nbytes, given.nbytes) if kind == "scattered" else received.nbytes
            self.bytes[kind] += int(share * largest)
        return function(*args, **(kwargs or {}))


def measured(ranks: Ranks, size: Size, recomputation: bool, repeats: int = 3) -> list[dict[str, Any]]:
    """What this rank gets in a step over every mesh, both ways, and the least seconds that the step took."""
    found = []
    for name, options in MESHES.items():
        if options.get("experts", 1) > 1 and ranks.world % options["experts"]:
            continue
        mesh = Mesh.of(ranks, **options)
        for one_sweep in (False, True):
            model = checkpoint.empty(size.config(), kernels="torch")
            if recomputation:
                checkpoint_activations(model)
            split(model, mesh, torch.float32)
            checkpoint.draw_weights(model, 0, "float32", CPU)
            corruption = UniformCorruption(model.vocab_size)
            objective = Objective(model.train(), Linear(), corruption, one_sweep=one_sweep)
            batch = rows_of(size, model.vocab_size, model.canvas_length, 1, seed=ranks.rank)
            seconds: list[float] = []
            for _ in range(repeats):
                model.zero_grad(set_to_none=True)
                ranks.barrier()
                begin = time.perf_counter()
                with Sent(ranks.rank, ranks.world) as sent:
                    losses: tuple[Tensor, Tensor] = objective(batch)
                    (losses[0] / batch.canvas_count() + losses[1] / batch.ar_count()).backward()
                seconds.append(time.perf_counter() - begin)
            line = {"mesh": name, "one_sweep": one_sweep, "calls": sent.calls, "bytes": sent.bytes}
            found.append(line | {"seconds": min(seconds)})
    return found


def in_process(rank: int, world: int, port: int, size: str, recomputation: bool, output: str) -> None:
    """What a process does; rank 0 writes what it found."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {**{key: str(n) for key, n in numbers.items()}, "MASTER_ADDR": "127.0.0.1"}
    os.environ["ACCELERATE_USE_CPU"] = "1"
    torch.set_num_threads(1)
    ranks = from_accelerate()
    found = measured(ranks, sizes(CPU)[size], recomputation)
    if ranks.is_main:
        Path(output).write_text(json.dumps(found), encoding="utf-8")
    ranks.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each mesh and way; 1 if one sweep does not gather less."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gathers", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", default="15m", choices=list(sizes(CPU)))
    parser.add_argument("--recomputation", action="store_true")
    parser.add_argument("--output", type=Path, help="a JSON file for the lines")
    options = parser.parse_args(arguments)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "found.json")
        spawn(in_process, (options.ranks, port, options.size, options.recomputation, path), nprocs=options.ranks)
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    described = machine.describe(CPU)
    ways = f"{options.ranks} ranks of 1 thread, {'with' if options.recomputation else 'without'} recomputation"
    print(f"{described['device']}, {ways}; torch {torch.__version__}; commit {described['commit']}\n")
    print("| mesh | sweeps | gathers | MiB gathered | MiB scattered | exchanges | MiB exchanged | seconds |")
    print("| ---- | ------ | ------- | ------------ | ------------- | --------- | ------------- | ------- |")
    for line in found:
        calls, mib = Counter(line["calls"]), Counter({key: n / 2**20 for key, n in line["bytes"].items()})
        cells = [line["mesh"], "one" if line["one_sweep"] else "three", calls["gathered"], f"{mib['gathered']:.1f}"]
        cells += [f"{mib['scattered']:.1f}", calls["exchanged"], f"{mib['exchanged']:.2f}", f"{line['seconds']:.2f}"]
        print(f"| {' | '.join(map(str, cells))} |")
    if options.output:
        record = {"machine": described, "ranks": options.ranks, "size": options.size, "lines": found}
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return int(not gathers_less(found))


def gathers_less(found: Sequence[dict[str, Any]]) -> bool:
    """Whether one sweep gathers less than three passes over every mesh."""
    gathered = {(line["mesh"], line["one_sweep"]): line["bytes"]["gathered"] for line in found}
    return all(gathered[name, True] < gathered[name, False] for name, is_one in gathered if is_one)


if __name__ == "__main__":
    sys.exit(main())
