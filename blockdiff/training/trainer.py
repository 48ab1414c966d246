"""`Trainer`: a run from its first optimiser step, or its last checkpoint, to its export. Begin reading at `fit()`.

`build` makes the parts of a run, `step` computes the gradient of an optimiser step, `checkpoint_writer` writes
checkpoints, and `export` writes the model, the curves and the report.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from blockdiff.canvas import Batch
from blockdiff.data.dataset import Dataset
from blockdiff.diffusion.corruption import Corruption
from blockdiff.diffusion.schedule import Schedule
from blockdiff.diffusion.weight import Weight
from blockdiff.errors import RESUME, DataError, RunError
from blockdiff.files import room_remedy
from blockdiff.metrics import FILE_NAME, METRICS, SAMPLES, MetricsLog, Record, of_kind
from blockdiff.objective import Objective
from blockdiff.parallel.accelerate_config import refuse_settings
from blockdiff.parallel.ranks import Ranks, from_accelerate
from blockdiff.parallel.signals import Interrupted, Stopped, caught
from blockdiff.rl.reward import Reward, weighted
from blockdiff.sampling import Sampler
from blockdiff.terminal import counted, unread
from blockdiff.training import export
from blockdiff.training.build import build
from blockdiff.training.built import Built
from blockdiff.training.callbacks import Callback, checked
from blockdiff.training.checkpoint_writer import CheckpointWriter
from blockdiff.training.kinds.kind import Kind, kind_of
from blockdiff.training.optimiser import clip_gradients, set_lr, trainable
from blockdiff.training.progress import Progress
from blockdiff.training.recipe_checks import refuse, without_effect
from blockdiff.training.recipe_files import AnyRecipe, run_recipe
from blockdiff.training.report import Clock, diverging, epochs_in_words, memory_gib
from blockdiff.training.run import Run, best_saved, best_step, evaluations_since_best, hold_run, prune
from blockdiff.training.samples import keep_texts
from blockdiff.training.starting_model import decided
from blockdiff.training.step import Counts, Gradient, SkippedSteps, UnscoredSteps, backpropagate, seeded
from blockdiff.training.trackers import Trackers


class Trainer:
    """One training run. Override a method in a subclass to change a part of it.

    schedule, corruption, weight: objects that replace the recipe's.
    objective: called with the arguments of `blockdiff.objective.Objective`; a subclass of it, for example.
    optimiser: called with the parameters that train; a class of torch.optim or a `functools.partial` of one.
    reward: for policies, a function of a row (as in its file) and the `Result`, or such functions with their weights.
        They are added to the rewards that the recipe names.
    kind: a user's own kind of run, in place of the recipe's `objective`.
    callbacks: called during the run.
    The other arguments are those of `blockdiff.train`.

    All of these, and a subclass of `Trainer`, are recorded by name and values. A resumed run must have the same.
    """

    # Attributes during `fit()`:
    step: int  # the number of the last optimiser step, counted from 1
    steps: int  # the number of the run's last optimiser step
    saved: int  # the optimiser step of the newest checkpoint
    ranks: Ranks
    built: Built  # model, objective, optimiser, data, ...
    records: list[Record]  # the records of metrics.jsonl, on the main process
    show: Progress  # prints lines and the progress bar
    directory_stat: os.stat_result  # identifies the run's directory
    clock: Clock
    skipped: SkippedSteps
    was_diverging: bool  # whether a line has reported a diverging loss
    trackers: Trackers
    saver: CheckpointWriter
    sampler: Sampler | None  # shared by all evaluations; the first one constructs it

    def __init__(
        self,
        recipe: AnyRecipe,
        overrides: Sequence[str] = (),
        output: str | Path | None = None,
        resume: bool = False,
        *,
        overwrite: bool = False,
        schedule: Schedule | None = None,
        corruption: Corruption | None = None,
        weight: Weight | None = None,
        objective: Callable[..., Objective] | None = None,
        optimiser: Callable[..., torch.optim.Optimizer] | None = None,
        reward: Reward | Mapping[Reward, float] | None = None,
        kind: Kind | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        trainer = None if type(self) is Trainer else type(self)
        self.recipe = run_recipe(
            recipe,
            overrides,
            output,
            objective=kind or {"schedule": schedule, "corruption": corruption, "weight": weight},
            given={
                "objective": objective,
                "optimiser": optimiser,
                "trainer": trainer,
                "reward": weighted(reward) or None,
            },
        )
        self.directory = Path(str(self.recipe.output))
        self.resume, self.overwrite, self.callbacks = resume, overwrite, checked(callbacks)
        self.began = time.perf_counter()
        self.doing = "the start of the run"  # named in the message if another rank is lost

    def fit(self) -> Run:
        """Train to the end of the recipe, from step 0 or the last checkpoint, and export the model.

        Raises Stopped after a signal, once the step is saved, and RunError, DataError or RecipeError, in one line, if
        the run cannot continue.
        """
        with self._running():
            self._take_steps()
            self._finish()
        return Run(self.directory)

    def _take_steps(self) -> None:
        """Take optimiser steps until training is over. Save and measure before and between them when it is due."""
        is_over = self._between_steps(logged=self._kinds_logged())
        while not is_over:
            batches, counts = self._next_batches()
            self.step += 1
            gradient = self.backpropagate(batches, counts)
            if gradient.is_finite:
                if counts.has_scored:
                    self.update(gradient)
                self.log(gradient)
            else:
                self.skip(gradient, batches)
            self.show.step(self.step)
            self._notify("on_step")
            is_over = self._between_steps()

    # -- the optimiser step ----------------------------------------------------------------------------------------

    def fetch(self, step: int) -> Sequence[Batch]:
        """Return this rank's micro-batches of an optimiser step, on the CPU.

        With several ranks there is at least one: a rank without examples gets a batch of padding.
        """
        return self.built.source(step)

    def _next_batches(self) -> tuple[Sequence[Batch], Counts]:
        """Return this rank's micro-batches of the next optimiser step, and the counts over all ranks.

        After a signal, all ranks save and raise Stopped; if any rank cannot read its micro-batches, all save and raise
        DataError. A step without scored positions is reported; too many in a row raise RunError.
        """
        self.doing = f"step {self.step + 1}"
        batches: Sequence[Batch] = []
        data_error = None
        try:
            batches = self.fetch(self.step + 1)
        except DataError as error:
            data_error = str(error)
        except Interrupted:  # during rollouts, on all ranks
            self._stop()
        may_stop = self.built.source.may_stop(self.step)
        is_stopping, has_error = self.ranks.any(may_stop and self.ranks.is_stopping() > 0, data_error is not None)
        if is_stopping:
            self._stop()
        if has_error:
            self._stop_for_data(data_error)
        counts = Counts.over_ranks(batches, self.built.losses, self.ranks)
        if line := self.unscored.note(self.step + 1, kind_of(self.recipe).why_unscored(counts)):
            self.show.line(f"note      {line}")
        return batches, counts

    def backpropagate(self, batches: Sequence[Batch], counts: Counts) -> Gradient:
        """Compute the gradient of the global batch in the `grad` of the parameters that train."""
        self.built.optimiser.zero_grad(set_to_none=True)
        b = self.built
        with seeded(self.recipe.seed, self.step, self.ranks):
            gradient = backpropagate(b.module, self.weights, batches, b.losses, counts, b.precision, b.mesh)
        self.clock.count(counts.tokens_2)
        return gradient

    def learning_rate(self, step: int) -> float:
        """The learning rate of an optimiser step, counted from 1."""
        return self.built.learning_rate(step)

    def update(self, gradient: Gradient) -> None:
        """Take the optimiser step, and add the new weights to their average."""
        clip_gradients(self.weights, gradient.norm, self.recipe.optim.clip)
        set_lr(self.built.optimiser, self.learning_rate(self.step))
        self.built.optimiser.step()
        if self.built.average is not None:
            self.built.average.update(self.step)

    def log(self, gradient: Gradient) -> None:
        """Record the losses of this step if a record is due."""
        if not self._is_due(self.recipe.train.log_every):
            return
        rates = {**self.clock.read(), "memory_gib": memory_gib(self.ranks.device)}
        record: Record = {"step": self.step, "kind": "train", **gradient.losses}
        record |= {"grad_norm": gradient.norm, "lr": self.learning_rate(self.step)}
        record |= self.built.source.read(self.ranks, self.clock.since_reading)
        if steps_per_epoch := self._steps_per_epoch():
            record["epoch"] = round(self.step / steps_per_epoch, 4)
        self.record({**record, "skipped": len(self.skipped.steps), **rates})
        if not self.was_diverging and (line := diverging(self.records)) is not None:
            self.was_diverging = True
            self.show.line(f"note      {line}")

    def skip(self, gradient: Gradient, batches: Sequence[Batch]) -> None:
        """Record a step whose losses or gradient are not finite. Raises RunError if that should end the run."""
        self.record(self.skipped.note(self.step, batches, gradient, self.ranks))

    # -- between optimiser steps -----------------------------------------------------------------------------------

    def _is_due(self, every: int) -> bool:
        """Whether something that happens every `every` optimiser steps (0 = at the end only) is due after this one."""
        return self.step == self.steps or (every > 0 and self.step % every == 0)

    def _between_steps(self, logged: Sequence[str] = ()) -> bool:
        """Save and measure if that is due after this step. Returns whether training is over.

        logged: the kinds of records that this step has already. The checkpoint is written before the evaluation, which
        may fail.
        """
        with self.clock.stopped():
            self._completed(self.saver.poll())
            if self._is_due(self.recipe.train.save_every):
                self._ensure_saved()
            measured = self._measurements()
            due = [kind for kind, every in measured.items() if self._is_due(every)]
            self._measure([kind for kind in due if kind not in logged])
            if self.step == self.steps:
                return True
            if not due:
                return False
            is_best, is_over = self.ranks.agree((self._is_best(), self._should_stop()))
            if is_best or is_over:
                self._ensure_saved()
            if is_over:
                self._measure([kind for kind in measured if kind not in due and kind not in logged])
            return bool(is_over)

    def _measurements(self) -> dict[str, int]:
        """The kinds of records in addition to those of training losses, and the interval of each in optimiser steps."""
        measured = {"heldout": self.recipe.train.eval_every} if self.built.data.heldout is not None else {}
        return measured | ({"sample": self.recipe.evaluation.prompts_every} if self.built.data.prompts else {})

    def _kinds_logged(self) -> list[str]:
        """The kinds of records that this step has in the log, so that a resumed run does not repeat them."""
        kinds: list[str] = self.ranks.agree([record["kind"] for record in self.records if record["step"] == self.step])
        return kinds

    def _measure(self, kinds: Sequence[str]) -> None:
        """Evaluate, sample, or both. A signal meanwhile saves and ends the run; the resumed run measures instead."""
        for kind in kinds:
            self.doing = f"the evaluation after step {self.step}"
            try:
                if self.ranks.any(self.ranks.is_stopping() > 0)[0]:
                    raise Interrupted
                record = self.evaluate(self.step) if kind == "heldout" else self.sample(self.step)
            except Interrupted:
                self._stop()
            self.record({"step": self.step, "kind": kind, **record})
            best = self.recipe.evaluation.best
            if best is not None and METRICS[best].kind == kind and best not in record:
                self.show.line(f"note      evaluation.best: this evaluation has no {best}, so it cannot be the best")

    def evaluate(self, step: int) -> Record:
        """Return the held-out losses and accuracies."""
        batches = self.built.data.heldout_batches(self.ranks.row_rank, self.ranks.row_world)
        with self.built.averaged():
            return kind_of(self.recipe).evaluate(self.built.objective, batches, self.ranks, self.built.precision)

    def sample(self, step: int) -> Record:
        """Return the figures of the sampled prompts, and write some of the answers to samples.jsonl."""
        base = self.built.base
        if self.sampler is None:  # one for all evaluations: it keeps captured graphs, and weights change in place
            strategy = self.recipe.evaluation.strategy
            self.sampler = Sampler(self.built.model, base.tokenizer, base.generation, self.built.diffusion, strategy)
            self.sampler.settings = replace(self.sampler.settings, image_reader=self.built.data.encoder.reader)
        with self.built.averaged():
            sampled = kind_of(self.recipe).sample(self.recipe, self.built, self.sampler, self.ranks, self.show)
        if self.step == self.built.step:  # no optimiser step has run yet, so the memory that one needs is unknown
            self.sampler.release()
        if self.ranks.is_main:
            keep_texts(self.directory / SAMPLES, step, sampled.texts)
        return sampled.record

    def _is_best(self) -> bool:
        """Whether `evaluation.best` has its best value after this step. Only valid on the main process."""
        best = best_step(self.records, self.recipe.evaluation.best)
        return best is not None and best[0] == self.step

    def _should_stop(self) -> bool:
        """Whether `evaluation.best` has not improved for `patience` evaluations. Only valid on the main process."""
        e = self.recipe.evaluation
        return e.patience is not None and evaluations_since_best(self.records, e.best) >= e.patience

    # -- records and checkpoints -----------------------------------------------------------------------------------

    def record(self, record: Record) -> None:
        """Write a record to metrics.jsonl, print it and pass it to trackers and callbacks, on the main process."""
        if self.ranks.is_main:
            self._require_same_directory()
            log = MetricsLog(self.directory / FILE_NAME)
            if self.records and not log.path.exists():
                log.write(self.records)
                self.show.line(f"note      {log.path} was removed; its records are written again")
            self.records.append(record)
            log.append(record)
            self.show.record(record)
            self.trackers.log(record)
            self._notify("on_record", record)

    def _require_same_directory(self) -> None:
        """Raise RunError if the run's directory was removed or replaced since the run began."""
        if not self.directory.is_dir() or not os.path.samestat(self.directory.stat(), self.directory_stat):
            raise RunError(f"{self.directory}: was removed or replaced during the run; put it back, then {RESUME}")

    def _notify(self, event: str, *values: Any) -> None:
        """Call a method of every callback."""
        for callback in self.callbacks:
            getattr(callback, event)(self, *values)

    def _ensure_saved(self, is_waiting: bool = False) -> None:
        """Begin the checkpoint of this step unless it was begun before. If `is_waiting`, wait until it is complete."""
        if self.step > self.saved:
            self._completed(self.saver.wait())
            self.save(self.step)
            self.saved = self.step
            if not self.saver.step:
                self._completed(self.step)
        if is_waiting:
            self._completed(self.saver.wait())

    def save(self, step: int) -> None:
        """Write a checkpoint, or with `train.save_async` begin to write it."""
        if self.ranks.is_main:
            self._require_same_directory()
        b = self.built
        counts = b.source.counts(self.ranks)
        self.saver.start(step, b.objective, b.optimiser, b.facts, b.average, counts)

    def _completed(self, step: int) -> None:
        """After the checkpoint of a step (0 = none) is complete, remove old checkpoints and call the callbacks."""
        if step:
            self._prune()
            self._notify("on_save")

    def _prune(self) -> None:
        """Remove old checkpoints on the main process: all but the newest, the best and multiples of `keep_every`."""
        if self.ranks.is_main:
            t, best = self.recipe.train, best_saved(self.directory, self.records, self.recipe.evaluation.best)
            prune(self.directory, t.keep, keep_every=t.keep_every, protect=() if best is None else (best[0],))

    # -- the end ---------------------------------------------------------------------------------------------------

    def _stop(self) -> NoReturn:
        """Save and raise Stopped, on all ranks together."""
        self._ensure_saved(is_waiting=True)
        raise Stopped(self.step, max(self.ranks.gather(self.ranks.is_stopping())))

    def _stop_for_data(self, data_error: str | None) -> NoReturn:
        """Save and raise DataError, on all ranks together, with the message of the first rank that has one."""
        reason = next(line for line in self.ranks.gather(data_error) if line is not None)
        self._ensure_saved(is_waiting=True)
        saved = f"; the run is saved at step {self.step}, {RESUME}" if self.step > 0 else ""
        raise DataError(reason + saved)

    def _finish(self) -> None:
        """Export the model, draw the curves, write the report, and print it in one line."""
        self.doing = "the end of the run"
        self._completed(self.saver.wait())
        # All ranks together write a model that is split.
        which = export.write_model(self) if self.built.mesh.is_split else None
        with self.ranks.main_first("exporting the model"):
            if self.ranks.is_main:
                self._prune()  # a kill during the last save may have left old checkpoints
                export.write_results(self, which or export.write_model(self))
        self._notify("on_end")

    # -- the start -------------------------------------------------------------------------------------------------

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Join the ranks, build and restore the run, and defer signals to the end of a step, around a block."""
        r = self.recipe
        refuse_settings(os.environ, autocast=r.train.autocast, compiles=r.model.compile, clip=r.optim.clip)
        ranks = from_accelerate(timeout=r.train.timeout)
        catching = caught(speaks=ranks.is_main, is_alone=ranks.world == 1)
        try:
            with unread(), ranks.guarded(lambda: self.doing), catching as signals:
                self.ranks = replace(ranks, is_stopping=signals.is_stopping, ranks_per_row=self.recipe.parallel.tensor)
                self.show = Progress(self.recipe.train.steps or 0, is_shown=ranks.is_main)
                self.recipe, decision = decided(self.recipe)
                if decision:
                    self.show.line(f"objective {decision}")
                refuse(self.recipe, ranks.world)
                self._keep_base()
                with hold_run(self.directory, self.resume, self.ranks, self.overwrite) as checkpoint:
                    self._start(checkpoint)
                    shown = self.show.running(self.step)
                    with closing(self.saver), closing(self.trackers), shown, ranks.guarded(lambda: self.doing):
                        self._notify("on_start")
                        yield
        except OSError as error:
            ranks.close()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise
            file, step = error.filename or self.directory, getattr(self, "saved", 0)
            raise RunError(
                f"{file}: {error.strerror}; {room_remedy(error)}, then {RESUME}; the run is saved at step {step}"
            ) from error
        except BaseException:
            ranks.close()  # so that the other ranks notice at once
            raise

    def _keep_base(self) -> None:
        """Raise RunError if `overwrite` would remove the model or tokenizer that the run starts from."""
        for key in ("path", "tokenizer"):
            name = getattr(self.recipe.model, key)
            if self.overwrite and name is not None and Path(name).resolve().is_relative_to(self.directory.resolve()):
                raise RunError(f"model.{key}: {name} is in the run that --overwrite replaces; choose another output")

    def _start(self, checkpoint: Path | None) -> None:
        """Build the parts of the run, restore a checkpoint (None: start at step 0), and truncate the logs to it."""
        self.directory_stat = self.directory.stat()
        built = build(self.recipe, self.ranks, self.show, checkpoint)
        records = export.open_logs(self.directory, self.recipe, built, checkpoint) if self.ranks.is_main else []
        self._begin(built, records)
        names = self.recipe.train.trackers if self.ranks.is_main else ()
        self.trackers = Trackers(names, self.directory, self.recipe.model_dump(mode="json"), self.step)
        for line in without_effect(self.recipe, self.steps):
            self.show.line(f"note      {line}")
        self.show.line(f"run       {self.directory}: {self._in_words()}, {self.ranks.world} x {self.ranks.device}")
        if checkpoint is not None:
            self.show.line(f"resumed   {checkpoint}")
        elif self.resume:
            self.show.line(f"resumed   nothing: {self.directory} has no checkpoint, so this starts at step 0")

    def _begin(self, built: Built, records: list[Record]) -> None:
        """Set the attributes of the run. Skipped steps and seconds continue from the records of the log."""
        self.built, self.records = built, records
        self.sampler = None
        self.step = self.saved = built.step
        self.steps = self.show.steps = built.steps
        self.saver = CheckpointWriter(self.directory, self.ranks, self.recipe.train.save_async)
        self.weights = list(trainable(built.objective).values())
        self.unscored = UnscoredSteps(self.steps)
        self.was_diverging = diverging(records) is not None
        skipped = [record["step"] for record in of_kind(records, "skipped")]
        self.skipped = SkippedSteps(self.recipe.train.non_finite, self.ranks.agree(skipped))
        seconds = max((record.get("seconds", 0.0) for record in records), default=0.0)
        self.clock = Clock(self.ranks.device, seconds)

    def _in_words(self) -> str:
        """Describe the run that is about to begin: its length, its batches and when it saves."""
        t, epochs = self.recipe.train, self._steps_per_epoch()
        length = "" if epochs is None else f", {epochs_in_words(self.steps / epochs)}"
        saved = f"saved every {t.save_every}" if t.save_every else "saved at the end only"
        steps, each = counted(self.steps, "optimiser step"), kind_of(self.recipe).in_words(self.recipe)
        return f"{steps} of {each}{length}, {saved}"

    def _steps_per_epoch(self) -> float | None:
        """The optimiser steps that see every example once; None if the data are a stream."""
        train = self.built.data.train
        return len(train) / self.recipe.train.batch_size if isinstance(train, Dataset) else None
