"""A prefix in pages, as ops take it in place of dense keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from blockdiff.kernels.span_attention.gathered import Gathered, Seen
    from blockdiff.spans import Spans

PageContent = tuple[int, int]  # a page, and the version of what stands in it: the same pair, the same tokens


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The pages of rows, for all layers that share them.

    table_BM: int32, the page that holds the columns [m P, (m + 1) P) of a row, in any order of pages; lengths_B: int32,
    how many columns each row has; page_tokens: P. own_N: int64, where the tokens of the call itself go, counted in
    tokens over all pages: their columns are counted, too (None: the call reads and writes nothing).

    lengths, contents: the same for the host, where it may know them: how many columns each row has, and what stands in
    its pages; a captured step may not, for it runs again on other rows. seen: what `gathered.seen_of` has found.
    """

    table_BM: Tensor
    lengths_B: Tensor
    page_tokens: int
    own_N: Tensor | None = None
    lengths: Sequence[int] | None = None
    contents: Sequence[Sequence[PageContent]] = ()
    seen: dict[Spans | None, Seen] = field(default_factory=dict, repr=False)

    @property
    def columns(self) -> int:
        """The number of columns that the table has room for."""
        return self.table_BM.shape[1] * self.page_tokens

    @cached_property
    def places_N(self) -> Tensor:
        """The places of the columns of all rows, counted in tokens over all pages; 0, of zeros, after a row's end.

        Each row has as many as the longest; as the table has room for, where the host does not know the lengths.
        """
        columns = self.columns if self.lengths is None else max(self.lengths)
        column = torch.arange(columns, device=self.table_BM.device)
        page_BS = self.table_BM[:, column // self.page_tokens]
        places_BS = page_BS * self.page_tokens + column % self.page_tokens
        return torch.where(column < self.lengths_B[:, None], places_BS, 0).flatten()

    def places_of(self, row_N: Tensor, column_N: Tensor) -> Tensor:
        """The places of columns of rows, counted in tokens over all pages; 0, where zeros are, after a row's length."""
        page_N = self.table_BM[row_N, (column_N // self.page_tokens).clamp(max=self.table_BM.shape[1] - 1)]
        places_N = page_N * self.page_tokens + column_N % self.page_tokens
        return torch.where(column_N < self.lengths_B[row_N], places_N, 0)


@dataclass(frozen=True, eq=False)
class PagedTensor:
    """One tensor of a layer's prefix, the keys or the values, whose tokens stand in pages of a pool.

    pool_NPKd: every page's tokens. What a page holds beyond a row's length may be anything; page 0 is never written
    and holds zeros. gathered: where torch keeps a dense copy from step to step (None: it makes one in each call).
    """

    pool_NPKd: Tensor
    pages: BlockTable
    gathered: Gathered | None = None

    def dense(self) -> Tensor:
        """The prefix as a tensor [B, columns, K, d], finite after each row's length: a copy."""
        if self.gathered is not None:
            return self.gathered.prefix(self)
        places_N, rows = self.pages.places_N, len(self.pages.table_BM)
        taken = self.pool_NPKd.flatten(0, 1).index_select(0, places_N)
        return taken.view(rows, len(places_N) // rows, *taken.shape[1:])

    def write(self, own_BTKd: Tensor) -> Tensor:
        """Write the call's own tokens where they go; returns those that no page holds: none, [B, 0, K, d]."""
        assert self.pages.own_N is not None
        self.pool_NPKd.flatten(0, 1).index_copy_(0, self.pages.own_N, own_BTKd.flatten(0, 1))
        return own_BTKd[:, :0]


PrefixTensor = Tensor | PagedTensor


def written(past: tuple[PrefixTensor, ...] | None) -> tuple[PagedTensor, ...] | None:
    """The same, where it is pages that a call's own tokens are to be written into; else None."""
    is_written = past and isinstance(past[0], PagedTensor) and past[0].pages.own_N is not None
    return cast(tuple[PagedTensor, ...], past) if is_written else None
