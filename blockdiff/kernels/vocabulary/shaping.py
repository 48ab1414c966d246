"""The sampling filters top_k, top_p and min_p in plain torch, on chunks of whole logit rows."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

HEAD = 1024  # likeliest tokens that are sorted first; mostly top_p keeps no others
FLAT_ROWS = 8  # rows at a time if it keeps more: their sums need several 64-bit numbers per logit
COARSE = 16  # upper bits of a float, its index among 65,536 bins


class Shaping(NamedTuple):
    """Filters of the tempered distribution that samples are drawn from; the soft embedding ignores them.

    They keep the top_k likeliest tokens; of these the smallest set of likeliest tokens that holds top_p of the
    probability; and of these the tokens at least min_p times as likely as the likeliest. Tokens that tie with the last
    kept one are kept, too.
    """

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def has_filters(self) -> bool:
        """Whether the filters may remove any token."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


def is_left(z: Tensor, top_k: int | None, top_p: float, min_p: float) -> Tensor:
    """Return which tokens of tempered logits z [N, V] pass the filters, bool; tokens with z = -inf never do."""
    peak = z.amax(-1, keepdim=True)
    floor = torch.full_like(peak, -torch.inf)
    if top_k is not None and top_k < z.shape[-1]:
        floor = z.topk(top_k).values[:, -1:]
    if top_p < 1:
        floor = torch.maximum(floor, _nucleus(z.masked_fill(z < floor, -torch.inf), peak, top_p))
    if min_p > 0:
        floor = torch.maximum(floor, peak + math.log(min_p))
    return (z >= floor) & (z > -torch.inf)


def _nucleus(z: Tensor, peak: Tensor, top_p: float) -> Tensor:
    """Return the logit [N, 1] of the least likely token in the smallest set that holds top_p of the probability."""
    e = (z - peak).exp()
    threshold = e.sum(-1, keepdim=True, dtype=torch.float64) * top_p
    head = z.topk(min(HEAD, z.shape[-1])).values
    floor, is_reached = _reached(head, peak, threshold)
    for rows in (~is_reached).nonzero().squeeze(-1).split(FLAT_ROWS):
        if len(rows):
            floor[rows] = _nucleus_of_many(z[rows], peak[rows], e[rows].double(), threshold[rows])
    return floor


def _reached(values: Tensor, peak: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first of descending logits at which the sum of exp(z - peak) reaches a threshold, [N, 1].

    Also returns whether the sum reaches it at all, bool [N].
    """
    is_enough = (values - peak).exp().cumsum(-1, dtype=torch.float64) >= threshold
    first = is_enough.int().argmax(-1, keepdim=True)
    return values.gather(-1, first), is_enough[:, -1]


def _nucleus_of_many(z: Tensor, peak: Tensor, e: Tensor, threshold: Tensor) -> Tensor:
    """Compute `_nucleus` for flat distributions: sum over bins of similar logits, then sort only the deciding bin.

    A logit's bin is the upper half of its bits, mapped so that bins are ordered like the numbers.
    """
    N, bins = len(z), 1 << COARSE
    bits = z.view(torch.int32)
    bin_NV = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - COARSE)).long() + bins // 2
    bin_index = (bin_NV + torch.arange(N, device=z.device)[:, None] * bins).flatten()
    mass = torch.bincount(bin_index, weights=e.flatten(), minlength=N * bins).view(N, bins)
    from_top = mass.flip(-1).cumsum(-1)
    passed = (from_top < threshold).sum(-1, keepdim=True).clamp_(max=bins - 1)  # bins that are kept entirely
    before = torch.where(passed > 0, from_top.gather(-1, (passed - 1).clamp(min=0)), 0.0)
    is_deciding = bin_NV == bins - 1 - passed
    most = max(1, int(is_deciding.sum(-1).max()))  # 0 if the logits are NaN
    values = z.masked_fill(~is_deciding, -torch.inf).topk(most).values
    floor, is_enough = _reached(values, peak, threshold - before)
    # Summed in another order, the bin may fall short by a rounding: then all of it is kept.
    lowest = z.masked_fill(~is_deciding, torch.inf).amin(-1, keepdim=True)
    return torch.where(is_enough[:, None], floor, lowest)
