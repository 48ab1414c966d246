"""The training loop. Data, evaluation, saving and what is shown come in as callables.

It keeps nothing but the step: model, optimiser state and step are all that a resumed run needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from blockdiff.canvas import Batch
from blockdiff.errors import RunError
from blockdiff.training.metrics import Clock, Record
from blockdiff.training.optim import clip_gradients, fill_gradients, gradient_norm, set_lr, trainable
from blockdiff.training.parallel import Parallel, autocast


@dataclass(frozen=True)
class Options:
    """How long to train and what to do when; `*_every` counts optimiser steps, 0 = at the end only."""

    steps: int
    ar_weight: float = 1.0
    clip: float = 1.0  # largest gradient norm; 0 = no clipping
    autocast: Literal["bfloat16"] | None = None
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0

    def is_due(self, step: int, every: int) -> bool:
        """Whether something done `every` so many optimiser steps is done after this one."""
        return step == self.steps or (every > 0 and step % every == 0)


def train(
    objective: nn.Module,
    optimiser: torch.optim.Optimizer,
    lr: Callable[[int], float],
    batches: Callable[[int], Sequence[Batch]],
    options: Options,
    parallel: Parallel,
    *,
    log: Callable[[Record], None],
    evaluate: Callable[[int], Record] | None = None,
    save: Callable[[int], object] | None = None,
    on_step: Callable[[int], None] | None = None,
    start: int = 0,
    seconds: float = 0.0,
) -> None:
    """Take optimiser steps `start + 1` to `options.steps`, counted from 1.

    `objective(batch)` returns losses with `canvas_sum` and `ar_sum`; `batches(step)` this rank's
    micro-batches, on the CPU. `log` and `on_step` run on the main process, `evaluate` and `save` on all.
    `seconds` were spent before `start`. Raises RunError when the gradient is not finite; the weights stay.
    """
    module, weights = parallel.wrap(objective), list(trainable(objective).values())
    clock = Clock(parallel.device, seconds)
    if evaluate and options.eval_every and start == 0:
        with clock.stopped():
            report(log, parallel, {"step": 0, **evaluate(0)})
    for step in range(start + 1, options.steps + 1):
        window = batches(step)
        counts = parallel.sum(scored_and_processed(window))
        canvas_count, ar_count = counts[:2].clamp(min=1)
        optimiser.zero_grad(set_to_none=True)
        sums = []
        for index, batch in enumerate(window):
            with parallel.synchronise(module, now=index == len(window) - 1):
                with autocast(parallel.device, options.autocast):
                    losses = module(batch.to(parallel.device))
                # The one place that divides; DDP averages over ranks, hence the factor.
                mean = losses.canvas_sum / canvas_count + options.ar_weight * losses.ar_sum / ar_count
                if mean.requires_grad:
                    (parallel.world * mean).backward()
            sums.append(torch.stack([losses.canvas_sum.detach(), losses.ar_sum.detach()]))
        fill_gradients(weights)
        norm = gradient_norm(weights)
        if not math.isfinite(norm):
            raise not_finite(step, window, sums, parallel)
        clip_gradients(weights, norm, options.clip)
        set_lr(optimiser, lr(step))
        optimiser.step()
        clock.count(counts[2].long())
        if parallel.is_main and on_step:
            on_step(step)
        if options.is_due(step, options.log_every):
            record = {"step": step, **global_losses(sums, counts, options.ar_weight, parallel)}
            report(log, parallel, {**record, "grad_norm": norm, "lr": lr(step), **clock.read()})
        with clock.stopped():
            if save and options.is_due(step, options.save_every):  # first: an evaluation that fails loses nothing
                save(step)
            if evaluate and options.is_due(step, options.eval_every):
                report(log, parallel, {"step": step, **evaluate(step)})


def report(log: Callable[[Record], None], parallel: Parallel, record: Record) -> None:
    """Hand a record to the log on the main process."""
    if parallel.is_main:
        log(record)


def scored_and_processed(window: Sequence[Batch]) -> Tensor:
    """[scored canvas positions, scored AR pairs, clean and canvas tokens but padding] of micro-batches."""
    processed = sum(int((batch.doc_start_BS >= 0).sum() + batch.length_BC.sum()) for batch in window)
    canvas_count = sum(batch.canvas_count() for batch in window)
    return torch.tensor([canvas_count, sum(batch.ar_count() for batch in window), processed], dtype=torch.float64)


def global_losses(sums: list[Tensor], counts: Tensor, ar_weight: float, parallel: Parallel) -> Record:
    """The token means of an optimiser step over all its micro-batches and ranks."""
    totals = parallel.sum(torch.stack(sums).double().sum(0)).tolist()
    canvas_loss, ar_loss = (total / max(1, n) for total, n in zip(totals, counts[:2].tolist(), strict=True))
    return {"loss": canvas_loss + ar_weight * ar_loss, "canvas_loss": canvas_loss, "ar_loss": ar_loss}


def not_finite(step: int, window: Sequence[Batch], sums: list[Tensor], parallel: Parallel) -> RunError:
    """The error for a step whose gradient is not finite: which part went wrong, in which samples.

    Every rank sees the same gradient norm, so all come here together.
    """
    parts: dict[str, list[int]] = {"canvas loss": [], "AR loss": [], "gradient": []}
    for batch, pair in zip(window, torch.stack(sums).isfinite().tolist(), strict=True):
        ids = batch.sample_id_B.tolist()
        parts["gradient"] += ids
        for part, is_finite in zip(parts, pair, strict=False):
            parts[part] += [] if is_finite else ids
    gathered = parallel.gather(parts)
    for part in parts:
        ids = sorted({sample_id for rank in gathered for sample_id in rank[part]})
        if ids:
            break
    named = ", ".join(map(str, ids[:64])) + (", ..." if len(ids) > 64 else "")
    return RunError(
        f"step {step}: the {part} is not finite (sample ids {named}); "
        "look at these samples, or resume from the last checkpoint with a lower optim.lr"
    )
