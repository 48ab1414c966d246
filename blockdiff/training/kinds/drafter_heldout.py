"""The held-out loss, accuracy and accepted length of a drafter's blocks, by place."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.canvas import PADDING_ROW, Batch, lay_out
from blockdiff.canvas_inputs import with_canvases
from blockdiff.errors import RunError
from blockdiff.metrics import Record
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.signals import Interrupted
from blockdiff.training.step import autocast

if TYPE_CHECKING:
    from blockdiff.draft_objective import DraftObjective


def heldout_drafts(
    objective: DraftObjective, batches: Iterable[Batch], ranks: Ranks, precision: str | None = None
) -> Record:
    """Return means over the batches of all ranks, without means over zero items.

    - `heldout_draft_loss`: cross-entropy of the row's tokens at all scored positions of blocks, in nats.
    - `heldout_draft_accuracy`: the share of these positions whose likeliest token is the row's. `heldout_places`: the
      same for each position of a block, from the first drafted one on.
    - `heldout_accepted_length`: tokens that a round would add: the drafted ones before the first mismatch, and one
      more. Only blocks whose drafted positions are all scored count.

    The ranks run every batch together; a rank without a batch runs one of padding. Raises RunError if the loss is not
    finite, and Interrupted between batches if a rank is to stop.
    """
    L = objective.model.canvas_length
    sums = torch.zeros(3, L + 1, dtype=torch.float64, device=ranks.device)  # right, scored by place; the rest
    mine = list(batches)
    padding = lay_out([PADDING_ROW], L, pad_id=0)
    for batch, _ in zip_longest(mine, range(max(ranks.gather(len(mine)))), fillvalue=padding):
        if ranks.any(ranks.is_stopping() > 0)[0]:
            raise Interrupted
        assert isinstance(batch, Batch)
        batch = with_canvases(batch.to(ranks.device))
        with autocast(ranks.device, precision):
            result = objective.evaluate(batch)
        sums += _sums_of_blocks(batch, result.loss_BCL, result.is_correct_BCL)
    right, scored, (loss, length, blocks, *_) = ranks.sum_of_rows(sums.flatten()).view_as(sums).tolist()
    if not torch.tensor(loss).isfinite():
        raise RunError(
            "the held-out draft loss is not finite: the weights are broken or a held-out row breaks them; "
            "resume from an earlier checkpoint with a lower optim.lr, or look at the rows of data.heldout"
        )
    record: Record = {}
    if count := sum(scored):
        record |= {"heldout_draft_loss": loss / count, "heldout_draft_accuracy": sum(right) / count}
        pairs = zip(right[1:L], scored[1:L], strict=True)
        record["heldout_places"] = [hits / max(1, places) for hits, places in pairs]
    if blocks:
        record["heldout_accepted_length"] = length / blocks
    return record


def _sums_of_blocks(batch: Batch, loss_BCL: Tensor, is_correct_BCL: Tensor) -> Tensor:
    """Return the sums of a batch, float64 [3, 1 + L].

    Rows: the number of correct positions, by position; of scored positions; then loss, accepted tokens and whole
    blocks.
    """
    is_scored_BCL = batch.is_scored_BCL
    is_whole_BC = is_scored_BCL[..., 1:].all(-1) & (batch.length_BC > 0)
    accepted_BC = 1 + is_correct_BCL[..., 1:].long().cumprod(-1).sum(-1)
    sums = torch.zeros(3, loss_BCL.shape[-1] + 1, dtype=torch.float64, device=loss_BCL.device)
    sums[0, :-1], sums[1, :-1] = is_correct_BCL.sum((0, 1)), is_scored_BCL.sum((0, 1))
    sums[2, 0], sums[2, 1], sums[2, 2] = loss_BCL.double().sum(), accepted_BC[is_whole_BC].sum(), is_whole_BC.sum()
    return sums
