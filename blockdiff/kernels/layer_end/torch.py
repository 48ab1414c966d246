"""layer_end, composed of norms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from blockdiff.kernels.expert_mlp import Slots

if TYPE_CHECKING:
    from blockdiff.kernels import Kernels


def layer_end(
    ops: Kernels, x: Tensor, dense: Tensor, routed: Slots, weights: tuple[Tensor, Tensor, Tensor], eps: float,
    scalar: Tensor | None,
) -> Tensor:  # fmt: skip
    """`(x + norm(norm(dense) + norm(routed))) * scalar` of tokens [..., D].

    routed: as `expert_slots` gives it; weights: of the norms of dense, of routed and of their sum; scalar: as in
    `add_rms_norm`.
    """
    (of_dense,) = ops.rms_norms(dense, (weights[0],), eps)
    both = ops.add_rms_norm(of_dense, routed.summed().view_as(x), weights[1], eps)
    return ops.add_rms_norm(x, both, weights[2], eps, scalar)
