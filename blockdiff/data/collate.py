"""Which examples an optimiser step sees, which of their canvases are run, and with what noise level and coin.

Every draw is addressed by sample, epoch, optimiser step or slot, so nothing here depends on rank, world size,
micro-batch or a restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from blockdiff.canvas import Batch, Canvas, CleanRow, cut, fill, lay_out
from blockdiff.data.chat import Example
from blockdiff.data.plan import Plan
from blockdiff.diffusion.schedule import TimeDraw
from blockdiff.errors import DataError
from blockdiff.seeding import Stream, uniform

HELDOUT = -1  # epoch and optimiser step of held-out evaluation: its draws never change


@dataclass(frozen=True)
class Collator:
    """Makes a `Batch` of examples: chooses canvases, draws noise levels and coins, lays everything out.

    `canvases` of each example are run (all where it has fewer), filled up with `eos_id`; `coin_probability`
    is the chance that a canvas gets the self-conditioning signal. Without `scores_ar` (an AR weight of 0) no pair of
    the clean row is scored, and columns that no canvas sees are left out.
    """

    canvas_length: int
    pad_id: int
    eos_id: int
    seed: int
    time: TimeDraw
    canvases: int | Literal["all"] = 1
    coin_probability: float = 0.5
    scores_ar: bool = True

    def __call__(
        self,
        examples: Sequence[Example],
        *,
        epoch: int | Sequence[int],
        step: int,
        slots: Sequence[int],
        total_slots: int,
    ) -> Batch:
        """The batch of `examples`, which stand at `slots` of the global batch of `total_slots` rows.

        `epoch` is one number or one per example. Canvas choice and coin are addressed by (epoch, sample,
        canvas), noise levels by (step, slot, rank of the canvas among the chosen).
        """
        epochs = [epoch] * len(examples) if isinstance(epoch, int) else list(epoch)
        pieces = [
            [piece for span in example.responses for piece in cut(span, self.canvas_length)]
            for example in examples
        ]
        chosen = self._choose(examples, epochs, [len(each) for each in pieces])
        flat = [
            (row, canvas, rank) for row, canvases in enumerate(chosen) for rank, canvas in enumerate(canvases)
        ]
        row_N, canvas_N, rank_N = torch.tensor(flat, dtype=torch.int64).reshape(-1, 3).unbind(1)
        epoch_N, slot_N = torch.tensor(epochs)[row_N], torch.tensor(list(slots))[row_N]
        sample_N = torch.tensor([example.sample_id for example in examples])[row_N]
        coin_N = (
            uniform(self.seed, Stream.COIN, (epoch_N, sample_N, canvas_N), 1)[:, 0] < self.coin_probability
        )
        t_N = self.time.draw(self.seed, step, slot_N, rank_N, total_slots)
        canvases_of: list[list[Canvas]] = [[] for _ in examples]
        for (row, canvas, _), t, coin in zip(flat, t_N.tolist(), coin_N.tolist(), strict=True):
            start, end = pieces[row][canvas]
            example = examples[row]
            tokens = fill(example.tokens[start:end], self.canvas_length, self.eos_id)
            address = (epochs[row], example.sample_id, canvas)
            canvases_of[row].append(Canvas(tokens, start, t=t, coin=coin, address=address))
        rows = [
            CleanRow(self._seen(example, canvases), canvases, example.sample_id)
            for example, canvases in zip(examples, canvases_of, strict=True)
        ]
        batch = lay_out(rows, self.canvas_length, self.pad_id)
        if not self.scores_ar:
            batch = replace(batch, is_ar_scored_BS=torch.zeros_like(batch.is_ar_scored_BS))
        return batch

    def _seen(self, example: Example, canvases: Sequence[Canvas]) -> Sequence[int]:
        """The clean tokens that a loss or a canvas reads."""
        return example.tokens if self.scores_ar else example.tokens[: max(canvas.start for canvas in canvases)]

    def _choose(self, examples: Sequence[Example], epochs: list[int], counts: list[int]) -> list[list[int]]:
        """For each example the canvases to run, in order: those with the smallest of one key per canvas."""
        if self.canvases == "all" or max(counts) <= self.canvases:
            return [list(range(count)) for count in counts]
        sample_B = torch.tensor([example.sample_id for example in examples])
        keys = uniform(
            self.seed, Stream.CANVAS_CHOICE, (torch.tensor(epochs), sample_B), max(counts)
        ).tolist()
        return [
            sorted(sorted(range(count), key=own.__getitem__)[: self.canvases])
            for count, own in zip(counts, keys, strict=True)
        ]


def slots_of(rank: int, world: int, total: int) -> range:
    """The slots of a global batch of `total` rows that one of `world` ranks takes: as even as can be."""
    return range(rank * total // world, (rank + 1) * total // world)


def micro_batches(
    examples: Sequence[Example],
    plan: Plan,
    collator: Collator,
    step: int,
    *,
    micro_batch_size: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> list[Batch]:
    """This rank's part of the global batch of an optimiser step (from 1), in micro-batches on the CPU.

    Raises DataError when there are fewer rows than ranks.
    """
    if plan.batch_size < world:
        raise DataError(
            f"batch_size {plan.batch_size} is less than {world} processes; raise train.batch_size"
        )
    taken = plan(step)
    slots = slots_of(rank, world, plan.batch_size)
    size = micro_batch_size or len(slots)
    return [
        collator(
            [examples[taken[slot][1]] for slot in part],
            epoch=[taken[slot][0] for slot in part],
            step=step,
            slots=part,
            total_slots=plan.batch_size,
        )
        for part in (slots[start : start + size] for start in range(0, len(slots), size))
    ]


def heldout_batches(
    examples: Sequence[Example], collator: Collator, batch_size: int, *, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """This rank's part of the held-out examples; canvases, noise levels and coins are always the same."""
    slots = slots_of(rank, world, len(examples))
    for start in range(0, len(slots), batch_size):
        part = slots[start : start + batch_size]
        chosen = [examples[slot] for slot in part]
        yield collator(chosen, epoch=HELDOUT, step=HELDOUT, slots=part, total_slots=len(examples))
