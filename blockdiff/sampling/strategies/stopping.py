"""When a canvas is finished before its last step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

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
    stability + 1 steps; stability 0 asks for confidence only.
    """

    stability: int = 1
    confidence: float = 0.005

    def stop(self, canvases: Canvases) -> Tensor | None:
        """is_stopped [B]."""
        is_confident_B = canvases.stats.entropy.mean(-1) < self.confidence
        return is_confident_B & (canvases.unchanged_B >= self.stability)
