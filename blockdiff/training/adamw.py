"""AdamW whose parameters may be split over ranks."""

from __future__ import annotations

from typing import Any

import torch

from blockdiff.tensor_pieces import local_of


class AdamWOfPieces(torch.optim.AdamW):
    """AdamW of which each rank steps what it holds: elementwise, so that pieces of tensors are as good as whole ones.

    torch's kernels take no DTensors beside other tensors; here they get the local ones of all. The state consists of
    DTensors where the parameters do.
    """

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        is_complex: bool = super()._init_group(group, *lists)
        for tensors in lists:  # parameters, gradients, moments, and counters of steps
            tensors[:] = [local_of(tensor) for tensor in tensors]
        return is_complex
