"""A prefix in pages, as span_attention takes it in place of the dense keys and values.

`PagedTensor` is what stands in the pages, `ReservedTensor` is a copy made once for the steps of a canvas.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Which pages rows have, for all layers that share them.

    table_BM: int32, the page that holds the columns [m P, (m + 1) P) of a row; lengths_B: int32, how many columns each
    row has; columns: the most of them; page_tokens: P. own_N: int64, where the tokens of the call itself go, counted in
    tokens over all pages: their columns are counted, too (None: the call reads and writes nothing).
    """

    table_BM: Tensor
    lengths_B: Tensor
    columns: int
    page_tokens: int
    own_N: Tensor | None = None

    @cached_property
    def places_BS(self) -> Tensor:
        """Where every column stands, counted in tokens over all pages; 0, where zeros are, after a row's length."""
        column = torch.arange(self.columns, device=self.table_BM.device)
        page_BS = self.table_BM[:, column // self.page_tokens]
        places_BS = page_BS * self.page_tokens + column % self.page_tokens
        return torch.where(column < self.lengths_B[:, None], places_BS, 0)


@dataclass(frozen=True, eq=False)
class PagedTensor:
    """One tensor of a layer's prefix, the keys or the values, whose tokens stand in pages of a pool.

    pool_NPKd: every page's tokens. What a page holds beyond a row's length may be anything; page 0 is never written
    and holds zeros.
    """

    pool_NPKd: Tensor
    pages: BlockTable

    def dense(self) -> Tensor:
        """The prefix as a tensor [B, columns, K, d], zeros after each row's length: a copy."""
        places_BS = self.pages.places_BS
        taken = self.pool_NPKd.flatten(0, 1).index_select(0, places_BS.flatten())
        return taken.view(*places_BS.shape, *self.pool_NPKd.shape[2:])

    def write(self, own_BTKd: Tensor) -> Tensor:
        """Write the call's own tokens where they go; returns those that no page holds: none, [B, 0, K, d]."""
        assert self.pages.own_N is not None
        self.pool_NPKd.flatten(0, 1).index_copy_(0, self.pages.own_N, own_BTKd.flatten(0, 1))
        return own_BTKd[:, :0]


@dataclass(frozen=True, eq=False)
class ReservedTensor:
    """One tensor of a layer's prefix with room for the call's own tokens right behind it.

    both_BKSd: the prefix in the first `columns` of the columns, finite where no query sees it, then the room.
    """

    both_BKSd: Tensor
    columns: int

    def joined(self, own_BTKd: Tensor) -> Tensor:
        """Prefix and own tokens [B, K, S, d]; writes the own ones into the room."""
        self.both_BKSd[:, :, self.columns :].copy_(own_BTKd.transpose(1, 2))
        return self.both_BKSd


PrefixTensor = Tensor | PagedTensor | ReservedTensor


def written(past: tuple[PrefixTensor, ...] | None) -> tuple[PagedTensor, ...] | None:
    """The same, where it is pages that a call's own tokens are to be written into; else None."""
    is_written = past and isinstance(past[0], PagedTensor) and past[0].pages.own_N is not None
    return cast(tuple[PagedTensor, ...], past) if is_written else None
