"""The oracle of block selection and block-sparse attention: one query and one head after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def select_blocks(
    idx_q_Td: Tensor,
    idx_k_Sd: Tensor,
    visible_T: list[int],
    block: int,
    topk: int,
    init: int = 0,
    local: int = 1,
    score: str = "max",
) -> list[list[int]]:
    """The blocks of each query of one head, in the order of their claims: first ones, last ones, then by score.

    Query t sees the keys [0, visible_t). Equal claims go to the lower block.
    """
    chosen = []
    for q, visible in zip(idx_q_Td, visible_T, strict=True):
        last = (visible - 1) // block
        claims = []
        for b in range(last + 1):
            keys = idx_k_Sd[b * block : min((b + 1) * block, visible)]
            scores = (keys.float() @ q.float()) * q.shape[0] ** -0.5
            value = float(scores.max() if score == "max" else scores.logsumexp(0))
            kind = 0 if b < init else 1 if b > last - local else 2
            claims.append((kind, -value if kind == 2 else 0.0, b))
        chosen.append([b for _, _, b in sorted(claims)[:topk]])
    return chosen


def attention(
    q_Td: Tensor, k_Sd: Tensor, v_Sd: Tensor, blocks: list[list[int]], visible_T: list[int], block: int, scale: float
) -> Tensor:
    """The output of each query of one head [T, d] over the visible keys of its blocks; 0 where there are none."""
    rows = []
    for q, of_query, visible in zip(q_Td, blocks, visible_T, strict=True):
        keys = [key for b in of_query for key in range(b * block, min((b + 1) * block, visible))]
        rows.append(((k_Sd[keys] @ q) * scale).softmax(0) @ v_Sd[keys] if keys else torch.zeros_like(v_Sd[0]))
    return torch.stack(rows)
