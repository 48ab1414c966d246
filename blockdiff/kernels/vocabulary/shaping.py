"""Filters of the distribution of a position before it is drawn from.

Plain torch on chunks of whole logit rows; there is a Triton form, too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

HEAD = 1024  # so many likeliest tokens are sorted first: most often they hold all that top_p leaves
FLAT_ROWS = 8  # rows at a time for which they do not: the sums take several numbers of 64 bits for every logit
COARSE = 16  # bits of a float that say its place among 65,536 bins


class Shaping(NamedTuple):
    """The filters of the tempered distribution that is drawn from; the soft embedding is made without them.

    Left are the top_k likeliest tokens, of these the fewest likeliest ones that hold top_p of their probability, and of
    these the ones at least min_p times as likely as the likeliest. Tokens as likely as the last one that is left are
    left, too.
    """

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def has_filters(self) -> bool:
        """True where any tokens may be left out."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0


def is_left(z: Tensor, top_k: int | None, top_p: float, min_p: float) -> Tensor:
    """The tokens of tempered logits [N, V] that the filters leave, bool; those with z = -inf never."""
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
    """The logit [N, 1] of the last token that is needed, from the likeliest on, to hold top_p of the probability."""
    e = (z - peak).exp()
    wanted = e.sum(-1, keepdim=True, dtype=torch.float64) * top_p
    head = z.topk(min(HEAD, z.shape[-1])).values
    floor, is_reached = _reached(head, peak, wanted)
    for rows in (~is_reached).nonzero().squeeze(-1).split(FLAT_ROWS):
        if len(rows):
            floor[rows] = _nucleus_of_many(z[rows], peak[rows], e[rows].double(), wanted[rows])
    return floor


def _reached(values: Tensor, peak: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The first of some descending logits at which their sum is reached, [N, 1], and whether one is, [N]."""
    is_enough = (values - peak).exp().cumsum(-1, dtype=torch.float64) >= wanted
    first = is_enough.int().argmax(-1, keepdim=True)
    return values.gather(-1, first), is_enough[:, -1]


def _nucleus_of_many(z: Tensor, peak: Tensor, e: Tensor, wanted: Tensor) -> Tensor:
    """As `_nucleus`, for flat distributions: a sum over bins of alike logits, then only the bin that decides is sorted.

    The bins are the upper half of the bits, in an order that is that of the numbers.
    """
    N, bins = len(z), 1 << COARSE
    bits = z.view(torch.int32)
    bin_NV = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - COARSE)).long() + bins // 2
    place = (bin_NV + torch.arange(N, device=z.device)[:, None] * bins).flatten()
    mass = torch.bincount(place, weights=e.flatten(), minlength=N * bins).view(N, bins)
    from_top = mass.flip(-1).cumsum(-1)
    passed = (from_top < wanted).sum(-1, keepdim=True).clamp_(max=bins - 1)  # bins that are needed whole
    before = torch.where(passed > 0, from_top.gather(-1, (passed - 1).clamp(min=0)), 0.0)
    is_deciding = bin_NV == bins - 1 - passed
    most = max(1, int(is_deciding.sum(-1).max()))  # none where the logits are no numbers
    values = z.masked_fill(~is_deciding, -torch.inf).topk(most).values
    floor, is_enough = _reached(values, peak, wanted - before)
    # Sums in another order may miss the last digits of what is wanted: then the whole bin is needed.
    lowest = z.masked_fill(~is_deciding, torch.inf).amin(-1, keepdim=True)
    return torch.where(is_enough[:, None], floor, lowest)
