"""Attention of a call, composed of span_attention: over spans, or over the rows and the canvases of a sweep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.kernels.span_attention.paged import PrefixTensor, written
from blockdiff.spans import Spans, Sweep

if TYPE_CHECKING:
    from blockdiff.kernels import Kernels


def attend(
    ops: Kernels, q_BThd: Tensor, k: Tensor, v: Tensor, spans: Spans | Sweep, past: tuple[PrefixTensor, ...] | None,
    scale: float,
) -> Tensor:  # fmt: skip
    """The output of attention for every query of a call [B, T, h, d] over the tokens before the call and its own ones.

    k, v: [B, T, K, d] of this call, without tokens where these were written into the pages of `past`.
    """
    if isinstance(spans, Sweep):
        return ops.sweep_attention(q_BThd, k, v, spans, scale)
    prefix_k, prefix_v = past if past is not None else (None, None)
    spans = spans if written(past) is None else spans.in_one_run
    return ops.span_attention(q_BThd, prefix_k, prefix_v, k, v, spans, scale)


def sweep_attention(ops: Kernels, q_BThd: Tensor, k: Tensor, v: Tensor, sweep: Sweep, scale: float) -> Tensor:
    """The output of attention in a sweep [B, T, h, d]: clean tokens see one another, canvases them as a prefix.

    k, v: [B, T, K, d] of all tokens; the queries are those of the wanted ones, the last or all.
    """
    (clean_k, noisy_k), (clean_v, noisy_v) = (
        x.split([sweep.clean_tokens, x.shape[1] - sweep.clean_tokens], 1) for x in (k, v)
    )
    prefix_k, prefix_v = ((x.detach() if sweep.stop_gradient else x)[:, : sweep.columns] for x in (clean_k, clean_v))
    clean_q, noisy_q = q_BThd[:, : -noisy_k.shape[1]], q_BThd[:, -noisy_k.shape[1] :]
    noisy = ops.span_attention(noisy_q, prefix_k, prefix_v, noisy_k, noisy_v, sweep.noisy, scale)
    if not sweep.wants_clean:
        return noisy
    clean = ops.span_attention(clean_q, None, None, clean_k, clean_v, sweep.clean, scale)
    return torch.cat([clean, noisy], 1)
