"""The losses and gradient of one optimiser step over micro-batches and ranks, and the steps that are skipped.

Nothing here changes weights: the trainer decides whether to take the optimiser step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from blockdiff.canvas import PADDING_ROW, Batch, lay_out
from blockdiff.errors import RunError
from blockdiff.metrics import Record, metric
from blockdiff.models.adapters import cast_once
from blockdiff.parallel.mesh import Mesh
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.shard import exchange_others, exchanging, loss_factor, require_sums
from blockdiff.seeding import Stream, words
from blockdiff.training.optimiser import fill_gradients, gradient_norm

MAX_SKIPS = 20  # the largest number of steps in a row that a run skips because they are not finite
MAX_UNSCORED = 20  # the number of optimiser steps in a row without scored positions that ends a run
NAMED_SAMPLES = 64  # the largest number of sample ids in a message


@dataclass(frozen=True)
class Loss:
    """A loss of a run: `count` returns a batch's part of its divisor, `weight` is its weight in the total."""

    count: Callable[[Batch], float]
    weight: float = 1.0


@dataclass(frozen=True)
class Counts:
    """The counts of an optimiser step over all micro-batches and ranks."""

    divisors: dict[str, float]  # of each loss, by name
    tokens_2: Tensor  # [clean and canvas tokens without padding, scored canvas positions and next-token pairs]

    @classmethod
    def over_ranks(cls, batches: Sequence[Batch], losses: Mapping[str, Loss], ranks: Ranks) -> Counts:
        """Sum the counts of all ranks' micro-batches. batches: those of this rank."""
        local = [sum(loss.count(batch) for batch in batches) for loss in losses.values()]
        local.append(sum(int((batch.doc_start_BS >= 0).sum() + batch.length_BC.sum()) for batch in batches))
        local.append(sum(int(batch.is_scored_BCL.sum() + batch.is_ar_scored_BS.sum()) for batch in batches))
        counts = ranks.sum_of_rows(torch.tensor(local, dtype=torch.float64))
        return cls(dict(zip(losses, counts.tolist(), strict=False)), counts[len(losses) :])

    @property
    def has_scored(self) -> bool:
        """Whether any position is scored. Otherwise there is nothing to learn and no optimiser step to take."""
        return bool(self.tokens_2[1] > 0)


@dataclass(frozen=True)
class Gradient:
    """The losses of an optimiser step and the norm of its gradient, which is in the parameters' `grad`."""

    sums: Tensor  # of each loss, float64 [micro-batches of this rank, losses]
    names: tuple[str, ...]  # of the losses
    losses: Record  # over all ranks: "loss", the weighted sum, and each mean as NAME_loss, except means of nothing
    norm: float  # over all ranks

    @property
    def is_finite(self) -> bool:
        """Whether losses and gradient are finite. All ranks have the same numbers, so they agree."""
        return all(math.isfinite(value) for value in (*self.losses.values(), self.norm))


def backpropagate(
    module: nn.Module,
    weights: list[nn.Parameter],
    batches: Sequence[Batch],
    losses: Mapping[str, Loss],
    counts: Counts,
    precision: str | None,
    mesh: Mesh,
) -> Gradient:
    """Compute the gradient of the global batch, all ranks' micro-batches, in the `grad` of `weights`.

    batches: this rank's micro-batches. losses: by the names of the sums that `module` returns. precision: the dtype of
    autocast (None: no autocast). Raises RunError if `module` returns other losses.
    """
    ranks, factor = mesh.ranks, loss_factor(module, mesh)
    if mesh.is_split:
        batches = _padded(batches, ranks)
    sums = torch.zeros(max(1, len(batches)), len(losses), dtype=torch.float64, device=ranks.device)
    with cast_once(module):
        for index, batch in enumerate(batches):
            with exchanging(module, now=index == len(batches) - 1):
                with autocast(ranks.device, precision):
                    batch_sums = module(batch.to(ranks.device, non_blocking=True))
                    require_sums(batch_sums)
                if batch_sums.keys() != losses.keys():
                    raise RunError(
                        f"objective: its forward() returned the losses {', '.join(batch_sums)}; it should return those "
                        f"of the kind of run, {', '.join(losses)}"
                    )
                total = _total(batch_sums, losses, counts)
                if total.requires_grad:
                    (factor * total).backward()  # the factor makes up for averaging over ranks, so gradients are summed
            sums[index] = torch.stack([batch_sums[name].detach() for name in losses])
    fill_gradients(weights)
    exchange_others(module, weights, mesh)
    means: Record = {}
    totals = dict(zip(losses, ranks.sum_of_rows(sums.sum(0)).tolist(), strict=True))
    means["loss"] = _total(totals, losses, counts)
    means |= {f"{name}_loss": total / count for name, total in totals.items() if (count := counts.divisors[name])}
    return Gradient(sums, tuple(losses), means, gradient_norm(weights, ranks))


def _total(sums: Mapping[str, Any], losses: Mapping[str, Loss], counts: Counts) -> Any:
    """Return the weighted sum of the losses' means. This is the one function that divides by counts."""
    terms = [loss.weight * sums[name] / (counts.divisors[name] or 1.0) for name, loss in losses.items()]
    return sum(terms[1:], start=terms[0])


def _padded(batches: Sequence[Batch], ranks: Ranks) -> list[Batch]:
    """Append empty micro-batches so that all ranks have equally many: they run a split model together."""
    count = max(ranks.gather(len(batches))) - len(batches)
    empty = lay_out([PADDING_ROW], batches[0].canvas_BCL.shape[-1], pad_id=0) if count else None
    return [*batches, *([] if empty is None else [empty] * count)]


class UnscoredSteps:
    """Counts optimiser steps in a row without scored positions, in a run of `steps` optimiser steps."""

    def __init__(self, steps: int) -> None:
        self.limit = min(MAX_UNSCORED, steps)
        self.in_a_row = 0
        self.was_reported = False

    def note(self, step: int, unscored: tuple[str, str] | None) -> str | None:
        """Return a line for the user about the first such step of a run. Raises RunError at the limit.

        unscored: why nothing is scored in the step, and what to do about it; None if something is. It must be the same
        on all ranks.
        """
        if unscored is None:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        why, remedy = unscored
        if self.in_a_row >= self.limit:
            raise RunError(f"step {step}: {why}, in {self.in_a_row} steps in a row, so nothing is learnt; {remedy}")
        if self.was_reported:
            return None
        self.was_reported = True
        return f"step {step}: {why}, so this step learns nothing; {self.limit} such steps in a row end the run"


class SkippedSteps:
    """The optimiser steps that were not taken because a loss or the gradient was not finite."""

    def __init__(self, policy: Literal["stop", "skip"], steps: Sequence[int] = ()) -> None:
        self.policy, self.steps = policy, list(steps)

    def note(self, step: int, batches: Sequence[Batch], gradient: Gradient, ranks: Ranks) -> Record:
        """Return the record of a skipped step. Raises RunError if the policy or too many in a row stop the run.

        All ranks call it together, since they have the same gradient.
        """
        broken, samples = culprit(batches, gradient, ranks)
        named = ", ".join(map(str, samples[:NAMED_SAMPLES])) + (", ..." if len(samples) > NAMED_SAMPLES else "")
        what = f"step {step}: the {broken} is not finite (sample ids {named})"
        if self.policy == "stop":
            raise RunError(f"{what}; look at these samples, or resume from the last checkpoint with a lower optim.lr")
        self.steps.append(step)
        if self.steps[-MAX_SKIPS - 1 :] == list(range(step - MAX_SKIPS, step + 1)):
            raise RunError(f"{what}, and neither was one in each of the {MAX_SKIPS} steps before; lower optim.lr")
        skip: Record = {"step": step, "kind": "skipped", "skipped": len(self.steps)}
        return {**skip, "not_finite": broken, "not_finite_ids": samples[:NAMED_SAMPLES]}


def culprit(batches: Sequence[Batch], gradient: Gradient, ranks: Ranks) -> tuple[str, list[int]]:
    """The label of the loss, or else of the gradient, that is not finite, and the ids of its samples on all ranks.

    The samples of a loss are those of the micro-batches in which it is not finite, the samples of the gradient are all.
    """
    names = [*(metric(f"{name}_loss").label for name in gradient.names), "gradient"]
    samples: dict[str, list[int]] = {name: [] for name in names}
    for batch, of_batch in zip(batches, gradient.sums.isfinite().tolist(), strict=False):
        for name, is_finite in zip(names, (*of_batch, False), strict=True):
            samples[name] += [] if is_finite else sample_ids(batch)
    gathered = ranks.gather(samples)
    ids_by_name = {name: sorted({sample_id for rank in gathered for sample_id in rank[name]}) for name in names}
    return next(((name, ids) for name, ids in ids_by_name.items() if ids), ("gradient", []))


def sample_ids(batch: Batch) -> list[int]:
    """The ids of all samples in a batch. A packed row has several, which are in its canvases' addresses."""
    canvases = batch.address_BC3[..., 1][batch.length_BC > 0].tolist()
    return sorted({sample_id for sample_id in [*batch.sample_id_B.tolist(), *canvases] if sample_id >= 0})


@contextmanager
def seeded(seed: int, step: int, ranks: Ranks) -> Iterator[None]:
    """Seed torch's generators, which draw dropout, by seed, step and rank around a block; restore them afterwards.

    Ranks that share their rows (`parallel.tensor`) have the same draws.
    """
    high, low = words(seed, Stream.DROPOUT, (step, ranks.row_rank), 2).tolist()
    with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
        torch.manual_seed((high << 32) | low)
        yield


def autocast(device: torch.device, precision: str | None) -> AbstractContextManager[Any]:
    """Autocast to `precision` ("bfloat16") around a forward; None keeps the model's dtype."""
    if precision is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))
