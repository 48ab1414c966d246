"""The names of NeMo AutoModel's documentation that are functions: a selection as a bias, a mask as a bias, SwiGLU-OAI.

They are for those who come from there, and for looking at a selection. Attention here takes blocks, or booleans.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockdiff.kernels.block_sparse.torch import seen_keys, select_blocks


def swiglu_oai(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """`gate * sigmoid(alpha * gate) * (up + 1)`, the gate clamped to at most `limit`, up to +-limit; 0 = no clamp.

    It is computed in fp32 and cast back.
    """
    wide_gate, wide_up = gate.float(), up.float()
    if limit:
        wide_gate, wide_up = wide_gate.clamp(max=limit), wide_up.clamp(-limit, limit)
    return (wide_gate * torch.sigmoid(alpha * wide_gate) * (wide_up + 1)).to(gate.dtype)


def build_block_sparse_attn_bias(
    idx_q: Tensor,
    idx_k: Tensor,
    block_size: int,
    topk_blocks: int,
    init_blocks: int,
    local_blocks: int,
    num_q_heads: int,
    score_type: str = "max",
) -> Tensor:
    """The selection as an additive bias, float [B, num_q_heads, T, T]: 0 where a query sees a key, else -inf.

    idx_q: [B, T, H, D]; idx_k: [B, T, 1, D]. Index heads are repeated over the query heads that they choose for.
    It is not safe to add in bf16, where -inf leaks.
    """
    B, T, H, _ = idx_q.shape
    visible_BT = torch.arange(1, T + 1, device=idx_q.device).expand(B, T)
    budget: dict[str, Any] = dict(
        block=block_size, topk=topk_blocks, init=init_blocks, local=local_blocks, score=score_type
    )
    ids = select_blocks(idx_q, idx_k.squeeze(2), visible_BT, **budget)
    is_seen = seen_keys(ids, visible_BT, None, block_size, T).transpose(1, 2)
    is_seen = is_seen.repeat_interleave(num_q_heads // H, 1)
    return torch.zeros(is_seen.shape, device=idx_q.device).masked_fill(~is_seen, -torch.inf)


def _padding_mask_to_additive_bias(mask: Tensor, ref: Tensor) -> Tensor:
    """A padding mask as a bias [B, 1, 1, T] in the dtype and on the device of `ref`; additive masks pass as they are.

    mask: [B, T], true or 1 where a token is kept, or an additive mask of four dimensions.
    """
    if mask.is_floating_point() and mask.dim() == 4:
        return mask.to(ref)
    is_kept = (mask.bool() if mask.dim() == 4 else mask.bool()[:, None, None]).to(ref.device)
    return torch.zeros(is_kept.shape, dtype=ref.dtype, device=ref.device).masked_fill(~is_kept, -torch.inf)
