"""A toy kind of run, and a trainer of it without rows or a run directory, with functions to watch it by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from blockdiff.canvas import Batch
from blockdiff.metrics import Record
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import replicate
from blockdiff.training.built import Source
from blockdiff.training.kinds.kind import Kind
from blockdiff.training.recipe import Recipe
from blockdiff.training.samples import Sampled
from blockdiff.training.step import Loss
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
    non_finite: Literal["stop", "skip"] = "stop"
    steps_per_epoch: float | None = None


class ToyTrainer(Trainer):
    """A trainer of what is given, whose methods call the functions in `watch` where there are any."""

    def __init__(
        self,
        objective: nn.Module,
        optimiser: torch.optim.Optimizer,
        lr: Callable[[int], float],
        batches: Callable[[int], Sequence[Batch]],
        options: Options,
        ranks: Ranks,
        *,
        logged: Sequence[Record] | None = None,
        start: int = 0,
        seconds: float = 0.0,
        **watch: Any,
    ) -> None:
        o = options
        train = {key: getattr(o, key) for key in ("steps", "autocast", "log_every", "eval_every", "save_every")}
        recipe = Recipe.model_validate(
            {
                "model": {"preset": "tiny"},
                "data": {"train": "rows.jsonl"},
                "optim": {"clip": o.clip},
                "train": {**train, "batch_size": 1, "non_finite": o.non_finite},
                "evaluation": {"prompts_every": o.sample_every},
            }
        )
        super().__init__(recipe, output=".", kind=Toy(ar_weight=o.ar_weight, call=self.call))
        is_stopping = watch.pop("is_stopping", None)
        self.ranks = ranks if is_stopping is None else replace(ranks, is_stopping=is_stopping)
        self.options, self.watch = o, watch
        self.show = SimpleNamespace(line=lambda _: None, step=lambda step: self.call("on_step"))
        data: Any = SimpleNamespace(
            heldout=watch.get("evaluate"), prompts=watch.get("sample"), heldout_batches=lambda *ranks: ()
        )
        built: Any = SimpleNamespace(
            objective=objective,
            losses=self.recipe.objective.losses(objective),
            module=replicate(objective, Mesh(ranks)),
            mesh=Mesh(ranks),
            precision=o.autocast,
            optimiser=optimiser,
            learning_rate=lr,
            average=None,
            averaged=nullcontext,
            source=Given(batches),
            data=data,
            base=None,
            step=start,
            steps=o.steps,
        )
        self._begin(built, list(logged or ()))
        self.sampler: Any = SimpleNamespace(release=lambda: None)
        self.clock._seconds += seconds

    def call(self, name: str, default: Any = None) -> Any:
        function = self.watch.get(name)
        return default if function is None else function(self.step)

    @contextmanager
    def _running(self) -> Iterator[None]:
        with self.ranks.guarded(lambda: self.doing):
            yield

    def update(self, gradient: Any) -> None:
        super().update(gradient)
        self.call("after_step")

    def _is_best(self) -> bool:
        return self.call("is_best", False)

    def _should_stop(self) -> bool:
        return self.call("should_stop", False)

    def record(self, record: Record) -> None:
        if self.ranks.is_main:
            self.records.append(record)
            self.watch["log"](record)

    def _ensure_saved(self, is_waiting: bool = False) -> None:
        if self.watch.get("save"):
            super()._ensure_saved(is_waiting)

    def save(self, step: int) -> None:
        self.call("save")

    def _prune(self) -> None:
        pass

    def _finish(self) -> None:
        pass

    def _steps_per_epoch(self) -> float | None:
        return self.options.steps_per_epoch


def train(*parts: Any, **watch: Any) -> int:
    """Run a toy trainer to its end and return the step it reached."""
    trainer = ToyTrainer(*parts, **watch)
    trainer.fit()
    return trainer.step
