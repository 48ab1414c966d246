"""span_attention: attention of every query over one prefix span and one own span, without a mask matrix."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from blockdiff.spans import Spans


class SpanAttention(Protocol):
    """Attend over cached (`prefix`) and this call's (`own`) keys, each query to its two spans.

    q_BThd: queries; prefix_k, prefix_v: [B, P, K, d] or None; own_k, own_v: [B, O, K, d], K divides h; scale: factor
    on the scores. Returns [B, T, h, d]; a query whose spans are empty gets exactly 0. With return_lse also the
    log-sum-exp of its scores, fp32 [B, T, h], through which gradients flow (-inf for empty rows).
    """

    def __call__(
        self,
        q_BThd: Tensor,
        prefix_k: Tensor | None,
        prefix_v: Tensor | None,
        own_k: Tensor,
        own_v: Tensor,
        spans: Spans,
        scale: float,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]: ...
