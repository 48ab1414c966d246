"""The held-out losses: the objective over fixed batches, whose addressed draws are the same every time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from blockdiff.canvas import Batch
from blockdiff.training.parallel import Parallel, autocast


@torch.no_grad()
def heldout_losses(
    objective: nn.Module, batches: Iterable[Batch], parallel: Parallel, precision: str | None = None
) -> dict[str, float]:
    """`heldout_canvas_loss` and `heldout_ar_loss`, token means in nats over the batches of all ranks.

    Ranks may bring different numbers of batches, or none. A loss that nothing was scored for is left out.
    """
    totals = torch.zeros(4, dtype=torch.float64, device=parallel.device)
    was_training = objective.training
    objective.eval()
    for batch in batches:
        with autocast(parallel.device, precision):
            losses = objective(batch.to(parallel.device))
        totals[0] += losses.canvas_sum
        totals[1] += losses.ar_sum
        totals[2] += batch.canvas_count()
        totals[3] += batch.ar_count()
    objective.train(was_training)
    canvas_sum, ar_sum, canvas_count, ar_count = parallel.sum(totals).tolist()
    means = {"heldout_canvas_loss": (canvas_sum, canvas_count), "heldout_ar_loss": (ar_sum, ar_count)}
    return {name: total / count for name, (total, count) in means.items() if count}
