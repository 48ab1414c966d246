"""A small objective with the loop's contract, and batches for it, where the real model would only be slow.

Like the real one it leaves `signal` unused without a coin, and more than that without a canvas.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding

from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.data.step_batches import rank_slots
from blockdiff.objective import Losses
from blockdiff.parallel.ranks import Ranks
from blockdiff.seeding import Stream, integers, uniform
from blockdiff.training.checkpoint_content import ALONE, FOLDER
from blockdiff.training.checkpoint_writer import CheckpointWriter
from blockdiff.training.optimiser import Ema

VOCABULARY, WIDTH, CANVAS = 13, 8, 4
SEED = 7


class Vocabulary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(VOCABULARY, WIDTH))


class ToyObjective(nn.Module):
    """Predicts each token from its neighbour on the left, in canvases after corruption; returns sums."""

    def __init__(self, seed: int = 0, scale: float = 0.5) -> None:
        super().__init__()
        self.vocabulary = Vocabulary()
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.signal = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("decoder_scalar", torch.ones(1))
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                drawn = uniform(seed, Stream.WEIGHTS, (index,), parameter.numel())
                parameter.copy_(((drawn - 0.5) * scale + (parameter.dim() == 1)).view_as(parameter))

    def predict(self, hidden: Tensor) -> Tensor:
        return torch.tanh(hidden) * self.norm @ self.vocabulary.table.T

    def forward(self, batch: Batch) -> Losses:
        table = self.vocabulary.table
        is_pair = batch.is_ar_scored_BS[:, :-1]
        before, after = batch.tokens_BS[:, :-1][is_pair], batch.tokens_BS[:, 1:][is_pair]
        ar_sum = cross_entropy(self.predict(embedding(before, table)), after, reduction="sum")
        if not batch.is_scored_BCL.any():
            return {"canvas": table.new_zeros(()), "ar": ar_sum}
        where = uniform(SEED, Stream.CORRUPT_WHERE, batch.address_BC3.unbind(-1), CANVAS)
        noise = integers(SEED, Stream.CORRUPT_TOKEN, batch.address_BC3.unbind(-1), CANVAS, VOCABULARY)
        noisy = torch.where(where < batch.t_BC[..., None], noise, batch.canvas_BCL)
        hidden = self.mix(embedding(noisy.roll(1, -1), table)) * self.decoder_scalar
        if batch.coin_BC.any():
            hidden = hidden + batch.coin_BC[..., None, None] * self.signal(embedding(noisy, table))
        logits = self.predict(hidden)[batch.is_scored_BCL]
        canvas_sum = cross_entropy(logits, batch.canvas_BCL[batch.is_scored_BCL], reduction="sum")
        return {"canvas": canvas_sum, "ar": ar_sum}


def toy_row(sample: int, epoch: int = 0, canvases: bool = True, coin: bool | None = None) -> CleanRow:
    """A row of its own length whose tokens count up from the sample id: something to learn."""
    tokens = [2, *((sample + i) % (VOCABULARY - 3) + 3 for i in range(8 + sample % 3))]
    coin = bool(sample % 2) if coin is None else coin
    drawn = [
        Canvas(tokens[start : start + CANVAS], start, t=t, coin=coin, address=(epoch, sample, index))
        for index, (start, t) in enumerate([(1, 0.2 + sample % 4 / 5), (5, 0.5)][: 1 + sample % 2])
    ]
    return CleanRow(tokens, drawn if canvases else [], sample_id=sample)


def toy_batch(samples: range | list[int], epoch: int = 0, canvases: bool = True, coin: bool | None = None) -> Batch:
    return lay_out([toy_row(sample, epoch, canvases, coin) for sample in samples], CANVAS, pad_id=0)


def slots(ranks: Ranks, batch_size: int, micro_batch_size: int | None = None) -> list[range]:
    """The slots of each micro-batch of this rank."""
    mine = rank_slots(ranks.rank, ranks.world, batch_size)
    size = micro_batch_size or batch_size
    return [mine[start : start + size] for start in range(0, len(mine), size)]


def toy_batches(parts: list[range], batch_size: int) -> Callable[[int], list[Batch]]:
    """batches(step) for the loop: the next `batch_size` samples of 24, with new noise every epoch."""

    def batches(step: int) -> list[Batch]:
        first = (step - 1) * batch_size
        return [toy_batch([(first + slot) % 24 for slot in part], epoch=first // 24) for part in parts]

    return batches


def save_checkpoint(
    run: Path,
    step: int,
    objective: nn.Module,
    optimiser: torch.optim.Optimizer,
    facts: dict[str, Any],
    ranks: Ranks = ALONE,
    *,
    average: Ema | None = None,
) -> Path:
    """Write a checkpoint and return it when it is complete."""
    CheckpointWriter(run, ranks).start(step, objective, optimiser, facts, average)
    return run / FOLDER / f"step-{step}"
