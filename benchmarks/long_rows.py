"""Memory and time of a training step of one long row, all of whose canvases are scored and get the signal.

    python -m benchmarks.long_rows --tokens 2048,8192,32768 --run 8192

The peak is that of the plan, which runs the step on tensors without memory. With recomputation and three passes, steps
of rows of up to `--run` tokens are run as well: their traced peak and seconds stand beside it. The exit code is 1 if
memory per token grows with the row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

from benchmarks import machine
from benchmarks.models import Size
from benchmarks.timing import peak_memory
from blockdiff import checkpoint
from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.kernels import OPS, Kernels, triton_op
from blockdiff.models.family import BlockDiffusionModel
from blockdiff.objective import Objective
from blockdiff.training.activations import checkpoint_activations
from blockdiff.training.plan.live_bytes import planned_for

CPU = torch.device("cpu")
GROWTH = 1.05  # how much more memory per token a longer row may take than a shorter one
# The layers of the preset 15m, one of each kind.
TEXT = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
CONFIG = Size("long rows", "15m", 1, 64, (1, 2), TEXT).config


@dataclass(frozen=True)
class Line:
    """One length: peak bytes of a step as planned, and where it was run as traced, with its seconds."""

    kernels: str
    recomputation: bool
    one_sweep: bool
    tokens: int
    planned: int
    traced: int | None
    seconds: float | None

    def __str__(self) -> str:
        cells = [
            self.kernels,
            "yes" if self.recomputation else "no",
            "one" if self.one_sweep else "three",
            f"{self.tokens:,}",
            f"{self.planned / 2**20:,.0f}",
            f"{self.planned / self.tokens / 2**10:,.1f}",
            "-" if self.traced is None else f"{self.traced / 2**20:,.0f}",
            "-" if self.seconds is None else f"{self.seconds:.1f}",
        ]
        return f"| {' | '.join(cells)} |"


HEAD = ("kernels", "recomputation", "sweeps", "tokens", "MiB", "KiB a token", "MiB traced", "seconds")


def row(model: BlockDiffusionModel, tokens: int) -> Batch:
    """A prompt of one canvas, and canvases to the end."""
    L = model.canvas_length
    drawn = torch.randint(3, model.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    starts = range(L, tokens - L + 1, L)
    canvases = [Canvas(drawn[s : s + L], s, t=0.5, coin=True, address=(0, 0, s // L)) for s in starts]
    return lay_out([CleanRow(drawn, canvases)], L, pad_id=0)


def step(objective: Objective, batch: Batch) -> None:
    """Losses and gradients, as the trainer makes them of a micro-batch."""
    losses = objective(batch)
    (losses.canvas_sum / batch.canvas_count() + losses.ar_sum / batch.ar_count()).backward()


def objective_of(model: BlockDiffusionModel, recomputation: bool, one_sweep: bool) -> Objective:
    """What trains all weights of a model."""
    if recomputation:
        checkpoint_activations(model)
    return Objective(model.train(), Linear(), UniformCorruption(model.vocab_size), one_sweep=one_sweep)


def planned(kernels: str, recomputation: bool, one_sweep: bool, tokens: int) -> int:
    """The peak bytes of a row's step beside the weights."""
    chosen: str | Kernels = kernels
    if kernels == "triton":
        chosen = Kernels(**{name: triton_op(name) for name in OPS})
    empty = checkpoint.empty(CONFIG(), chosen).to(torch.float32)
    batch = row(empty, tokens)
    weights = [*empty.parameters(), *empty.buffers()]
    with planned_for("cpu" if kernels == "torch" else "cuda", weights) as counted:
        step(objective_of(empty, recomputation, one_sweep), batch)
    return counted.peak


def run(recomputation: bool, one_sweep: bool, tokens: int) -> tuple[int, float]:
    """The traced peak bytes of a row's step, and its seconds."""
    model = checkpoint.init(CONFIG(), seed=0, device="cpu", kernels="torch")
    objective, batch = objective_of(model, recomputation, one_sweep), row(model, tokens)
    seconds: list[float] = []

    def work() -> None:
        begin = time.perf_counter()
        step(objective, batch)
        seconds.append(time.perf_counter() - begin)

    return peak_memory(work, CPU, release=lambda: model.zero_grad(set_to_none=True)), seconds[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each length and each way of computing it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_rows", description=__doc__)
    parser.add_argument("--tokens", default="2048,8192,32768", help="lengths of the row")
    parser.add_argument("--kernels", default="torch,triton", help="Triton's are planned only")
    parser.add_argument("--run", type=int, default=0, help="the longest row whose step is run, too")
    parser.add_argument("--output", type=Path, help="a JSON file for the lines")
    options = parser.parse_args(arguments)
    lengths = sorted(int(word) for word in options.tokens.split(","))
    described = machine.describe(CPU)
    versions = ", ".join(f"{package} {version}" for package, version in described["versions"].items())
    print(f"{described['device']}, {described['threads']} threads; {versions}; commit {described['commit']}\n")
    print(f"| {' | '.join(HEAD)} |\n| {' | '.join('-' * len(word) for word in HEAD)} |")
    lines: list[Line] = []
    is_linear = True
    for kernels in options.kernels.split(","):
        for recomputation, one_sweep in ((False, False), (True, False), (True, True)):
            here = []
            for tokens in lengths:
                peak = planned(kernels, recomputation, one_sweep, tokens)
                is_run = tokens <= options.run and recomputation and not one_sweep and kernels == "torch"
                found = run(recomputation, one_sweep, tokens) if is_run else (None, None)
                here.append(Line(kernels, recomputation, one_sweep, tokens, peak, *found))
                print(here[-1], flush=True)
            each = [line.planned / line.tokens for line in here]
            is_linear &= all(after <= GROWTH * before for before, after in pairwise(each))
            lines += here
    if options.output:
        record = {"machine": described, "lines": [asdict(line) for line in lines]}
        options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if is_linear else 1


if __name__ == "__main__":
    sys.exit(main())
