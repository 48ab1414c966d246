"""A prefix in pages, as ops take it in place of dense keys and values.

Attention in torch is faster over dense copies, which it keeps from step to step (`Gathered`). A copy has room for the
own tokens of a call right behind the prefix, so that a step copies these and nothing else. The block table tells which
pages have changed, and only those are copied again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from blockdiff.spans import Spans

PageContent = tuple[int, int]  # a page, and the version of what stands in it: the same pair, the same tokens
SPARE_COLUMNS = 16  # columns are taken in multiples of so many, so that growing rows seldom need another copy


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The pages of rows, for all layers that share them.

    table_BM: int32, the page that holds the columns [m P, (m + 1) P) of a row, in any order of pages; lengths_B: int32,
    how many columns each row has; page_tokens: P. own_N: int64, where the tokens of the call itself go, counted in
    tokens over all pages: their columns are counted, too (None: the call reads and writes nothing).

    lengths, contents: the same for the host, where it may know them: how many columns each row has, and what stands in
    its pages; a captured step may not, for it runs again on other rows. seen: what `seen_of` has found.
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


@dataclass(frozen=True, eq=False)
class Seen:
    """The columns of a table's rows that queries see: from `begins` on, at most so many.

    spans: with these columns as the first.
    """

    begins: list[int]
    columns: int
    spans: Spans | None


def seen_of(pages: BlockTable, spans: Spans | None = None) -> Seen:
    """The part of a table's rows that these spans see (None: all), found out once; the host must know the lengths."""
    if spans not in pages.seen:
        assert pages.lengths is not None
        begins, shown = [0] * len(pages.lengths), spans
        if spans is not None:
            begin_B = spans.bounds_BT4[..., 0].amin(1)
            begins = begin_B.tolist()
            bounds_BT4 = spans.bounds_BT4
            if bool((bounds_BT4 == bounds_BT4[:, :1]).all()):  # then a mask is made once for all queries of a row
                bounds_BT4 = bounds_BT4[:, :1].expand_as(bounds_BT4)
            shown = Spans(bounds_BT4, is_padded=False).shifted(begin_B)
        columns = max(length - begin for length, begin in zip(pages.lengths, begins, strict=True))
        if shown is not None:
            T = shown.bounds_BT4.shape[1]
            everything = torch.tensor([0, columns, 0, T], dtype=torch.int32, device=shown.bounds_BT4.device)
            shown.sees_all = bool((shown.bounds_BT4 == everything).all())
        pages.seen[spans] = Seen(begins, columns, shown)
    return pages.seen[spans]


@dataclass(eq=False)
class _Place:
    """The part of a row in a copy: the columns [begin, end), which stand in these pages; zeros follow up to `clean`."""

    begin: int = 0
    end: int = 0
    contents: Sequence[PageContent] = ()
    clean: int = 0


class GatheredPool:
    """The copies of a pool's tensors for the rows of a set, each in its place: [layers, places, K, columns, d].

    tensors: the pool's [layers, pages, P, K, d]; the list may be given larger ones with the same contents.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._copies: list[Tensor] = []
        self._places: list[_Place] = []
        self._loaded: tuple[BlockTable, Seen] | None = None
        self._has_own = False  # whether own tokens stand behind the prefixes that are loaded

    def load(self, pages: BlockTable, seen: Seen, own: int) -> list[Tensor]:
        """The copies of all tensors, with what is seen of a table's rows in them, and with room for `own` tokens."""
        rows, columns = len(seen.begins), seen.columns + own
        if len(self._places) < rows or self._copies[0].shape[3] < columns:
            self._make(rows, columns)
        if self._loaded != (pages, seen):
            self._copy(pages, seen)
            self._loaded, self._has_own = (pages, seen), False
        if own and not self._has_own:
            for place in self._places[:rows]:
                place.clean = min(place.clean, seen.columns)
            self._has_own = True
        return self._copies

    def _make(self, places: int, columns: int) -> None:
        """Have so many places of so many columns, all zeros; where it grows a quarter more, so that this is seldom."""
        if self._copies:
            has_places, has_columns = len(self._places), self._copies[0].shape[3]
            places = max(has_places, places if places <= has_places else places * 5 // 4)
            columns = max(has_columns, columns if columns <= has_columns else columns * 5 // 4)
        columns = -(-columns // SPARE_COLUMNS) * SPARE_COLUMNS
        self._copies = []  # the old ones go before the new ones come
        self._copies = [x.new_zeros(len(x), places, x.shape[3], columns, x.shape[4]) for x in self._tensors]
        self._places, self._loaded = [_Place(clean=columns) for _ in range(places)], None

    def _copy(self, pages: BlockTable, seen: Seen) -> None:
        """Have what is seen of rows in their places, and zeros after it up to the columns of the longest row."""
        assert pages.lengths is not None
        stale = [
            (row, *run)
            for row, (begin, end, contents) in enumerate(zip(seen.begins, pages.lengths, pages.contents, strict=True))
            for run in _update(self._places[row], begin, end, contents, seen.columns, pages.page_tokens)
        ]
        if not stale:
            return
        rows, firsts, counts = torch.tensor(stale, device=pages.table_BM.device).unbind(1)
        row_N = rows.repeat_interleave(counts)
        column_N = (firsts - counts.cumsum(0) + counts).repeat_interleave(counts)
        column_N += torch.arange(len(column_N), device=column_N.device)
        source_N = pages.places_of(row_N, column_N)
        column_N -= torch.tensor(seen.begins, device=column_N.device)[row_N]
        for x, copy in zip(self._tensors, self._copies, strict=True):
            copy.transpose(2, 3)[:, row_N, column_N] = x.flatten(1, 2).index_select(1, source_N)


def _update(
    place: _Place, begin: int, end: int, contents: Sequence[PageContent], columns: int, page_tokens: int
) -> list[tuple[int, int]]:
    """Note that a place has the columns [begin, end) of a row, and zeros after them up to so many columns.

    Returns the runs of columns that have to be written to make it so, each as its first column and its length; what is
    written from `end` on is zero.
    """
    fresh, zeros = begin, end  # where the columns begin that have to be copied, and those that have to be made zero
    if place.begin == begin:
        same = 0
        while same < min(len(contents), len(place.contents)) and contents[same] == place.contents[same]:
            same += 1
        fresh = min(max(begin, same * page_tokens), place.end)
    if end - begin >= place.end - place.begin:  # else what stood there is left behind it
        zeros = max(end, begin + place.clean)
    runs = [(fresh, end - fresh)] if fresh < end else []
    if zeros < begin + columns:
        runs.append((zeros, begin + columns - zeros))
    place.begin, place.end, place.contents = begin, end, contents
    place.clean = max(zeros - begin, columns)
    return runs


@dataclass(frozen=True)
class Gathered:
    """The copy of one tensor of one layer of a pool."""

    pool: GatheredPool
    tensor: int
    layer: int

    def joined(self, prefix: PagedTensor, own_BTKd: Tensor, seen: Seen) -> Tensor:
        """The prefix and the own tokens [B, K, S, d] of the rows of a table, the prefix in the first `seen.columns`."""
        both = self._loaded(prefix.pages, seen, own_BTKd.shape[1])
        both[:, :, seen.columns :].copy_(own_BTKd.transpose(1, 2))
        return both

    def prefix(self, prefix: PagedTensor, seen: Seen | None = None) -> Tensor:
        """The prefix [B, columns, K, d] of the rows of a table: what is seen of it (None: all of it)."""
        return self._loaded(prefix.pages, seen or seen_of(prefix.pages), 0).transpose(1, 2)

    def _loaded(self, pages: BlockTable, seen: Seen, own: int) -> Tensor:
        copy = self.pool.load(pages, seen, own)[self.tensor][self.layer]
        return copy[: len(seen.begins), :, : seen.columns + own]
