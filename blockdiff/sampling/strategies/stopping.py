"""When a canvas is finished before its last step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from blockdiff.sampling.strategy import Canvases


class Stopping(Protocol):
    """A frozen dataclass."""

    def stop(self, canvases: Canvases) -> Tensor | None:
        """is_stopped [B], or None where no canvas stops before its last step."""


@dataclass(frozen=True)
class StableAndConfident:
    """Stop when the argmax canvas equals those of the last `stability` steps and mean H < `confidence`.

    H is the entropy of the tempered distribution in nats, averaged over the canvas. A canvas runs at least
    stability + 1 steps; stability 0 asks for confidence only, confidence inf for stability only.
    """

    stability: int = 1
    confidence: float = 0.005
    is_capturable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.stability < 0 or not self.confidence > 0:
            raise ValueError(
                f"stability must be at least 0 and confidence more than 0, got {self.stability} and {self.confidence}"
            )

    def stop(self, canvases: Canvases) -> Tensor | None:
        """is_stopped [B]."""
        is_stable_B = canvases.unchanged_B >= self.stability
        if self.confidence == math.inf:
            return is_stable_B
        return (canvases.stats.entropy.mean(-1) < self.confidence) & is_stable_B


@dataclass(frozen=True)
class AllKept:
    """Stop when every position was kept at the step before: for what is kept for good, this is the end."""

    is_capturable: ClassVar[bool] = True

    def stop(self, canvases: Canvases) -> Tensor | None:
        """is_stopped [B]."""
        return canvases.kept_BL.all(-1)


@dataclass(frozen=True)
class Never:
    """Every canvas takes as many steps as it may."""

    is_capturable: ClassVar[bool] = True

    def stop(self, canvases: Canvases) -> Tensor | None:
        """None."""
        return None
