"""layer_end in Triton, as an op for torch without gradient."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from blockdiff.kernels.expert_mlp import Slots
from blockdiff.kernels.launch import check_without_gradient, registered
from blockdiff.kernels.layer_end import kernels
from blockdiff.kernels.norm_rope.triton import by_rows, row_scalars

_layer_end_of = by_rows(kernels.layer_end)


@registered("layer_end")
def _layer_end(
    x: Tensor, dense: Tensor, slots: Tensor, index: Tensor | None, dense_weight: Tensor, slots_weight: Tensor,
    weight: Tensor, scalar: Tensor | None, E: int, eps: float,
) -> Iterator[Tensor]:  # fmt: skip
    """slots: [N, k, D] with their experts `index` [N, k], or [N, 1, D] without, of which all count."""
    x = x.contiguous()
    out = torch.empty_like(x)
    yield out
    top_k = 1 if index is None else slots.shape[1]
    launched, N = _layer_end_of(x.numel(), x.shape[-1], TOP_K=top_k)
    tensors = x, dense.contiguous(), slots.contiguous(), index, dense_weight, slots_weight, weight
    launched(*tensors, *row_scalars(scalar, x), out, N, E, eps)


def layer_end(
    x: Tensor, dense: Tensor, routed: Slots, weights: tuple[Tensor, Tensor, Tensor], eps: float, scalar: Tensor | None
) -> Tensor:
    """As in torch.py; Unserved where a gradient is needed."""
    check_without_gradient("layer_end", x)
    return _layer_end(x, dense, routed.values_NkD, routed.index_Nk, *weights, scalar, routed.experts, eps)
