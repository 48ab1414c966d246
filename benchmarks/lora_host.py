"""Host time, Triton launches and torch operations of one layer of a LoRA step: `python -m benchmarks.lora_host`.

Launches are stubbed out, so no GPU is needed. Each figure is the difference between models of 8 and of 2 sliding
layers, divided by 6: encode, pass one and pass two, forward and backward, without and with recomputation. Compare
commits in turns on one core, with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from typing import Any
from unittest.mock import patch

if __name__ == "__main__":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the Triton path is there without a GPU; nothing is launched

import torch

from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.kernels import Kernels
from blockdiff.kernels import launch as launching
from blockdiff.layers.lora import LowRank
from blockdiff.models.adapters import adapt, cast_once, draw_adapters, targets
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.objective import Objective
from blockdiff.training.recomputation import checkpoint_activations
from tests.support.launches import KINDS, Operations, small_config

FEW, MANY, REPEATS = 2, 8, 25


def made(layers: int, recomputes: bool) -> tuple[Objective, Batch]:
    """Return the objective of a model with `layers` sliding layers and adapters of rank 16, and a batch of one row."""
    config = small_config([KINDS["sliding"]] * layers + [KINDS["full"]])
    model = DiffusionGemma(config, kernels=Kernels("triton")).to(torch.bfloat16)
    adapt(model, targets(model, {part: LowRank(16, 32) for part in ("attention", "mlp")}))
    draw_adapters(model, 0, torch.device("cpu"), model.dtype)
    if recomputes:
        checkpoint_activations(model)
    objective = Objective(model, Linear(), UniformCorruption(config.vocab_size), seed=5)
    row = torch.randint(3, 380, (40,)).tolist()
    canvases = [Canvas((row[s : s + 8] + [1] * 8)[:8], s, 0, None, 0.4, True, address=(0, 0, s)) for s in (9, 17, 25)]
    return objective, lay_out([CleanRow(row, canvases, 0)], 8, pad_id=0)


def step(objective: Objective, batch: Batch) -> None:
    """Compute the gradients of a step."""
    with cast_once(objective):
        sums: Any = objective(batch)
        (sums["canvas"] / 16 + sums["ar"] / 30).backward()
    for parameter in objective.parameters():
        parameter.grad = None


def measured(layers: int, recomputes: bool) -> tuple[float, int, int]:
    """Return the host seconds of a step (the least of several), its launches and its torch operations."""
    launched: Counter[str] = Counter()

    def count(launch: launching.Launch, *arguments: Any) -> None:
        launched[launch.kernel.__name__] += 1

    with patch.object(launching.Launch, "__call__", count):
        objective, batch = made(layers, recomputes)
        for _ in range(3):
            step(objective, batch)
        launched.clear()
        with Operations() as operations:
            step(objective, batch)
        launches, found = sum(launched.values()), sum(operations.found.values())
        times = []
        for _ in range(REPEATS):
            start = time.process_time()
            step(objective, batch)
            times.append(time.process_time() - start)
    return min(times), launches, found


def main() -> None:
    """Print a line without recomputation and one with it."""
    argparse.ArgumentParser(prog="python -m benchmarks.lora_host", description=__doc__).parse_args()
    for recomputes in (False, True):
        few, many = measured(FEW, recomputes), measured(MANY, recomputes)
        host, launches, operations = ((b - a) / (MANY - FEW) for a, b in zip(few, many, strict=True))
        how = "with" if recomputes else "without"
        print(
            f"{how} recomputation: {1e3 * host:.2f} ms of host, {launches:.0f} launches, {operations:.0f} torch "
            "operations a layer"
        )


if __name__ == "__main__":
    main()
