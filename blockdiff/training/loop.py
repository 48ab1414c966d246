"""The training loop. Data, evaluation, sampling, saving and what is shown come in as callables.

It keeps nothing but the step: weights, optimiser state, step and the log so far are all that a resumed run needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import nn

from blockdiff.canvas import Batch
from blockdiff.errors import DataError
from blockdiff.metrics import Record, of_kind
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.signals import Interrupted, Stopped, interruptible
from blockdiff.training.clock import Clock, memory_gib
from blockdiff.training.optimiser import clip_gradients, set_lr, trainable
from blockdiff.training.step import Counts, Skips, backpropagate


@dataclass(frozen=True)
class Options:
    """How long to train and what to do when; `*_every` counts optimiser steps, 0 = at the end only."""

    steps: int
    ar_weight: float = 1.0
    clip: float = 1.0  # largest gradient norm; 0 = no clipping
    autocast: Literal["bfloat16"] | None = None
    log_every: int = 10
    eval_every: int = 0
    sample_every: int = 0
    save_every: int = 0
    non_finite: Literal["stop", "skip"] = "stop"  # what a loss or gradient that is not finite does to the run
    steps_per_epoch: float | None = None  # for the records' `epoch`; None = not known, as of a stream

    def is_due(self, step: int, every: int) -> bool:
        """Whether something done `every` so many optimiser steps is done after this one."""
        return step == self.steps or (every > 0 and step % every == 0)


def train(
    objective: nn.Module,
    optimiser: torch.optim.Optimizer,
    lr: Callable[[int], float],
    batches: Callable[[int], Sequence[Batch]],
    options: Options,
    ranks: Ranks,
    *,
    log: Callable[[Record], None],
    evaluate: Callable[[int], Record] | None = None,
    sample: Callable[[int], Record] | None = None,
    save: Callable[[int], object] | None = None,
    on_step: Callable[[int], None] | None = None,
    after_step: Callable[[int], None] | None = None,
    is_best: Callable[[int], bool] | None = None,
    should_stop: Callable[[int], bool] | None = None,
    is_stopping: Callable[[], int] | None = None,
    logged: Sequence[Record] | None = None,
    start: int = 0,
    seconds: float = 0.0,
) -> int:
    """Take optimiser steps `start + 1` to `options.steps`, counted from 1, and return the last one reached.

    `objective(batch)` returns losses with `canvas_sum` and `ar_sum`; `batches(step)` this rank's micro-batches, on
    the CPU, and never none with several ranks. `after_step` comes after each step that was taken (EMA), on all ranks.
    `evaluate` and `sample` run on all ranks; their records are of the kinds "heldout" and "sample".
    `is_best(step)` after them asks for a checkpoint even where none is due, `should_stop(step)` for an early end; both
    read the log, and the main process decides. `is_stopping()` is the number of a signal caught on this rank, 0 = none.
    `log` and `on_step` run on the main process. `logged`: the log up to `start` (of the main process); what is due
    after step `start` and not in it is made first (None: nothing). `seconds` were spent before `start`.
    Raises RunError when losses or gradient are not finite and are not skipped (the weights stay), and when a rank is
    lost; after saving, Stopped when a signal asks for it and DataError when `batches` raises one on any rank.
    """
    module, weights = ranks.wrap(objective), list(trainable(objective).values())
    clock = Clock(ranks.device, seconds)
    milestones = Milestones(options, ranks, log, evaluate, sample, save, is_best, should_stop, is_stopping)
    skips = Skips(options.non_finite, ranks.agree([r["step"] for r in of_kind(logged or (), "skipped")]))
    with clock.stopped():
        if milestones.after_restart(start, logged):
            return start
    for step in range(start + 1, options.steps + 1):
        window, refusal = _read(batches, step)
        with ranks.guarded(f"step {step}"):
            counts = Counts.of(window, bool(is_stopping and is_stopping()), refusal is not None, ranks)
            if counts.is_stopping:
                milestones.stop(step - 1)
            if counts.is_failing:
                milestones.refuse(step - 1, refusal)
            optimiser.zero_grad(set_to_none=True)
            gradient = backpropagate(module, weights, window, counts, options.ar_weight, options.autocast, ranks)
            clock.count(counts.tokens_2)
            if gradient.is_finite:
                clip_gradients(weights, gradient.norm, options.clip)
                set_lr(optimiser, lr(step))
                optimiser.step()
                if after_step:
                    after_step(step)
                if options.is_due(step, options.log_every):
                    rates = {**clock.read(), "memory_gib": memory_gib(ranks.device)}
                    record = {"step": step, "kind": "train", **gradient.losses}
                    record |= {"grad_norm": gradient.norm, "lr": lr(step)}
                    if options.steps_per_epoch:
                        record["epoch"] = round(step / options.steps_per_epoch, 4)
                    milestones.report({**record, "skipped": len(skips.steps), **rates})
            else:
                milestones.report(skips.note(step, window, gradient, ranks))
        if ranks.is_main and on_step:
            on_step(step)
        with clock.stopped():
            if milestones.after(step):
                return step
    return options.steps


def _read(batches: Callable[[int], Sequence[Batch]], step: int) -> tuple[Sequence[Batch], str | None]:
    """This rank's micro-batches, or none and what is wrong with the data."""
    try:
        return batches(step), None
    except DataError as error:
        return [], str(error)


@dataclass
class Milestones:
    """What comes between optimiser steps: saving, held-out evaluation, sampled prompts, and the decision to end."""

    options: Options
    ranks: Ranks
    log: Callable[[Record], None]
    evaluate: Callable[[int], Record] | None
    sample: Callable[[int], Record] | None
    save: Callable[[int], object] | None
    is_best: Callable[[int], bool] | None
    should_stop: Callable[[int], bool] | None
    is_stopping: Callable[[], int] | None
    saved: int = 0  # the last step that was saved; before the first one there is nothing to save

    def after_restart(self, start: int, logged: Sequence[Record] | None) -> bool:
        """Make what is due after step `start` and was not logged before the kill; True when training is over."""
        self.saved = start
        if start > 0 and logged is None:
            return False
        made = [record["kind"] for record in logged or () if record["step"] == start]
        return self.after(start, made=self.ranks.agree(made))

    def after(self, step: int, made: Sequence[str] = ()) -> bool:
        """Save and measure what is due and not `made` yet; True when training is over."""
        o, done = self.options, set(made)
        if o.is_due(step, o.save_every):
            self.keep(step)  # first: an evaluation that fails loses nothing
        self.measure(step, done)
        if step == o.steps:
            return True
        if not (o.is_due(step, o.eval_every) or o.is_due(step, o.sample_every)):
            return False
        if self.is_best and self.ranks.agree(self.is_best(step)):
            self.keep(step)
        if not (self.should_stop and self.ranks.agree(self.should_stop(step))):
            return False
        self.keep(step)
        self.measure(step, done, is_end=True)
        return True

    def keep(self, step: int) -> None:
        """Save a step that has not been saved."""
        if self.save and step > self.saved:
            self.save(step)
            self.saved = step

    def measure(self, step: int, done: set[str], is_end: bool = False) -> None:
        """Evaluate and sample where due, or both at the end, unless `done`."""
        o = self.options
        kinds = (("heldout", self.evaluate, o.eval_every), ("sample", self.sample, o.sample_every))
        for kind, take, every in kinds:
            if take and kind not in done and (is_end or o.is_due(step, every)):
                if self.is_stopping and any(self.ranks.gather(self.is_stopping())):
                    self.stop(step)  # a resumed run measures here
                try:
                    with self.ranks.guarded(f"the evaluation after step {step}"), interruptible(self.is_stopping):
                        record = take(step)
                except Interrupted:
                    self.stop(step)  # as here
                self.report({"step": step, "kind": kind, **record})
                done.add(kind)

    def report(self, record: Record) -> None:
        """Hand a record to the log on the main process."""
        if self.ranks.is_main:
            self.log(record)

    def refuse(self, step: int, refusal: str | None) -> NoReturn:
        """Save and raise what is wrong with the data on the first rank that says so, all ranks together."""
        said = next(line for line in self.ranks.gather(refusal) if line is not None)
        self.keep(step)
        saved = f"; the run is saved at step {step}, go on with --resume" if self.saved == step > 0 else ""
        raise DataError(said + saved)

    def stop(self, step: int) -> NoReturn:
        """Save and leave, all ranks together."""
        self.keep(step)
        raise Stopped(step, max(self.ranks.gather(self.is_stopping() if self.is_stopping else 0)))
