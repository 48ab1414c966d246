"""When a canvas is finished before its last step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class StableAndConfident:
    """Stop when the argmax canvas equals those of the last `stability` steps and mean H < `confidence`.

    H is the entropy of the tempered distribution in nats, averaged over the canvas. A canvas runs at least
    stability + 1 steps; stability 0 asks for confidence only.
    """

    stability: int = 1
    confidence: float = 0.005

    def stop(
        self, argmax_BL: Tensor, previous_BL: Tensor | None, unchanged_B: Tensor, entropy_BL: Tensor
    ) -> tuple[Tensor, Tensor]:
        """is_stopped [B], and for how many steps in a row the argmax canvas has been the same: int64 [B].

        `previous_BL` is the argmax canvas of the step before (None in the first step of a canvas) and
        `unchanged_B` what this returned then (zeros in the first step).
        """
        if previous_BL is not None:
            unchanged_B = (unchanged_B + 1) * (argmax_BL == previous_BL).all(-1)
        is_confident_B = entropy_BL.mean(-1) < self.confidence
        return is_confident_B & (unchanged_B >= self.stability), unchanged_B
