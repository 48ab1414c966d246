"""A run of a toy objective, in the directory of a run, for the tests of its checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

from blockdiff.metrics import read, reproducible
from blockdiff.parallel.ranks import Ranks
from blockdiff.training.checkpoint_reader import restore
from blockdiff.training.optimiser import build
from blockdiff.training.run import hold_run, prune
from blockdiff.training.schedule import CosineDecay, learning_rate
from tests.support.toy_objective import ToyObjective, save_checkpoint, slots, toy_batches
from tests.support.toy_trainer import Options, train

ALONE = Ranks(torch.device("cpu"))
FACTS = {"seed": 3, "optim.lr": 0.1}


def saved(run, step, objective, optimiser, keep=2, **kept):
    """Save a step and remove the checkpoints that are not kept, as the trainer does."""
    path = save_checkpoint(run, step, objective, optimiser, FACTS)
    prune(run, keep, **kept)
    return path


def enter(run: Path, resume: bool = True) -> Path | None:
    """Enter a run directory and leave it; returns the checkpoint to go on from."""
    with hold_run(run, resume, ALONE) as checkpoint:
        return checkpoint


def run_to(run: Path, stop: int, resume: bool = False, seed: int = 0, keep: int = 2):
    """Train a toy run of 9 steps up to step `stop`, saving every 2, as the command line would."""
    objective = ToyObjective(seed)
    optimiser = build(objective, lr=0.1)
    checkpoint = enter(run, resume)
    start = restore(checkpoint, objective, optimiser, FACTS) if checkpoint else 0
    lr = partial(learning_rate, CosineDecay(), peak=0.1, steps=9, warmup_steps=3)
    train(
        objective,
        optimiser,
        lr,
        toy_batches(slots(ALONE, 4, 2), 4),
        Options(steps=stop, log_every=1, save_every=2, keep=keep),
        ALONE,
        output=run,
        facts=FACTS,
        start=start,
    )
    return objective, optimiser


def numbers(run: Path) -> list[dict]:
    return reproducible(read(run / "metrics.jsonl"))


def tensors_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run / "checkpoints" / f"step-{step}"
    return {**load_file(folder / "model.safetensors"), **load_file(folder / "optimiser.safetensors")}
