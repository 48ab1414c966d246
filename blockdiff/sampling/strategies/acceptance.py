"""Which sampled tokens of a denoising step stay in the canvas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from blockdiff.sampling.strategy import Canvases, Decision


class Acceptance(Protocol):
    """A frozen dataclass."""

    def accept(self, canvases: Canvases) -> Decision:
        """What becomes of every position; when a canvas stops is another rule's."""


@dataclass(frozen=True)
class EntropyBound:
    """Accept the k most certain tokens, k as large as H_1 + ... + H_k - max(H_1, ..., H_k) <= bound allows.

    The left side bounds the mutual information of the accepted tokens, so they may be sampled independently
    (arXiv 2505.24857). At least one token is always accepted; nothing is kept from earlier steps.
    """

    bound: float = 0.1

    def accept(self, canvases: Canvases) -> Decision:
        """Keep the samples of the k most certain positions; all others become noise."""
        # Stable, so that among equal entropies the first position wins whatever the batch.
        sorted_BL, order_BL = canvases.stats.entropy.sort(dim=-1, stable=True)
        is_within_BL = sorted_BL.cumsum(-1) - sorted_BL <= self.bound
        return Decision(torch.empty_like(is_within_BL).scatter_(-1, order_BL, is_within_BL))
