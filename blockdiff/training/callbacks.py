"""`Callback`: what is called while a run goes on, for those who do not want to subclass `Trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockdiff.metrics import Record

if TYPE_CHECKING:
    from blockdiff.training.trainer import Trainer


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
        """A checkpoint of `trainer.step` is complete; on every rank."""

    def on_end(self, trainer: Trainer) -> None:
        """The model is exported; on every rank."""
