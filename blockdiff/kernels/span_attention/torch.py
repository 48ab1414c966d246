"""span_attention in plain torch: a batched product for small calls, SDPA for large ones, the largest in pieces."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import in_autocast
from blockdiff.kernels.span_attention.paged import PagedTensor, PrefixTensor, visible_columns
from blockdiff.kernels.span_attention.pieces import in_pieces
from blockdiff.spans import Spans, Sweep

SMALL_SCORES = 1 << 22  # elements of [B, h, T, keys] up to which materialised scores beat SDPA on a CPU
SMALL_GATHERED = 1 << 19  # the same for keys gathered in SDPA's layout
LONG_KEYS, LONG_MASK = 1 << 10, 1 << 21  # keys, and elements of the mask [B, T, keys], above which calls are cut up
NEVER = -1e30  # the score of an invisible key


def span_attention(
    q_BThd: Tensor,
    prefix_k: PrefixTensor | None,
    prefix_v: PrefixTensor | None,
    own_k: Tensor,
    own_v: Tensor,
    spans: Spans | Sweep,
    scale: float,
) -> Tensor:
    """Attend over cached (`prefix`) and this call's (`own`) keys, each query to its two spans.

    q_BThd: queries. prefix_k, prefix_v: [B, P, K, d], None, or a `PagedTensor`, which gets no gradient. own_k, own_v:
    [B, O, K, d]; K divides h. spans: the queries' spans, or a `Sweep`, whose prefix is among its own keys. scale:
    factor of the scores. Returns [B, T, h, d]; a query whose spans are empty gets exactly 0.
    """
    if isinstance(spans, Sweep):
        return in_sweep(span_attention, q_BThd, own_k, own_v, spans, scale)
    if isinstance(prefix_k, PagedTensor) and isinstance(prefix_v, PagedTensor):
        of_k, of_v = prefix_k.gathered, prefix_v.gathered
        if of_k is not None and of_v is not None:
            visible = visible_columns(prefix_k.pages, spans)
            k, v = of_k.joined(prefix_k, own_k, visible), of_v.joined(prefix_v, own_v, visible)
            return _over_gathered(q_BThd, k, v, visible.spans or spans, visible.columns, scale)
        prefix_k, prefix_v = prefix_k.dense(), prefix_v.dense()
    assert not isinstance(prefix_k, PagedTensor) and not isinstance(prefix_v, PagedTensor)
    B, T, h, _ = q_BThd.shape
    prefix_tokens = 0 if prefix_k is None else prefix_k.shape[1]
    keys = prefix_tokens + own_k.shape[1]
    if keys > LONG_KEYS and B * T * keys > LONG_MASK:
        if prefix_k is None or prefix_v is None:
            prefix_k, prefix_v = own_k[:, :0], own_v[:, :0]
        q_BThd, *sources = in_autocast(q_BThd, prefix_k, prefix_v, own_k, own_v)
        return in_pieces(q_BThd, sources, spans, scale, _by_sdpa)
    k, v = own_k, own_v
    if prefix_k is not None and prefix_v is not None and prefix_k.shape[1]:
        k, v = torch.cat([prefix_k, own_k], 1), torch.cat([prefix_v, own_v], 1)
    q_BThd, k, v = in_autocast(q_BThd, k, v)  # with fp32 cos and sin, q and k are fp32 and v is bf16
    is_seen = None if spans.sees_all else spans.dense(prefix_tokens, own_k.shape[1])
    is_wide = q_BThd.dtype in (torch.float32, torch.float64)  # in half precision only SDPA sums scores in fp32
    if q_BThd.is_cpu and is_wide and B * h * T * k.shape[1] <= SMALL_SCORES:
        return _materialised(q_BThd, k, v, is_seen, scale)
    return _by_sdpa(q_BThd, k, v, is_seen, scale)


def in_sweep(attend: Callable[..., Tensor], q_BThd: Tensor, k: Tensor, v: Tensor, sweep: Sweep, scale: float) -> Tensor:
    """Compute a sweep by two calls of `attend`, a backend's `span_attention`: clean tokens, then canvases over them.

    Returns the output of q_BThd's queries, which belong to the last of the sweep's tokens, or all.
    """
    (clean_k, noisy_k), (clean_v, noisy_v) = (
        x.split([sweep.clean_tokens, x.shape[1] - sweep.clean_tokens], 1) for x in (k, v)
    )
    prefix_k, prefix_v = ((x.detach() if sweep.stop_gradient else x)[:, : sweep.columns] for x in (clean_k, clean_v))
    clean_q, noisy_q = q_BThd[:, : -noisy_k.shape[1]], q_BThd[:, -noisy_k.shape[1] :]
    noisy = attend(noisy_q, prefix_k, prefix_v, noisy_k, noisy_v, sweep.noisy, scale)
    if not sweep.wants_clean:
        return noisy
    clean = attend(clean_q, None, None, clean_k, clean_v, sweep.clean, scale)
    return torch.cat([clean, noisy], 1)


def _by_sdpa(q_BThd: Tensor, k: Tensor, v: Tensor, is_seen: Tensor | None, scale: float) -> Tensor:
    """Attend by SDPA to keys and values [B, tokens, K, d]; is_seen: the mask (None: all keys are visible)."""
    out = F.scaled_dot_product_attention(
        q_BThd.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if is_seen is None else is_seen[:, None],
        scale=scale,
        enable_gqa=q_BThd.shape[2] != k.shape[2],
    ).transpose(1, 2)
    if is_seen is None:
        return out
    return out.masked_fill(~is_seen.any(-1)[:, :, None, None], 0.0)


def _rows_of_queries(q_BThd: Tensor, K: int) -> Tensor:
    B, T, h, d = q_BThd.shape
    return q_BThd.view(B, T, K, h // K, d).permute(0, 2, 3, 1, 4).reshape(B * K, h // K * T, d)


def _materialised(q_BThd: Tensor, k: Tensor, v: Tensor, is_seen: Tensor | None, scale: float) -> Tensor:
    """Compute `_by_sdpa` with the scores as one product [B*K, g*T, keys]; heads share keys without copies."""
    B, T, h, _ = q_BThd.shape
    keys, K = k.shape[1], k.shape[2]
    q_rows = _rows_of_queries(q_BThd, K)
    k_rows, v_rows = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
    weights = _weights(q_rows, k_rows, is_seen, scale, h // K, v.dtype)
    if is_seen is not None:
        is_empty_BT = ~is_seen.any(-1)
        if bool(is_empty_BT.any()):
            grouped = weights.view(B, K, h // K, T, keys)
            weights = grouped.masked_fill(is_empty_BT[:, None, None, :, None], 0.0).view(weights.shape)
    return _heads_of_rows(torch.bmm(weights, v_rows), q_BThd.shape)


def _heads_of_rows(rows: Tensor, shape: torch.Size) -> Tensor:
    """Reshape rows [B*K, group*T, d] back to heads [B, T, h, d]; the inverse of `_rows_of_queries`."""
    B, T, h, d = shape
    K = rows.shape[0] // max(B, 1)
    return rows.view(B, K, h // max(K, 1), T, d).permute(0, 3, 1, 2, 4).reshape(shape)


def _weights(
    q_rows: Tensor, k_rows: Tensor, is_seen: Tensor | None, scale: float, group: int, dtype: torch.dtype
) -> Tensor:
    """Return weights [B*K, group*T, keys], undefined for queries that see no key. is_seen: [B, T or 1, keys]."""
    scores = torch.bmm(q_rows, k_rows.transpose(1, 2))
    if scale != 1.0:
        scores.mul_(scale)
    if is_seen is not None:
        B, keys = is_seen.shape[0], scores.shape[-1]
        K, T = scores.shape[0] // max(B, 1), scores.shape[1] // group
        scores.view(B, K, group, T, keys).masked_fill_(~is_seen[:, None, None], NEVER)
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(dtype)


def _over_gathered(q_BThd: Tensor, k: Tensor, v: Tensor, spans: Spans, columns: int, scale: float) -> Tensor:
    """Attend to keys and values [B, K, S, d] whose first `columns` are the prefix; every query must see a key.

    The query heads of a group are merged with the queries, so SDPA need not repeat their key head.
    """
    (B, T, h, d), (K, keys) = q_BThd.shape, k.shape[1:3]
    q_BThd, k, v = in_autocast(q_BThd, k, v)
    is_seen = None if spans.sees_all else spans.dense(columns, keys - columns)
    if is_seen is not None and is_seen.stride(1) == 0:
        is_seen = is_seen[:, :1]  # all queries of a row see the same keys
    q_rows = _rows_of_queries(q_BThd, K)
    is_wide = q_BThd.dtype in (torch.float32, torch.float64)
    if q_BThd.is_cpu and is_wide and B * h * T * keys <= SMALL_GATHERED:
        weights = _weights(q_rows, k.flatten(0, 1), is_seen, scale, h // K, v.dtype)
        return _heads_of_rows(torch.bmm(weights, v.flatten(0, 1)), q_BThd.shape)
    if is_seen is not None:
        is_seen = (is_seen if is_seen.shape[1] == 1 else is_seen.repeat(1, h // K, 1))[:, None]
    q_rows = q_rows.view(B, K, h // K * T, d)
    out = F.scaled_dot_product_attention(q_rows, k, v, attn_mask=is_seen, scale=scale)
    return _heads_of_rows(out.reshape(B * K, h // K * T, d), q_BThd.shape)
