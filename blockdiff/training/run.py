"""What happens around the loop of a training run: evaluating, sampling, saving, showing, and what is left of it."""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blockdiff import checkpoint, evals
from blockdiff.canvas import Batch
from blockdiff.data.dataset import Dataset
from blockdiff.diffusion.corruption import MaskCorruption
from blockdiff.evals.run import ask
from blockdiff.files import remove_leftovers
from blockdiff.metrics import FILE_NAME, MetricsLog, Record
from blockdiff.models.family import BlockDiffusionModel
from blockdiff.objective import Objective
from blockdiff.parallel.ranks import Ranks
from blockdiff.plots.curves import draw_curves
from blockdiff.sampling import Generation, Sampler
from blockdiff.sampling.choices import Choices
from blockdiff.training import assemble, best, state
from blockdiff.training import data as assemble_data
from blockdiff.training.assemble import Basis
from blockdiff.training.data import Data
from blockdiff.training.ema import Ema
from blockdiff.training.freeze import count_parts
from blockdiff.training.heldout import heldout
from blockdiff.training.loop import Options
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.report import report_line, run_report
from blockdiff.training.samples import FILE_NAME as SAMPLES
from blockdiff.training.samples import sample_prompts
from blockdiff.training.sections import described
from blockdiff.training.trackers import Trackers


@dataclass
class Run:
    """One run directory and everything that trains into it; the loop's callbacks are its methods."""

    recipe: Recipe
    directory: Path
    ranks: Ranks
    show: Progress
    base: Basis
    data: Data
    model: BlockDiffusionModel
    objective: Objective
    optimiser: torch.optim.Optimizer
    ema: Ema | None
    generation: Generation
    choices: Choices
    facts: dict[str, Any]
    records: list[Record] = field(default_factory=list)  # all of metrics.jsonl, on the main process
    trackers: Trackers | None = None
    began: float = field(default_factory=time.perf_counter)

    def begin(self, start: int | None) -> list[Record]:
        """Write what the run is and cut its logs back to step `start`, None = to nothing; returns the records left.

        Only the main process does; the others have none.
        """
        if not self.ranks.is_main:
            return []
        (self.directory / "recipe.yaml").write_text(self.recipe.resolved(), encoding="utf-8")
        told = json.dumps(self.data.report(), indent=1)
        (self.directory / "data.json").write_text(told + "\n", encoding="utf-8")
        # From the beginning, evaluation at step 0 comes again.
        last = -1 if start is None else start
        self.records = self.log.cut(last)
        MetricsLog(self.directory / SAMPLES).cut(last)
        names = self.recipe.train.trackers
        if names:
            self.trackers = Trackers(names, self.directory, self.recipe.model_dump(mode="json"), start or 0)
        return list(self.records)

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of an optimiser step."""
        rows = self.recipe.train.micro_batch_size
        return self.data.batches(step, self.ranks.rank, self.ranks.world, rows)

    def options(self) -> Options:
        """What the loop has to know of the recipe."""
        r, t = self.recipe, self.recipe.train
        is_finite = isinstance(self.data.train, Dataset)
        return Options(
            steps=t.steps,
            ar_weight=0.0 if r.objective.ar_loss is None else r.objective.ar_loss.weight,
            clip=r.optim.clip,
            autocast=t.autocast,
            log_every=t.log_every,
            eval_every=t.eval_every,
            sample_every=r.evaluation.prompts_every,
            save_every=t.save_every,
            non_finite=t.non_finite,
            steps_per_epoch=len(self.data.train) / t.batch_size if is_finite else None,
        )

    @property
    def log(self) -> MetricsLog:
        """metrics.jsonl."""
        return MetricsLog(self.directory / FILE_NAME)

    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that are evaluated and exported: their average where there is one."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def evaluate(self, step: int) -> Record:
        """The held-out record."""
        batches = self.data.heldout_batches(self.ranks.rank, self.ranks.world)
        with self.averaged():
            levels = self.recipe.evaluation.noise_levels
            return heldout(self.objective, batches, self.ranks, self.recipe.train.autocast, levels)

    def sample(self, step: int) -> Record:
        """The record of the sampled prompts; some of their texts go to samples.jsonl."""
        sampler = Sampler(self.model, self.base.tokenizer, self.generation, self.choices)
        with self.averaged():
            sampled = sample_prompts(
                sampler,
                self.data.prompts,
                evals.task(self.recipe.evaluation.task),
                self.ranks,
                seed=self.recipe.seed,
                precision=self.recipe.train.autocast,
                encoder=self.data.encoder,
            )
        if self.ranks.is_main:
            texts = MetricsLog(self.directory / SAMPLES)
            texts.cut(step - 1)  # a run that was killed here has written some already
            for text in sampled.texts:
                texts.append({"step": step, **text})
        return sampled.record

    def record(self, values: Record) -> None:
        """Log a record, show it and hand it to the trackers."""
        self.records.append(values)
        self.log.append(values)
        self.show.record(values)
        if self.trackers is not None:
            self.trackers.log(values)

    def is_best(self, step: int) -> bool:
        """Whether the metric that decides is at its best after this step."""
        metric = self.recipe.evaluation.best
        found = None if metric is None else best.best_of(self.records, metric)
        return found is not None and found[0] == step

    def should_stop(self, step: int) -> bool:
        """Whether the metric that decides has not improved for too long."""
        said = self.recipe.evaluation
        if said.best is None or said.patience is None:
            return False
        return best.evaluations_since_best(self.records, said.best) >= said.patience

    def after_step(self, step: int) -> None:
        """What follows the optimiser."""
        if self.ema is not None:
            self.ema.update(step)

    def save(self, step: int) -> None:
        """Write a checkpoint; the best one so far stays."""
        state.save(
            self.directory,
            step,
            self.model,
            self.optimiser,
            self.facts,
            self.recipe.train.keep,
            self.ranks,
            ema=self.ema,
            keep_every=self.recipe.train.keep_every,
            protect=self._protected(),
        )

    def _protected(self) -> tuple[int, ...]:
        """The best step that is saved, which stays however old it gets."""
        found = self._best_saved()
        return () if found is None else (found[0],)

    def _best_saved(self) -> tuple[int, float] | None:
        metric = self.recipe.evaluation.best
        saved = state.steps_saved(self.directory)
        return None if metric is None else best.best_of(self.records, metric, among=saved)

    def export(self) -> str:
        """Write model/ in the Hub's layout, with the best weights if a metric decides; says which in words."""
        found = self._best_saved()
        which = "the last weights"
        if found is not None:
            step, value = found
            state.restore_weights(state.steps_saved(self.directory)[step], self.model, self.ema)
            which = f"the weights of step {step}, best {self.recipe.evaluation.best} {value:.4g}"
        if self.ema is not None:
            which += " (averaged)"
        with self.averaged():
            checkpoint.save(
                self.model,
                self.directory / "model",
                tokenizer=self.base.tokenizer,
                generation_config=self.generation,
                overwrite=True,
                choices=self.choices,
            )
        remove_leftovers(self.directory, "model")  # of an export that was killed
        return which

    def finish(self, reached: int) -> None:
        """Export the model, draw the curves, and say in one line what the run was."""
        t = self.recipe.train  # a kill in the last save may have left what it was about to remove
        state.prune(self.directory, t.keep, keep_every=t.keep_every, protect=self._protected())
        which = self.export()
        draw_curves(self.directory / FILE_NAME, self.directory / "curves.png", title=self.directory.name)
        report = run_report(
            self.records,
            run=self.directory.name,
            batch_size=self.recipe.train.batch_size,
            examples=len(self.data.train) if isinstance(self.data.train, Dataset) else None,
            device=self.ranks.device,
            world=self.ranks.world,
            best=self.recipe.evaluation.best,
            wall_seconds=time.perf_counter() - self.began,
        )
        (self.directory / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        end = "" if reached == self.recipe.train.steps else f", ended early at step {reached}"
        self.show.line(f"done      {self.directory}/model: {which}{end}; curves.png, report.json")
        self.show.line(f"report    {report_line(report)}")

    def close(self) -> None:
        """Let the trackers write out what they have, however the run ended."""
        if self.trackers is not None:
            self.trackers.finish()


def prepare(recipe: Recipe, directory: Path, ranks: Ranks, show: Progress) -> Run:
    """Everything a recipe names, made; says on the terminal what it is."""
    base = assemble.basis(recipe)
    generation = assemble.generation(recipe, base)
    chosen = choices(recipe, base)
    data = assemble_data.data(recipe, base, lambda: ranks.main_first("reading the data"))
    for line in data.lines():
        show.line(line)
    if data.prompts:
        ask(data.prompts, evals.task(recipe.evaluation.task), data.encoder)  # a wrong row is refused before training
    model = assemble.model(recipe, base, ranks.device)
    objective = assemble.objective(recipe, base, model)
    origin = recipe.model.path or f"preset {recipe.model.preset}"
    show.line(f"model     {origin}, {model.dtype}".replace("torch.", ""))
    show.parts(count_parts(model))
    t, said = recipe.train, described(recipe.data.canvases)
    words = " ".join(str(word) for item in said.items() for word in item) if isinstance(said, dict) else str(said)
    scored = f"{words} canvas{'es' * (words != '1')}"
    epochs = f", {t.steps * t.batch_size / len(data.train):.1f} epochs" if isinstance(data.train, Dataset) else ""
    saved = f"saved every {t.save_every}" if t.save_every else "saved at the end only"
    plan = f"{t.steps} optimiser steps of {t.batch_size} examples, {scored} of each{epochs}, {saved}"
    show.line(f"run       {directory}: {plan}, {ranks.world} x {ranks.device}")
    return Run(
        recipe,
        directory,
        ranks,
        show,
        base,
        data,
        model,
        objective,
        assemble.optimiser(recipe, objective),
        Ema(objective, recipe.optim.ema) if recipe.optim.ema is not None else None,
        generation,
        chosen,
        assemble_data.facts(recipe, base, data),
    )


def choices(recipe: Recipe, base: Basis) -> Choices:
    """What the sampler has to know of how a model was trained."""
    corruption = assemble.corruption(recipe, base)
    mask_id = corruption.mask_id if isinstance(corruption, MaskCorruption) else None
    return Choices(
        prediction=recipe.objective.prediction,
        corruption="uniform" if mask_id is None else "mask",
        mask_id=mask_id,
        objective=recipe.objective.model_dump(mode="json"),
    )
