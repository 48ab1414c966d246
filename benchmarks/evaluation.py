"""What evaluating costs beside training: seconds of an optimiser step, of a held-out evaluation, of sampled prompts.

    python -m benchmarks.evaluation --rows 256 --prompts 32 --every 250

Trains the quickstart's model on puzzles made here, on one process: no files, no download.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from benchmarks import machine
from blockdiff.checkpoint import fitted, init, preset_config
from blockdiff.data.chat import Encoder
from blockdiff.data.collate import Collator, heldout_batches, micro_batches
from blockdiff.data.order import Order
from blockdiff.data.rows import Row
from blockdiff.data.sudoku import alphabet, make_splits
from blockdiff.data.tokenizer import character_tokenizer
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.evals import task
from blockdiff.objective import Objective
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.sampling import Generation, Sampler
from blockdiff.training.heldout import heldout
from blockdiff.training.optimiser import build, clip_gradients, trainable
from blockdiff.training.samples import sample_prompts
from blockdiff.training.step import Counts, backpropagate


def measure(
    rows: int, prompts: int, every: int, steps: int, repeats: int = 3, batch: int = 64, max_steps: int = 48
) -> dict[str, Any]:
    """Seconds of each part (medians), and the shares of a run that evaluates and samples `every` optimiser steps.

    Sampling is measured before and after `steps` optimiser steps of `batch` rows: the better a model knows its
    task, the fewer of `max_steps` denoising steps it takes.
    """
    alone = Ranks(torch.device("cpu"))
    made = make_splits(4, {"train": max(batch * steps, 64), "test": max(rows, prompts)}, seed=0)
    sets = {name: [row_of(row, f"{name}:{n}") for n, row in enumerate(split)] for name, split in made.items()}
    tokenizer = character_tokenizer(alphabet(4))
    config = fitted(preset_config("sudoku4"), tokenizer)
    model = init(config, seed=0, dtype="float32", device="cpu", kernels="torch")
    encoder = Encoder(tokenizer, eos_id=1, canvas_length=int(config.canvas_length))
    examples = {name: encoder.encode(split)[0] for name, split in sets.items()}
    collator = Collator(int(config.canvas_length), 0, 1, seed=0, time=StratifiedTime(1e-4), scores_ar=False)
    objective = Objective(model, Linear(), UniformCorruption(model.vocab_size))
    optimiser, weights = build(objective, lr=3e-3, betas=(0.9, 0.99)), list(trainable(objective).values())
    order = Order(len(examples["train"]), batch, 0)
    ends = [0.0]

    def learn() -> None:
        began = time.perf_counter()
        for number in range(1, steps + 1):
            window = micro_batches(examples["train"], order, collator, number)
            optimiser.zero_grad(set_to_none=True)
            counts = Counts.over_ranks(window, False, False, alone)
            gradient = backpropagate(objective, weights, window, counts, 0.0, None, Mesh(alone))
            clip_gradients(weights, gradient.norm, 1.0)
            optimiser.step()
            ends.append(time.perf_counter() - began)

    def evaluate() -> Any:
        return heldout(objective, heldout_batches(examples["test"][:rows], collator, batch), alone)

    def sample() -> dict[str, float]:
        """The middle one of several tries."""
        settings = Generation(max_steps=max_steps, entropy_bound=0.02, confidence=0.02, eos_ids=(1,))
        asked, alike = sets["test"][:prompts], Sampler(model, tokenizer, settings)
        tries = [sample_prompts(alike, asked, task("sudoku"), alone).record for _ in range(repeats)]
        return sorted(tries, key=lambda record: float(record["sample_seconds"]))[repeats // 2]

    untrained = sample()
    learn()
    step = statistics.median(b - a for a, b in pairwise(ends))
    held, sampled = seconds_of(evaluate, repeats), sample()
    total = every * step + held + sampled["sample_seconds"]
    return {
        "optimiser_step_seconds": step,
        "heldout_seconds": held,
        "heldout_rows_per_second": rows / held,
        "sample_seconds_untrained": untrained["sample_seconds"],
        "sample_steps_per_canvas_untrained": untrained["sample_steps_per_canvas"],
        "sample_seconds": sampled["sample_seconds"],
        "sample_steps_per_canvas": sampled["sample_steps_per_canvas"],
        "heldout_share": held / total,
        "sample_share": sampled["sample_seconds"] / total,
        "settings": {"rows": rows, "prompts": prompts, "every": every, "steps": steps, "batch_size": batch},
        "machine": machine.describe(torch.device("cpu")),
    }


def row_of(puzzle: dict[str, str], where: str) -> Row:
    """A puzzle as a row."""
    return Row(where, prompt=puzzle["prompt"], response=puzzle["response"])


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """The median of `repeats` runs."""
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def main(words: Sequence[str] | None = None) -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=256, help="held-out rows (256)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts sampled (32)")
    parser.add_argument("--every", type=int, default=250, help="optimiser steps between evaluations (250)")
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps to train (100)")
    given = parser.parse_args(words)
    print(json.dumps(measure(given.rows, given.prompts, given.every, given.steps), indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
