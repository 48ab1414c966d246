"""`Callback`: methods that are called during a run, without a subclass of `Trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from blockdiff.errors import RecipeError
from blockdiff.metrics import Record

if TYPE_CHECKING:
    from blockdiff.training.trainer import Trainer


def checked(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks as a list. Raises RecipeError if they are not a list of instances of `Callback`."""
    for each in callbacks if isinstance(callbacks, Sequence) else [callbacks]:
        if not isinstance(callbacks, Sequence) or not isinstance(each, Callback):
            is_class = isinstance(each, type)
            what = f"the class {each.__name__}" if is_class else f"a {type(each).__name__}"
            raise RecipeError(f"callbacks: {what}; pass a list of instances of blockdiff.Callback, such as [Mine()]")
    return list(callbacks)


class Callback:
    """Base class of callbacks: override the methods of interest.

    `trainer` has `step`, `built` (model, optimiser, ...), `records` and `ranks`.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Called on every rank when everything is built and restored."""

    def on_step(self, trainer: Trainer) -> None:
        """Called on every rank after an optimiser step was taken or skipped."""

    def on_record(self, trainer: Trainer, record: Record) -> None:
        """Called on the main process after a record was written to metrics.jsonl."""

    def on_save(self, trainer: Trainer) -> None:
        """Called on every rank when a checkpoint is complete, of `trainer.step` or (save_async) of a step before."""

    def on_end(self, trainer: Trainer) -> None:
        """Called on every rank when the model is exported."""
