"""A toy kind of run, and a trainer of it without rows or an exported model, with functions to watch it by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from blockdiff.canvas import Batch
from blockdiff.metrics import FILE_NAME, MetricsLog, Record
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import replicate
from blockdiff.training.built import Built, Source
from blockdiff.training.callbacks import Callback
from blockdiff.training.kinds.kind import Kind
from blockdiff.training.optimiser import Ema
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.run import hold_run
from blockdiff.training.samples import Sampled
from blockdiff.training.step import Loss
from blockdiff.training.trackers import Trackers
from blockdiff.training.trainer import Trainer


class Toy(Kind):
    """The losses of a toy objective; `call` gives what is measured, by name."""

    kind: str = "toy"
    ar_weight: float = 1.0
    call: Any = None

    def losses(self, objective: Any) -> dict[str, Loss]:
        return {"canvas": Loss(Batch.canvas_count), "ar": Loss(Batch.ar_count, self.ar_weight)}

    def evaluate(self, objective: Any, batches: Iterable[Batch], ranks: Ranks, precision: str | None) -> Record:
        return self.call("evaluate")

    def sample(self, *parts: Any) -> Sampled:
        return Sampled(self.call("sample"), [])


class Given(Source):
    """The batches of a function."""

    def __init__(self, batches: Callable[[int], Sequence[Batch]]) -> None:
        self.batches = batches

    def __call__(self, step: int) -> Sequence[Batch]:
        return self.batches(step)


@dataclass(frozen=True)
class Options:
    """The recipe of a toy run."""

    steps: int
    ar_weight: float = 1.0
    clip: float = 1.0
    autocast: Literal["bfloat16"] | None = None
    log_every: int = 10
    eval_every: int = 0
    sample_every: int = 0
    save_every: int = 0
    keep: int = 2
    non_finite: Literal["stop", "skip"] = "stop"
    steps_per_epoch: float | None = None


class Watching(Callback):
    """Calls the functions of a toy trainer where a run calls back."""

    def on_step(self, trainer: Any) -> None:
        trainer.call("on_step")

    def on_save(self, trainer: Any) -> None:
        trainer.call("save")

    def on_record(self, trainer: Any, record: Record) -> None:
        if "log" in trainer.watch:
            trainer.watch["log"](record)


class ToyTrainer(Trainer):
    """A trainer of what is given, whose methods call the functions in `watch` where there are any.

    logged: the records of the run so far, in place of those in its directory.
    """

    def __init__(
        self,
        objective: nn.Module,
        optimiser: torch.optim.Optimizer,
        lr: Callable[[int], float],
        batches: Callable[[int], Sequence[Batch]],
        options: Options,
        ranks: Ranks,
        *,
        output: str | Path,
        facts: Mapping[str, Any] | None = None,
        average: Ema | None = None,
        logged: Sequence[Record] | None = None,
        start: int = 0,
        **watch: Any,
    ) -> None:
        o = options
        train = {key: getattr(o, key) for key in ("steps", "autocast", "log_every", "eval_every", "save_every", "keep")}
        recipe = Recipe.model_validate(
            {
                "model": {"preset": "tiny"},
                "data": {"train": "rows.jsonl"},
                "optim": {"clip": o.clip},
                "train": {**train, "batch_size": 1, "non_finite": o.non_finite},
                "evaluation": {"prompts_every": o.sample_every},
            }
        )
        super().__init__(recipe, output=output, kind=Toy(ar_weight=o.ar_weight, call=self.call), callbacks=[Watching()])
        is_stopping = watch.pop("is_stopping", None)
        self.ranks = ranks if is_stopping is None else replace(ranks, is_stopping=is_stopping)
        self.options, self.watch, self.logged = o, watch, logged
        data: Any = SimpleNamespace(
            heldout=watch.get("evaluate"), prompts=watch.get("sample"), heldout_batches=lambda *ranks: ()
        )
        nothing: Any = None
        self.built = Built(
            base=nothing,
            data=data,
            model=nothing,
            objective=objective,
            losses=self.recipe.objective.losses(objective),
            mesh=Mesh(ranks),
            module=replicate(objective, Mesh(ranks)),
            precision=o.autocast,
            optimiser=optimiser,
            learning_rate=lr,
            average=average,
            source=Given(batches),
            diffusion=nothing,
            facts=dict(facts or {}),
            steps=o.steps,
            step=start,
        )

    def call(self, name: str, default: Any = None) -> Any:
        function = self.watch.get(name)
        return default if function is None else function(self.step)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with hold_run(self.directory, True, self.ranks), self.ranks.guarded(lambda: self.doing):
            self._start(None)
            with closing(self.saver):
                yield

    def _start(self, checkpoint: Path | None) -> None:
        """Begin in the run's directory with what was given, which is at the step that it says."""
        self.directory_stat = self.directory.stat()
        self.show = Progress(self.built.steps, is_shown=False)
        records = list(self.logged or ())
        if self.logged is None and self.ranks.is_main:
            records = MetricsLog(self.directory / FILE_NAME).cut(self.built.step or -1)
        self._begin(self.built, records)
        self.sampler: Any = SimpleNamespace(release=lambda: None)
        self.trackers = Trackers((), self.directory, {})

    def update(self, gradient: Any) -> None:
        super().update(gradient)
        self.call("after_step")

    def _is_best(self) -> bool:
        return self.call("is_best", False)

    def _should_stop(self) -> bool:
        return self.call("should_stop", False)

    def _steps_per_epoch(self) -> float | None:
        return self.options.steps_per_epoch


def train(*parts: Any, output: Path | None = None, **watch: Any) -> int:
    """Run a toy trainer to its last step, which it returns; without an `output` its directory is a passing one."""
    with TemporaryDirectory() if output is None else nullcontext(output) as directory:
        trainer = ToyTrainer(*parts, output=directory, **watch)
        with trainer._running():
            trainer._take_steps()
    return trainer.step
