"""`Callback`: what is called while a run goes on, for those who do not want to subclass `Trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from blockdiff.errors import RecipeError
from blockdiff.metrics import Record

if TYPE_CHECKING:
    from blockdiff.training.trainer import Trainer


def checked(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks as a list; RecipeError for what is no list of instances of `Callback`."""
    for each in callbacks if isinstance(callbacks, Sequence) else [callbacks]:
        if not isinstance(callbacks, Sequence) or not isinstance(each, Callback):
            is_class = isinstance(each, type)
            what = f"the class {each.__name__}" if is_class else f"a {type(each).__name__}"
            raise RecipeError(f"callbacks: {what}; give a list of instances of blockdiff.Callback, such as [Mine()]")
    return list(callbacks)


class Callback:
    """Override the methods that are of interest.

    `trainer` has `step`, `built` (model, optimiser, ...), `records` and `ranks`.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Everything is built and restored; on every rank."""

    def on_step(self, trainer: Trainer) -> None:
        """An optimiser step was taken or skipped; on every rank."""

    def on_record(self, trainer: Trainer, record: Record) -> None:
        """A record was written to metrics.jsonl; on the main process only."""

    def on_save(self, trainer: Trainer) -> None:
        """A checkpoint is complete; on every rank. It is that of `trainer.step`, with save_async of one before."""

    def on_end(self, trainer: Trainer) -> None:
        """The model is exported; on every rank."""
