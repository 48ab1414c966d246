"""The rules by which sampled tokens of a denoising step stay in the canvas: the model's certainty of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from blockdiff.sampling.strategy import Canvases, Decision


class Acceptance(Protocol):
    """A frozen dataclass."""

    def accept(self, canvases: Canvases) -> Decision:
        """The decision about every position; another rule decides when a canvas stops."""


def declares_capturable(rule: object) -> bool:
    """True where the class of a strategy or a rule itself says that a CUDA graph can hold it (see `Strategy`)."""
    return "is_capturable" in vars(type(rule)) and bool(rule.is_capturable)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class EntropyBound:
    """Accept the k most certain tokens, k as large as H_1 + ... + H_k - max(H_1, ..., H_k) <= bound allows.

    The left side bounds the mutual information of the accepted tokens, so they may be sampled independently
    (arXiv 2505.24857). At least one token is always accepted; nothing is kept from earlier steps.
    """

    bound: float = 0.1
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.bound > 0:
            raise ValueError(f"bound must be more than 0, got {self.bound}")

    def accept(self, canvases: Canvases) -> Decision:
        """Keep the samples of the k most certain positions; all others become noise."""
        # Stable, so that among equal entropies the first position wins whatever the batch.
        sorted_BL, order_BL = canvases.stats.entropy.sort(dim=-1, stable=True)
        is_within_BL = sorted_BL.cumsum(-1) - sorted_BL <= self.bound
        return Decision(torch.empty_like(is_within_BL).scatter_(-1, order_BL, is_within_BL))


@dataclass(frozen=True)
class Confident:
    """Accept every sample that is likelier than `threshold` (arXiv 2505.22618).

    The likeliest of those that were not kept at the step before is accepted in any case, so every step keeps a new one.
    """

    threshold: float = 0.9
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise ValueError(f"threshold must be at least 0 and less than 1, got {self.threshold}")

    def accept(self, canvases: Canvases) -> Decision:
        """Keep the samples that are likely enough; all others become noise."""
        log_p_BL = canvases.stats.log_probability
        is_likely_BL = log_p_BL.exp() > self.threshold
        best_B1 = log_p_BL.masked_fill(canvases.kept_BL, -torch.inf).argmax(-1, keepdim=True)
        return Decision(is_likely_BL.scatter(-1, best_B1, True))


@dataclass(frozen=True)
class Quota:
    """Accept as many of the likeliest samples as the step should have reached.

    After k of N steps these are L k / N positions (pace linear), or L (1 - cos(pi k / 2N)), few at first and more and
    more (pace cosine: MaskGIT, arXiv 2202.04200), rounded up.
    """

    pace: Literal["linear", "cosine"] = "linear"
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.pace not in ("linear", "cosine"):
            raise ValueError(f"pace must be linear or cosine, got {self.pace!r}")

    def accept(self, canvases: Canvases) -> Decision:
        """Keep the likeliest samples; all others become noise."""
        log_p_BL = canvases.stats.log_probability
        order_BL = log_p_BL.argsort(dim=-1, descending=True, stable=True)
        wanted_B1 = self.of_steps(canvases.step_B + 1, canvases.steps_B, log_p_BL.shape[-1])[:, None]
        is_wanted_BL = torch.arange(log_p_BL.shape[-1], device=log_p_BL.device) < wanted_B1
        return Decision(torch.empty_like(is_wanted_BL).scatter_(-1, order_BL, is_wanted_BL))

    def of_steps(self, done_B: Tensor, steps_B: Tensor, length: int) -> Tensor:
        """The number of `length` positions that are kept when so many of the steps are done, int64 [B]."""
        if self.pace == "linear":  # in integers: no rounding is rounded up
            return (done_B * length + steps_B - 1) // steps_B
        share_B = 1 - torch.cos(done_B.double() / steps_B * (math.pi / 2))
        return (share_B * length - 1e-9).ceil().long()


@dataclass(frozen=True)
class Sticky:
    """A rule that keeps for good what another rule keeps: a kept token stays and counts as certain ever after.

    So uniform noise is treated like masks, which are only ever filled in (carry-over, arXiv 2406.07524).
    """

    rule: Acceptance = field(default_factory=EntropyBound)

    @property
    def is_capturable(self) -> bool:
        """True where the other rule is."""
        return declares_capturable(self.rule)

    def accept(self, canvases: Canvases) -> Decision:
        """Ask the other rule with the kept positions as certain; they stay."""
        kept_BL, stats = canvases.kept_BL, canvases.stats
        certain = stats._replace(
            entropy=stats.entropy.masked_fill(kept_BL, 0.0),
            log_probability=stats.log_probability.masked_fill(kept_BL, 0.0),
            argmax=canvases.tokens_BL.where(kept_BL, stats.argmax),
            sample=canvases.tokens_BL.where(kept_BL, stats.sample),
        )
        decision = self.rule.accept(replace(canvases, stats=certain))
        stay_BL = kept_BL if decision.stay_BL is None else kept_BL | decision.stay_BL
        return Decision(decision.keep_BL & ~kept_BL, None, stay_BL)
