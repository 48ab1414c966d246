"""Dense copies of what rows have in pages, which attention in torch keeps from step to step: it is faster over them.

A copy has room for the own tokens of a call right behind the prefix, so that a step copies these and nothing else. It
is brought up to date by what the block table says of the pages: only pages whose content is another one are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.spans import Spans

if TYPE_CHECKING:
    from blockdiff.kernels.span_attention.paged import BlockTable, PageContent, PagedTensor

SPARE_COLUMNS = 16  # columns are taken in multiples of so many, so that growing rows seldom need another copy


@dataclass(frozen=True, eq=False)
class Seen:
    """The columns of a table's rows that queries see: from `begins` on, at most so many.

    spans: with these columns as the first; indices: where columns stand, by row and their begin and end, for all
    tensors that lie in the same pages.
    """

    begins: list[int]
    columns: int
    spans: Spans | None
    indices: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)


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


class Gathered:
    """The copy of one tensor of a layer for the rows of a set, each in its place: [places, K, columns, d]."""

    def __init__(self) -> None:
        self._both_BKSd = torch.empty(0, 0, 0, 0)
        self._places: list[_Place] = []
        self._loaded: tuple[BlockTable, Seen] | None = None

    def joined(self, prefix: PagedTensor, own_BTKd: Tensor, seen: Seen) -> Tensor:
        """The prefix and the own tokens [B, K, S, d] of the rows of a table, the prefix in the first `seen.columns`."""
        both = self._with_room(prefix, seen, own_BTKd.shape[1])
        both[:, :, seen.columns :].copy_(own_BTKd.transpose(1, 2))
        for place in self._places[prefix.pages.first :][: len(both)]:
            place.clean = min(place.clean, seen.columns)
        return both

    def prefix(self, prefix: PagedTensor, seen: Seen | None = None) -> Tensor:
        """The prefix [B, columns, K, d] of the rows of a table: what is seen of it (None: all of it)."""
        return self._with_room(prefix, seen or seen_of(prefix.pages), 0).transpose(1, 2)

    def _with_room(self, prefix: PagedTensor, seen: Seen, own: int) -> Tensor:
        pages, columns = prefix.pages, seen.columns + own
        last = pages.first + len(seen.begins)
        if len(self._places) < last or self._both_BKSd.shape[2] < columns:
            self._make(prefix.pool_NPKd, last, columns)
        if self._loaded != (pages, seen):
            for row in range(len(seen.begins)):
                self._load(prefix, seen, row)
            self._loaded = pages, seen
        return self._both_BKSd[pages.first : last, :, :columns]

    def _make(self, pool_NPKd: Tensor, places: int, columns: int) -> None:
        """Have so many places of so many columns, all zeros; where it grows a quarter more, so that this is seldom."""
        has_places, _, has_columns, _ = self._both_BKSd.shape
        if has_places:
            places = max(has_places, places if places <= has_places else places * 5 // 4)
            columns = max(has_columns, columns if columns <= has_columns else columns * 5 // 4)
        columns = -(-columns // SPARE_COLUMNS) * SPARE_COLUMNS
        self._both_BKSd = pool_NPKd.new_zeros(places, pool_NPKd.shape[2], columns, pool_NPKd.shape[3])
        self._places, self._loaded = [_Place(clean=columns) for _ in range(places)], None

    def _load(self, prefix: PagedTensor, seen: Seen, row: int) -> None:
        """Have what is seen of a row in its place, and zeros after it up to the columns of the longest row."""
        pages, begin = prefix.pages, seen.begins[row]
        assert pages.lengths is not None
        end, contents = pages.lengths[row], pages.contents[row]
        place, target_KSd = self._places[pages.first + row], self._both_BKSd[pages.first + row]
        fresh = begin  # what has to be copied begins here
        if place.begin == begin:
            same = 0
            while same < min(len(contents), len(place.contents)) and contents[same] == place.contents[same]:
                same += 1
            fresh = min(max(begin, same * pages.page_tokens), place.end)
        if fresh < end:
            if (row, fresh, end) not in seen.indices:
                seen.indices[row, fresh, end] = pages.places_of(row, fresh, end)
            taken = prefix.pool_NPKd.flatten(0, 1).index_select(0, seen.indices[row, fresh, end])
            target_KSd[:, fresh - begin : end - begin] = taken.transpose(0, 1)
        zeros = end - begin
        if zeros >= place.end - place.begin:  # else what stood there is left behind it
            zeros = max(zeros, place.clean)
        if zeros < seen.columns:
            target_KSd[:, zeros : seen.columns] = 0
        place.begin, place.end, place.contents = begin, end, contents
        place.clean = max(zeros, seen.columns)
