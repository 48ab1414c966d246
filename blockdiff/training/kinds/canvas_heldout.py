"""The held-out losses and accuracies of canvases and next tokens: over all held-out examples and by noise level.

The draws of held-out batches are addressed by example and never change, so two evaluations differ by the weights only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.canvas import Batch
from blockdiff.errors import RunError
from blockdiff.metrics import Record
from blockdiff.objective import evaluating
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.turns import measuring
from blockdiff.training.step import autocast

if TYPE_CHECKING:
    from blockdiff.objective import Evaluation, Objective

GROUPS = ("kept", "corrupted")  # of positions, by is_corrupted as an index
MEASURES = ("loss", "accuracy", "loss_no_signal", "accuracy_no_signal")


def heldout(
    objective: Objective,
    batches: Iterable[Batch],
    ranks: Ranks,
    precision: str | None = None,
    noise_levels: int = 5,
) -> Record:
    """Return token means over the batches of all ranks, losses in nats, without means over zero tokens.

    - `heldout_canvas_loss`, `heldout_canvas_accuracy`: scored canvas positions. A fixed coin decides whether a canvas
      gets the self-conditioning signal. The loss is plain cross-entropy, so that runs with different weights,
      normalisation or positions can be compared.
    - `heldout_response_accuracy`: the same accuracy without the fill.
    - `heldout_weighted_loss`: the canvas loss of training, with its weights, positions and normalisation.
    - `heldout_ar_loss`, `heldout_ar_accuracy`: next tokens of the clean rows.
    - `heldout_{corrupted,kept}_{loss,accuracy}`: the scored positions that the noise drew for replacement, and the
      others, every canvas with the signal; `..._no_signal`: every canvas without it.
    - `heldout_levels`: the same for each of `noise_levels` equal parts of [0, 1] in which t falls: a list of {t_from,
      t_to} with {corrupted,kept}_{count,loss,accuracy,loss_no_signal,accuracy_no_signal}.

    Ranks may bring different numbers of batches, or none. Sums are float64 and are added over the ranks once. Raises
    RunError on every rank if a sum is not finite, and Interrupted between batches if a rank is to stop.
    """
    levels = torch.zeros(noise_levels, len(GROUPS), 1 + len(MEASURES), dtype=torch.float64, device=ranks.device)
    # Counts and sums: with the signal as coins decide, the same without fill, as training weights them, of next tokens.
    by_coin, response, weighted, ar = (torch.zeros(n, dtype=torch.float64, device=ranks.device) for n in (3, 2, 2, 3))
    # A rank that takes part in another rank's batch computes in the same precision.
    narrow, together = autocast(ranks.device, precision), measuring(objective, ranks, "the held-out evaluation")
    with evaluating(objective), narrow, together as look:
        for batch in batches:
            look()
            batch = batch.to(ranks.device)
            evaluation = objective.evaluate(batch)
            if batch.is_scored_BCL.any():
                levels += _by_level(evaluation, batch, noise_levels)
                loss_BCL, is_correct_BCL = _at_coin(evaluation, batch)
                by_coin += _sums(batch.is_scored_BCL, loss_BCL, is_correct_BCL)
                response += _sums(batch.is_scored_BCL & ~batch.is_fill_BCL, is_correct_BCL)
                weighted[0] += objective.canvas_count(batch)
                weighted[1] += (evaluation.factor_BCL.double() * loss_BCL).sum()
            ar += _sums(batch.is_ar_scored_BS, evaluation.ar_loss_BS, evaluation.ar_is_correct_BS)
    sums = [levels, by_coin, response, weighted, ar]
    flat = ranks.sum_of_rows(torch.cat([each.flatten() for each in sums])).cpu()
    levels, by_coin, response, weighted, ar = (
        total.view_as(each) for total, each in zip(flat.split([each.numel() for each in sums]), sums, strict=True)
    )
    for name, totals in {"canvas": levels, "AR": ar}.items():
        if not totals.isfinite().all():
            raise RunError(
                f"the held-out {name} loss is not finite: the weights are broken or a held-out row breaks them; "
                "resume from an earlier checkpoint with a lower optim.lr, or look at the rows of data.heldout"
            )
    record: Record = {
        **_means("heldout_canvas_", by_coin, MEASURES[:2]),
        **_means("heldout_response_", response, MEASURES[1:2]),
        **_means("heldout_weighted_", weighted, MEASURES[:1]),
        **_means("heldout_ar_", ar, MEASURES[:2]),
        **_of_groups("heldout_", levels.sum(0)),
    }
    record["heldout_levels"] = [
        {
            "t_from": round(number / noise_levels, 6),
            "t_to": round((number + 1) / noise_levels, 6),
            **{f"{group}_count": int(of_group[0]) for group, of_group in zip(GROUPS, level, strict=True)},
            **_of_groups("", level),
        }
        for number, level in enumerate(levels)
    ]
    return record


def _by_level(evaluation: Evaluation, batch: Batch, noise_levels: int) -> Tensor:
    """Return sums over a batch's scored positions, [noise_levels, groups, 1 + measures]: their number, then measures.

    groups: positions that the noise kept, then corrupted ones.
    """
    is_scored_BCL = batch.is_scored_BCL
    level_BC = (batch.t_BC.double() * noise_levels).long().clamp(0, noise_levels - 1)
    place_N = (level_BC[..., None] * len(GROUPS) + evaluation.is_corrupted_BCL)[is_scored_BCL]
    columns = (
        torch.ones_like(evaluation.loss_BCL),
        evaluation.signal_loss_BCL,
        evaluation.signal_is_correct_BCL,
        evaluation.loss_BCL,
        evaluation.is_correct_BCL,
    )
    values = torch.stack([column[is_scored_BCL].double() for column in columns], 1)
    sums = values.new_zeros(noise_levels * len(GROUPS), len(columns)).index_add_(0, place_N, values)
    return sums.view(noise_levels, len(GROUPS), len(columns))


def _at_coin(evaluation: Evaluation, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return loss and correctness of every position [B, C, L], with the signal if the canvas's coin is true."""
    coin_BC1 = batch.coin_BC[..., None]
    return (
        evaluation.signal_loss_BCL.where(coin_BC1, evaluation.loss_BCL),
        evaluation.signal_is_correct_BCL.where(coin_BC1, evaluation.is_correct_BCL),
    )


def _sums(is_scored: Tensor, *columns: Tensor) -> Tensor:
    """Return the number of scored positions and the sum of every column over them: float64 [1 + columns]."""
    return torch.stack([is_scored.sum().double(), *(column[is_scored].double().sum() for column in columns)])


def _means(prefix: str, sums: Tensor, names: tuple[str, ...]) -> dict[str, float]:
    count, *totals = sums.tolist()
    return {prefix + name: total / count for name, total in zip(names, totals, strict=True)} if count else {}


def _of_groups(prefix: str, sums: Tensor) -> dict[str, float]:
    """Return the means of sums [groups, 1 + measures] by name, corrupted positions first."""
    intact, corrupted = (_means(f"{prefix}{group}_", each, MEASURES) for group, each in zip(GROUPS, sums, strict=True))
    return corrupted | intact
