"""The routed experts: expert_mlp, the dense gated activation, and the choice of experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Slots(NamedTuple):
    """What experts give, before it is summed: values [N, k, D] with their routing weights, and whose they are.

    index_Nk: the expert of every slot; a slot with none of the `experts` may hold anything and counts for nothing.
    """

    values_NkD: Tensor
    index_Nk: Tensor
    experts: int
