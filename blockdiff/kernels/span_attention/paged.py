"""A prefix in pages, which ops accept in place of dense keys and values.

Attention in torch is faster over dense copies, which are kept from step to step (`Gathered`). A copy has room for a
call's own tokens right after the prefix, so that a step copies only these. The block table tells which pages have
changed, and only those are copied again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from blockdiff.spans import Spans

PageContent = tuple[int, int]  # a page and the version of its content: equal pairs have equal tokens
SPARE_COLUMNS = 16  # copies have a multiple of this many columns, so that growing rows seldom need a new copy


@dataclass(frozen=True, eq=False)
class BlockTable:
    """The pages of rows, shared by all layers of a kind.

    A slot is the index of a token over all pages: page * P + offset.

    table_BM: int32, the page of a row's columns [m P, (m + 1) P). lengths_B: int32, the number of columns of each row.
    page_tokens: P. own_N: int64, the slots that the call's own tokens are written to; lengths_B counts them, too (None:
    the call writes nothing).

    lengths, contents: the number of columns and the page contents of each row, for the host. A captured step has
    neither, because it is replayed on other rows. visible: the cache of `visible_columns`.
    """

    table_BM: Tensor
    lengths_B: Tensor
    page_tokens: int
    own_N: Tensor | None = None
    lengths: Sequence[int] | None = None
    contents: Sequence[Sequence[PageContent]] = ()
    visible: dict[Spans | None, VisibleColumns] = field(default_factory=dict, repr=False)

    @property
    def columns(self) -> int:
        """The largest number of columns that a row of the table can have."""
        return self.table_BM.shape[1] * self.page_tokens

    @cached_property
    def slots_N(self) -> Tensor:
        """The slots of all columns of all rows, flat; slot 0, which holds zeros, after a row's end.

        Each row has the columns of the longest row, or `columns` if the host does not know the lengths.
        """
        columns = self.columns if self.lengths is None else max(self.lengths)
        column = torch.arange(columns, device=self.table_BM.device)
        page_BS = self.table_BM[:, column // self.page_tokens]
        slots_BS = page_BS * self.page_tokens + column % self.page_tokens
        return torch.where(column < self.lengths_B[:, None], slots_BS, 0).flatten()

    def slots_of(self, row_N: Tensor, column_N: Tensor) -> Tensor:
        """Return the slots of columns of rows; slot 0, which holds zeros, after a row's end."""
        page_N = self.table_BM[row_N, (column_N // self.page_tokens).clamp(max=self.table_BM.shape[1] - 1)]
        slots_N = page_N * self.page_tokens + column_N % self.page_tokens
        return torch.where(column_N < self.lengths_B[row_N], slots_N, 0)


@dataclass(frozen=True, eq=False)
class PagedTensor:
    """One tensor of a layer's prefix, the keys or the values, stored in pages of a pool.

    pool_NPKd: the tokens of all pages; undefined after a row's length. Page 0 holds zeros and is never written.
    gathered: the dense copy that torch keeps from step to step (None: it copies in each call).
    """

    pool_NPKd: Tensor
    pages: BlockTable
    gathered: Gathered | None = None

    def dense(self) -> Tensor:
        """Copy the prefix to a tensor [B, columns, K, d], finite after each row's length."""
        if self.gathered is not None:
            return self.gathered.prefix(self)
        slots_N, rows = self.pages.slots_N, len(self.pages.table_BM)
        taken = self.pool_NPKd.flatten(0, 1).index_select(0, slots_N)
        return taken.view(rows, len(slots_N) // rows, *taken.shape[1:])

    def write(self, own_BTKd: Tensor) -> Tensor:
        """Write the call's own tokens to their slots; return an empty tensor [B, 0, K, d] in their place."""
        assert self.pages.own_N is not None
        self.pool_NPKd.flatten(0, 1).index_copy_(0, self.pages.own_N, own_BTKd.flatten(0, 1))
        return own_BTKd[:, :0]


PrefixTensor = Tensor | PagedTensor


def written(past: tuple[PrefixTensor, ...] | None) -> tuple[PagedTensor, ...] | None:
    """Return `past` if it is pages that the call's own tokens are written to, else None."""
    is_written = past and isinstance(past[0], PagedTensor) and past[0].pages.own_N is not None
    return cast(tuple[PagedTensor, ...], past) if is_written else None


@dataclass(frozen=True, eq=False)
class VisibleColumns:
    """The prefix columns that the queries of each row see: from `begins[row]` on, at most `columns`.

    spans: the queries' spans, counted from these first columns.
    """

    begins: list[int]
    columns: int
    spans: Spans | None


def visible_columns(pages: BlockTable, spans: Spans | None = None) -> VisibleColumns:
    """Return the columns that spans see (None: all), cached in the table. The host must know the rows' lengths."""
    if spans not in pages.visible:
        assert pages.lengths is not None
        begins, shifted = [0] * len(pages.lengths), spans
        if spans is not None:
            begin_B = spans.bounds_BT4[..., 0].amin(1)
            begins = begin_B.tolist()
            bounds_BT4 = spans.bounds_BT4
            if bool((bounds_BT4 == bounds_BT4[:, :1]).all()):  # equal for all queries of a row: one mask serves all
                bounds_BT4 = bounds_BT4[:, :1].expand_as(bounds_BT4)
            shifted = Spans(bounds_BT4, is_padded=False).shifted(begin_B)
        columns = max(length - begin for length, begin in zip(pages.lengths, begins, strict=True))
        if shifted is not None:
            T = shifted.bounds_BT4.shape[1]
            everything = torch.tensor([0, columns, 0, T], dtype=torch.int32, device=shifted.bounds_BT4.device)
            shifted.sees_all = bool((shifted.bounds_BT4 == everything).all())
        pages.visible[spans] = VisibleColumns(begins, columns, shifted)
    return pages.visible[spans]


@dataclass(eq=False)
class _CopiedRow:
    """The content of one row of a copy: columns [begin, end) of pages `contents`, then zeros up to column `clean`."""

    begin: int = 0
    end: int = 0
    contents: Sequence[PageContent] = ()
    clean: int = 0


class GatheredPool:
    """Dense copies of a pool's tensors for the rows of a block table: [layers, rows, K, columns, d].

    tensors: the pool's, [layers, pages, P, K, d]. The caller may replace them in the list by larger ones with the same
    content.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._copies: list[Tensor] = []
        self._rows: list[_CopiedRow] = []
        self._loaded: tuple[BlockTable, VisibleColumns] | None = None
        self._has_own = False  # whether own tokens were written after the loaded prefixes

    def load(self, pages: BlockTable, visible: VisibleColumns, own_tokens: int) -> list[Tensor]:
        """Return copies of all tensors with the visible columns of a table's rows and room for `own_tokens` more."""
        rows, columns = len(visible.begins), visible.columns + own_tokens
        if len(self._rows) < rows or self._copies[0].shape[3] < columns:
            self._allocate(rows, columns)
        if self._loaded != (pages, visible):
            self._copy(pages, visible)
            self._loaded, self._has_own = (pages, visible), False
        if own_tokens and not self._has_own:
            for row in self._rows[:rows]:
                row.clean = min(row.clean, visible.columns)
            self._has_own = True
        return self._copies

    def _allocate(self, rows: int, columns: int) -> None:
        """Replace the copies by zeros of at least these sizes. One that grows gets a quarter more, to grow rarely."""
        if self._copies:
            old_rows, old_columns = len(self._rows), self._copies[0].shape[3]
            rows = max(old_rows, rows if rows <= old_rows else rows * 5 // 4)
            columns = max(old_columns, columns if columns <= old_columns else columns * 5 // 4)
        columns = -(-columns // SPARE_COLUMNS) * SPARE_COLUMNS
        self._copies = []  # free the old copies first
        self._copies = [x.new_zeros(len(x), rows, x.shape[3], columns, x.shape[4]) for x in self._tensors]
        self._rows, self._loaded = [_CopiedRow(clean=columns) for _ in range(rows)], None

    def _copy(self, pages: BlockTable, visible: VisibleColumns) -> None:
        """Copy the visible columns that have changed, and fill with zeros up to the longest row's columns."""
        assert pages.lengths is not None
        stale = [
            (row, *run)
            for row, (begin, end, contents) in enumerate(
                zip(visible.begins, pages.lengths, pages.contents, strict=True)
            )
            for run in _update(self._rows[row], begin, end, contents, visible.columns, pages.page_tokens)
        ]
        if not stale:
            return
        rows, firsts, counts = torch.tensor(stale, device=pages.table_BM.device).unbind(1)
        row_N = rows.repeat_interleave(counts)
        column_N = (firsts - counts.cumsum(0) + counts).repeat_interleave(counts)
        column_N += torch.arange(len(column_N), device=column_N.device)
        source_N = pages.slots_of(row_N, column_N)
        column_N -= torch.tensor(visible.begins, device=column_N.device)[row_N]
        for x, copy in zip(self._tensors, self._copies, strict=True):
            copy.transpose(2, 3)[:, row_N, column_N] = x.flatten(1, 2).index_select(1, source_N)


def _update(
    row: _CopiedRow, begin: int, end: int, contents: Sequence[PageContent], columns: int, page_tokens: int
) -> list[tuple[int, int]]:
    """Set a copied row to the columns [begin, end), followed by zeros up to `columns`.

    Returns the runs of columns that the caller must write, as (first column, length); from `end` on it writes zeros.
    """
    changed, zeros = begin, end  # the first column to copy, and the first to set to zero
    if row.begin == begin:
        same = 0
        while same < min(len(contents), len(row.contents)) and contents[same] == row.contents[same]:
            same += 1
        changed = min(max(begin, same * page_tokens), row.end)
    if end - begin >= row.end - row.begin:  # else old columns remain after the new end
        zeros = max(end, begin + row.clean)
    runs = [(changed, end - changed)] if changed < end else []
    if zeros < begin + columns:
        runs.append((zeros, begin + columns - zeros))
    row.begin, row.end, row.contents = begin, end, contents
    row.clean = max(zeros - begin, columns)
    return runs


@dataclass(frozen=True)
class Gathered:
    """The dense copy of one tensor of one layer of a pool."""

    pool: GatheredPool
    tensor: int
    layer: int

    def joined(self, prefix: PagedTensor, own_BTKd: Tensor, visible: VisibleColumns) -> Tensor:
        """Return the visible prefix followed by the own tokens, [B, K, visible.columns + T, d]."""
        both = self._load(prefix.pages, visible, own_BTKd.shape[1])
        both[:, :, visible.columns :].copy_(own_BTKd.transpose(1, 2))
        return both

    def prefix(self, prefix: PagedTensor, visible: VisibleColumns | None = None) -> Tensor:
        """Return the visible columns of the prefix (None: all), [B, columns, K, d]."""
        return self._load(prefix.pages, visible or visible_columns(prefix.pages), 0).transpose(1, 2)

    def _load(self, pages: BlockTable, visible: VisibleColumns, own_tokens: int) -> Tensor:
        copy = self.pool.load(pages, visible, own_tokens)[self.tensor][self.layer]
        return copy[: len(visible.begins), :, : visible.columns + own_tokens]
