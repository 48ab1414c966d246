"""The losses and gradient of one optimiser step over micro-batches and ranks, and the steps that are skipped.

Nothing here touches the weights: the trainer decides whether the optimiser step is taken.
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

MOST_SKIPS = 20  # more steps in a row without a finite gradient end a run that skips them
MOST_UNSCORED = 20  # optimiser steps in a row in which nothing is scored end a run
NAMED_SAMPLES = 64


@dataclass(frozen=True)
class Loss:
    """A loss of a run: the function that counts in a batch what divides its sum, and its weight in the total."""

    count: Callable[[Batch], float]
    weight: float = 1.0


@dataclass(frozen=True)
class Counts:
    """The counts of an optimiser step over all micro-batches and ranks."""

    of_losses: dict[str, float]  # what divides each loss, by name
    tokens_2: Tensor  # [clean and canvas tokens but padding, canvas positions and next-token pairs scored]

    @classmethod
    def over_ranks(cls, batches: Sequence[Batch], losses: Mapping[str, Loss], ranks: Ranks) -> Counts:
        """Count this rank's micro-batches and add up the ranks' counts."""
        mine = [sum(loss.count(batch) for batch in batches) for loss in losses.values()]
        mine.append(sum(int((batch.doc_start_BS >= 0).sum() + batch.length_BC.sum()) for batch in batches))
        mine.append(sum(int(batch.is_scored_BCL.sum() + batch.is_ar_scored_BS.sum()) for batch in batches))
        counts = ranks.sum_of_rows(torch.tensor(mine, dtype=torch.float64))
        return cls(dict(zip(losses, counts.tolist(), strict=False)), counts[len(losses) :])

    @property
    def has_scored(self) -> bool:
        """True if anything is scored; otherwise an optimiser step would be taken for nothing."""
        return bool(self.tokens_2[1] > 0)


@dataclass(frozen=True)
class Gradient:
    """The gradient that the backward passes of an optimiser step left in the parameters, and its losses."""

    sums: Tensor  # float64 [micro-batches of this rank, losses]
    names: tuple[str, ...]  # of the losses
    losses: Record  # "loss", their weighted sum, and each as NAME_loss unless it is a mean of nothing, over all ranks
    norm: float

    @property
    def is_finite(self) -> bool:
        """True if losses and gradient are finite: every rank sees the same global numbers, so all agree."""
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
    """Fill the gradients of `weights` from this rank's micro-batches, averaged as one global batch.

    losses: by name, as `module` returns their sums.
    """
    ranks, factor = mesh.ranks, loss_factor(module, mesh)
    if mesh.is_split:
        batches = _as_many(batches, ranks)
    sums = torch.zeros(max(1, len(batches)), len(losses), dtype=torch.float64, device=ranks.device)
    with cast_once(module):
        for index, batch in enumerate(batches):
            with exchanging(module, now=index == len(batches) - 1):
                with autocast(ranks.device, precision):
                    found = module(batch.to(ranks.device, non_blocking=True))
                    require_sums(found)
                if found.keys() != losses.keys():
                    raise RunError(
                        f"objective: its forward gave the losses {', '.join(found)}; return those of the kind of run, "
                        f"{', '.join(losses)}"
                    )
                total = _total(found, losses, counts)
                if total.requires_grad:
                    (factor * total).backward()  # where the ranks' gradients are averaged, the factor makes a sum of it
            sums[index] = torch.stack([found[name].detach() for name in losses])
    fill_gradients(weights)
    exchange_others(module, weights, mesh)
    means: Record = {}
    totals = dict(zip(losses, ranks.sum_of_rows(sums.sum(0)).tolist(), strict=True))
    means["loss"] = _total(totals, losses, counts)
    means |= {f"{name}_loss": total / count for name, total in totals.items() if (count := counts.of_losses[name])}
    return Gradient(sums, tuple(losses), means, gradient_norm(weights, ranks))


def _total(sums: Mapping[str, Any], losses: Mapping[str, Loss], counts: Counts) -> Any:
    """The weighted sum of the means of losses: the one place that divides."""
    terms = [loss.weight * sums[name] / (counts.of_losses[name] or 1.0) for name, loss in losses.items()]
    return sum(terms[1:], start=terms[0])


def _as_many(batches: Sequence[Batch], ranks: Ranks) -> list[Batch]:
    """This rank's micro-batches, and empty ones up to the most that a rank has: the ranks run the model together."""
    count = max(ranks.gather(len(batches))) - len(batches)
    empty = lay_out([PADDING_ROW], batches[0].canvas_BCL.shape[-1], pad_id=0) if count else None
    return [*batches, *([] if empty is None else [empty] * count)]


class UnscoredSteps:
    """Optimiser steps in a row in which nothing is scored, so that nothing is learnt."""

    def __init__(self, steps: int) -> None:
        self.most = min(MOST_UNSCORED, steps)
        self.in_a_row = 0
        self.was_said = False

    def note(self, step: int, unscored: tuple[str, str] | None) -> str | None:
        """The line for the user if this is the first such step of a run. Raises RunError when it is one too many.

        unscored: why a step teaches nothing, and what to do about it; None if it teaches. All ranks have the same.
        """
        if unscored is None:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        why, remedy = unscored
        if self.in_a_row >= self.most:
            raise RunError(f"step {step}: {why}, in {self.in_a_row} steps in a row, so nothing is learnt; {remedy}")
        said, self.was_said = self.was_said, True
        return None if said else f"step {step}: {why}, so this step learns nothing; {self.most} in a row end the run"


class SkippedSteps:
    """Optimiser steps that were not taken because something was not finite, as the log has them."""

    def __init__(self, policy: Literal["stop", "skip"], steps: Sequence[int] = ()) -> None:
        self.policy, self.steps = policy, list(steps)

    def note(self, step: int, batches: Sequence[Batch], gradient: Gradient, ranks: Ranks) -> Record:
        """The record of a step that is not taken. Raises RunError when it should stop the run instead.

        Every rank sees the same gradient, so all come here together.
        """
        broken, samples = culprit(batches, gradient, ranks)
        named = ", ".join(map(str, samples[:NAMED_SAMPLES])) + (", ..." if len(samples) > NAMED_SAMPLES else "")
        what = f"step {step}: the {broken} is not finite (sample ids {named})"
        if self.policy == "stop":
            raise RunError(f"{what}; look at these samples, or resume from the last checkpoint with a lower optim.lr")
        self.steps.append(step)
        if self.steps[-MOST_SKIPS - 1 :] == list(range(step - MOST_SKIPS, step + 1)):
            raise RunError(f"{what}, nor was anything in the {MOST_SKIPS} steps before; lower optim.lr")
        skip: Record = {"step": step, "kind": "skipped", "skipped": len(self.steps)}
        return {**skip, "not_finite": broken, "not_finite_ids": samples[:NAMED_SAMPLES]}


def culprit(batches: Sequence[Batch], gradient: Gradient, ranks: Ranks) -> tuple[str, list[int]]:
    """The loss, or else the gradient, that is not finite in a step, and the samples it comes from, over all ranks.

    The samples of a loss are those of the micro-batches in which it is not finite; of the gradient they are all.
    """
    names = [*(metric(f"{name}_loss").label for name in gradient.names), "gradient"]
    samples: dict[str, list[int]] = {name: [] for name in names}
    for batch, of_batch in zip(batches, gradient.sums.isfinite().tolist(), strict=False):
        for name, is_finite in zip(names, (*of_batch, False), strict=True):
            samples[name] += [] if is_finite else sample_ids(batch)
    gathered = ranks.gather(samples)
    found = {name: sorted({sample_id for rank in gathered for sample_id in rank[name]}) for name in names}
    return next(((name, ids) for name, ids in found.items() if ids), ("gradient", []))


def sample_ids(batch: Batch) -> list[int]:
    """The ids of all samples in a batch; a packed row holds several, which its canvases name."""
    canvases = batch.address_BC3[..., 1][batch.length_BC > 0].tolist()
    return sorted({sample_id for sample_id in [*batch.sample_id_B.tolist(), *canvases] if sample_id >= 0})


@contextmanager
def seeded(seed: int, step: int, ranks: Ranks) -> Iterator[None]:
    """Surrounds the passes of an optimiser step, whose draws of torch's generators (dropout) follow from the address.

    Ranks with rows of their own have draws of their own. Afterwards the generators are as they were.
    """
    high, low = words(seed, Stream.DROPOUT, (step, ranks.row_rank), 2).tolist()
    with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
        torch.manual_seed((high << 32) | low)
        yield


def autocast(device: torch.device, precision: str | None) -> AbstractContextManager[Any]:
    """Surrounds a forward, which computes in `precision`: "bfloat16", or None for the model's own dtype."""
    if precision is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))
