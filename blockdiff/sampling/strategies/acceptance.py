"""Rules that decide which samples of a denoising step are kept, by the model's certainty or by position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from blockdiff.sampling.strategy import Canvases, Decision, Key


class Acceptance(Protocol):
    """A rule that decides which samples a step keeps, as a frozen dataclass."""

    def accept(self, canvases: Canvases) -> Decision:
        """Return the decision about every position; it does not decide when a canvas ends."""


@dataclass(frozen=True)
class EntropyBound:
    """Accept the k most certain tokens, for the largest k with H_1 + ... + H_k - max(H_1, ..., H_k) <= bound.

    The left side bounds the mutual information of the accepted tokens, so they may be sampled independently
    (arXiv 2505.24857). At least one token is always accepted; nothing is kept from earlier steps.
    """

    bound: Annotated[
        float, Key("the most that their entropies may add up to, but for the largest", settings="entropy_bound")
    ] = 0.1
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"bound must be more than 0, got {self.bound}")

    def accept(self, canvases: Canvases) -> Decision:
        """Keep the samples of the k most certain positions; all others become noise."""
        return Decision(self.within(canvases.stats.entropy))

    def within(self, entropy_BL: Tensor) -> Tensor:
        """Return the accepted positions, bool [B, L]."""
        # Stable, so that among equal entropies the first position wins whatever the batch.
        sorted_BL, order_BL = entropy_BL.sort(dim=-1, stable=True)
        is_within_BL = sorted_BL.cumsum(-1) - sorted_BL <= self.bound
        return torch.empty_like(is_within_BL).scatter_(-1, order_BL, is_within_BL)


@dataclass(frozen=True)
class Confident:
    """Accept every sample with a probability above `threshold` (arXiv 2505.22618), and every given token.

    At least the `least` likeliest samples at open positions are accepted, so that every step adds tokens.
    """

    threshold: Annotated[float, Key("the probability above which a sample is kept")] = 0.9
    least: Annotated[int, Key("so many new ones are kept at every step, whatever their probability")] = 1
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be at least 0 and less than 1, got {self.threshold}")
        if self.least < 1:
            raise ValueError(f"least must be at least 1, got {self.least}")

    def accept(self, canvases: Canvases) -> Decision:
        """Keep the samples that are likely enough; all others become noise."""
        log_p_BL, is_open_BL = canvases.stats.log_probability, canvases.is_open_BL
        is_first_BL = _highest(log_p_BL.masked_fill(~is_open_BL, -torch.inf), self.least)
        return Decision((log_p_BL.exp() > self.threshold) | is_first_BL)


def _highest(score_BL: Tensor, count: Tensor | int) -> Tensor:
    """Return the positions of each row's `count` highest scores, bool [B, L]; count: one number, or [B, 1].

    Of equal scores the first position wins, independently of the batch.
    """
    order_BL = score_BL.argsort(dim=-1, descending=True, stable=True)
    is_within_BL = (torch.arange(score_BL.shape[-1], device=score_BL.device) < count).expand_as(order_BL)
    return torch.empty_like(order_BL, dtype=torch.bool).scatter_(-1, order_BL, is_within_BL)


@dataclass(frozen=True)
class Quota:
    """Accept the likeliest samples, up to the number of positions due at the step.

    After k of N steps L k / N positions are due (pace linear), or L (1 - cos(pi k / 2N)), which is few at first and
    then more (pace cosine: MaskGIT, arXiv 2202.04200), rounded up. Under mask noise tokens stay for good, and each step
    fills as many masks as its due number grows, at least one; with the linear pace L / N rounded down, plus one in the
    first L mod N steps.
    """

    pace: Annotated[Literal["linear", "cosine"], Key("how the share of kept positions grows")] = "linear"
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.pace not in ("linear", "cosine"):
            raise ValueError(f"pace must be linear or cosine, got {self.pace!r}")

    def accept(self, canvases: Canvases) -> Decision:
        """Keep the likeliest samples; all others become noise."""
        score_BL, length = self.score(canvases), canvases.kept_BL.shape[-1]
        if not canvases.are_masks:
            return Decision(_highest(score_BL, self.of_steps(canvases.step_B + 1, canvases.steps_B, length)[:, None]))
        is_open_BL, count_B = canvases.is_masked_BL, self.of_step(canvases.step_B, canvases.steps_B, length)
        is_new_BL = _highest(score_BL.masked_fill(~is_open_BL, -torch.inf), count_B[:, None])
        return Decision(is_new_BL | ~is_open_BL)

    def score(self, canvases: Canvases) -> Tensor:
        """Return the priority of each position, [B, L]: the highest are kept first."""
        return canvases.stats.log_probability

    def of_step(self, step_B: Tensor, steps_B: Tensor, length: int) -> Tensor:
        """Return the number of masks that a step fills, out of `length` in the empty canvas, int64 [B]."""
        if self.pace == "linear":
            count_B = length // steps_B + (step_B < length % steps_B)
        else:
            before_B, after_B = (self.of_steps(done_B, steps_B, length) for done_B in (step_B, step_B + 1))
            count_B = after_B - before_B
        return count_B.clamp(min=1)

    def of_steps(self, done_B: Tensor, steps_B: Tensor, length: int) -> Tensor:
        """Return the number of positions out of `length` that are due after `done_B` steps, int64 [B]."""
        if self.pace == "linear":  # in integers, so no rounding error is rounded up
            return (done_B * length + steps_B - 1) // steps_B
        share_B = 1 - torch.cos(done_B.double() / steps_B * (math.pi / 2))
        return (share_B * length - 1e-9).ceil().long()


@dataclass(frozen=True)
class Sequential(Quota):
    """Accept the first samples from the left, up to the number of positions due at the step."""

    is_capturable: ClassVar[bool] = True

    def score(self, canvases: Canvases) -> Tensor:
        """Return priorities that fall from left to right, [B, L], so that the first positions are kept first."""
        place_BL = torch.arange(canvases.kept_BL.shape[-1], 0, -1, device=canvases.kept_BL.device)
        return place_BL.float().expand(canvases.kept_BL.shape)
