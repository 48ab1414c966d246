"""The choice of experts in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import upcast
from blockdiff.kernels.op import Ops


def route(scores_NE: Tensor, scale_E: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return each token's k best experts, int64 [N, k], and their softmax times scale_E, in at least fp32."""
    weight, index = upcast(scores_NE).softmax(-1).topk(k, dim=-1)
    weight = weight / weight.sum(-1, keepdim=True)
    return index, weight * scale_E[index]


def routed_tokens(
    ops: Ops, x: Tensor, scale_D: Tensor, root: float, weight_ED: Tensor, expert_scale_E: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """Route tokens x [..., D] by the scores `(x * scale * root) weight^T`.

    Returns `route`'s expert indices and weights, both [N, k], where N counts all tokens of x.
    """
    x_ND = x.flatten(0, -2)
    if x_ND.dtype == torch.bfloat16:  # the released model rounds after each factor
        scores = F.linear(x_ND * scale_D * root, weight_ED)
    else:
        scores = F.linear(x_ND, weight_ED * (scale_D * root))
    return ops.route(scores, expert_scale_E, k)
