"""The routed experts: expert_mlp, and expert_slots before the sum over each token's experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Slots(NamedTuple):
    """The outputs of each token's experts times their routing weights, [N, k, D], whose sum over k is wanted.

    index_Nk: the expert of every slot, None where all count; one of none of the `experts` may hold anything and counts
    for nothing.
    """

    values_NkD: Tensor
    index_Nk: Tensor | None
    experts: int

    def summed(self) -> Tensor:
        """The sums [N, D]; there is one slot that counts for each token."""
        assert self.index_Nk is None
        return self.values_NkD.squeeze(1)
