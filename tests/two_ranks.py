"""What `test_distributed.py` runs on one process and on two: the same batches through the same loop."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.checkpoint.create import init
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear
from blockdiff.errors import RunError
from blockdiff.training import state
from blockdiff.training.heldout import heldout_losses
from blockdiff.training.loop import Options, train
from blockdiff.training.metrics import MetricsLog
from blockdiff.training.objective import Objective
from blockdiff.training.parallel import Parallel, from_accelerate
from tests.oracle import tiny_config
from tests.toy_objective import ToyObjective, slots, toy_batch, toy_batches, toy_row

BATCH, STEPS = 6, 5
Tensors = dict[str, Tensor]


def train_plainly(
    objective: nn.Module, batches: Callable[[int], list[Batch]], parallel: Parallel, rate: float
) -> tuple[list[dict], Tensors]:
    """Five plain SGD steps: the records, and the gradients of steps 1 and 2 and the last weights by name."""
    records: list[dict] = []
    kept: Tensors = {}
    optimiser = torch.optim.SGD(objective.parameters(), lr=rate)

    def keep_gradients(*_: Any) -> None:
        step = 1 + len(kept) // len(list(objective.parameters()))
        if step <= 2:
            for name, parameter in objective.named_parameters():
                assert parameter.grad is not None
                kept[f"gradient {step} {name}"] = parameter.grad.clone()

    optimiser.register_step_pre_hook(keep_gradients)
    options = Options(STEPS, ar_weight=0.5, clip=0.0, log_every=1)
    train(objective, optimiser, lambda _: rate, batches, options, parallel, log=records.append)
    return records, kept | {f"weight {name}": p.detach() for name, p in objective.named_parameters()}


def toy(parallel: Parallel) -> tuple[list[dict], Tensors]:
    """Uneven micro-batches, with accumulation on both ranks."""
    return train_plainly(ToyObjective(), toy_batches(slots(parallel, BATCH, 2), BATCH), parallel, 0.1)


def lopsided(parallel: Parallel) -> tuple[list[dict], Tensors]:
    """Only the first slot of a step has a canvas, only in even steps a coin: the other rank has neither."""

    def batches(step: int) -> list[Batch]:
        rows = [toy_row(slot, epoch=step, canvases=slot == 0, coin=step % 2 == 0) for slot in range(BATCH)]
        return [lay_out([rows[slot] for slot in part], 4, pad_id=0) for part in slots(parallel, BATCH, 2)]

    return train_plainly(ToyObjective(), batches, parallel, 0.1)


def real(parallel: Parallel) -> tuple[list[dict], Tensors]:
    """The model and the objective themselves, several canvases per row, routers trained."""
    model = init(tiny_config(canvas_length=8), seed=3, device="cpu", kernels="torch")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("router.proj.weight"):
                parameter.mul_(100.0)  # wide margins: rounding alone must not choose other experts
    objective = Objective(model, Linear(), UniformCorruption(model.vocab_size), seed=11, train_router=True)

    def row(sample: int) -> CleanRow:
        tokens = [2, *((7 * sample + 3 * i) % 300 + 3 for i in range(19 + sample))]
        canvases = [
            Canvas(
                tokens[start : start + 8],
                start,
                t=0.1 + sample / 10,
                coin=sample % 2 == 0,
                address=(0, sample, k),
            )
            for k, start in enumerate((3, 11)[: 1 + sample % 2])
        ]
        return CleanRow(tokens, canvases, sample_id=sample)

    def batches(step: int) -> list[Batch]:
        return [lay_out([row(slot) for slot in part], 8, pad_id=0) for part in slots(parallel, BATCH, 2)]

    return train_plainly(objective, batches, parallel, 5e-4)


def failing(parallel: Parallel) -> str:
    """The error of a run whose last slot goes wrong: sample 5, which only one of two ranks has."""

    class Broken(ToyObjective):
        def forward(self, batch: Batch) -> Any:
            losses = super().forward(batch)
            return losses._replace(ar_sum=losses.ar_sum * (float("nan") if 5 in batch.sample_id_B else 1.0))

    try:
        train_plainly(Broken(), toy_batches(slots(parallel, BATCH, 1), BATCH), parallel, 0.1)
    except RunError as error:
        return str(error)
    return "finished"


def heldout(parallel: Parallel) -> dict[str, float]:
    """Three held-out batches: two on the first of two ranks, one on the other."""
    parts = [toy_batch([0, 1, 2]), toy_batch([3]), toy_batch([4, 5])]
    return heldout_losses(ToyObjective(), parts[parallel.rank :: parallel.world], parallel)


def resumed(parallel: Parallel, run: Path) -> list[str]:
    """Save on every rank, be refused, resume; returns what each rank saw."""
    objective = ToyObjective(parallel.rank)
    optimiser = torch.optim.SGD(objective.parameters(), lr=0.1)
    seen = [str(state.enter(run, resume=False, parallel=parallel))]
    options = Options(2, save_every=1)

    def save(step: int) -> None:
        state.save(run, step, objective, optimiser, {}, 1, parallel)

    log = MetricsLog(run / "metrics.jsonl").append
    batches = toy_batches(slots(parallel, BATCH), BATCH)
    train(objective, optimiser, lambda _: 0.1, batches, options, parallel, log=log, save=save)
    try:
        state.enter(run, resume=False, parallel=parallel)
    except RunError:
        seen.append("refused")
    checkpoint = state.enter(run, resume=True, parallel=parallel)
    assert checkpoint is not None
    again = ToyObjective(5)
    seen.append(str(state.restore(checkpoint, again, torch.optim.SGD(again.parameters(), lr=0.1), {})))
    same = all(torch.equal(a, b) for a, b in zip(again.parameters(), objective.parameters(), strict=True))
    return [*seen, f"same weights {same}"]


def everything(parallel: Parallel, directory: Path) -> None:
    """Run all of it and write what this rank found to `directory`."""
    found: dict[str, Any] = {}
    for scenario in (toy, lopsided, real):
        torch.manual_seed(parallel.rank)
        found[scenario.__name__], tensors = scenario(parallel)
        save_file(
            {name: t.contiguous() for name, t in tensors.items()},
            directory / f"{scenario.__name__}-{parallel.rank}.safetensors",
        )
    found["failing"] = failing(parallel)
    found["heldout"] = heldout(parallel)
    found["resumed"] = resumed(parallel, directory / "run")
    found["world"], found["device"] = parallel.world, str(parallel.device)
    (directory / f"found-{parallel.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    ranks = from_accelerate()
    everything(ranks, Path(sys.argv[1]))
    ranks.close()
