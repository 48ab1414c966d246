"""The routed experts: the op expert_mlp, and expert_slots, its outputs before the sum over each token's experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Slots(NamedTuple):
    """The outputs of each token's k experts times their routing weights, [N, k, D], to be summed over k.

    index_Nk: the expert of every slot (None: all slots count). A slot whose index is `experts` or more is undefined and
    must be left out of the sum.
    """

    values_NkD: Tensor
    index_Nk: Tensor | None
    experts: int

    def summed(self) -> Tensor:
        """Return the outputs [N, D] of slots that are summed already: k is 1 and all slots count."""
        assert self.index_Nk is None
        return self.values_NkD.squeeze(1)
