"""What the denoising steps of a set of rows have in common: positions, spans, RoPE, and the prefix for attention.

It is made when rows join, leave or grow, and used for every step until then. `TabledSteps` has attention read the pages
through block tables; `GatheredSteps`, for native ops, copies each row's pages once into a place of its own, with room
for the canvas behind it, so that a step copies the canvas's keys and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.kernels.span_attention.paged import BlockTable, PagedTensor, ReservedTensor
from blockdiff.layers.attention import Past
from blockdiff.models.page_pool import ZEROS, Pool
from blockdiff.spans import KeptSelection

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel
    from blockdiff.models.page_rows import PagedRow

LEAST_PAGES = 4  # of a block table: a wider one costs little, and each width has a CUDA graph of its own
SPARE_COLUMNS = 16  # columns are taken in multiples of so many, so that growing rows seldom need another place


def table_of(rows: Sequence[PagedRow], pool: Pool, device: torch.device, width: int = 0) -> Tensor:
    """The block tables of rows, int32 [B, at least `width`]; zeros after a row's last page."""
    tables = [row.tables[pool.kind.name] for row in rows]
    width = max(1, width, *map(len, tables))
    return torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32, device=device)


def bucket(rows: Sequence[PagedRow], pool: Pool) -> int:
    """How wide the block tables of rows are made: the next power of two of the widest, LEAST_PAGES at least."""
    return 1 << (max(LEAST_PAGES, *(len(row.tables[pool.kind.name]) for row in rows)) - 1).bit_length()


def first_columns(rows: Sequence[PagedRow], pool: Pool) -> list[int]:
    """The row column that each row's table begins with."""
    return [row.first[pool.kind.name] * pool.page_tokens for row in rows]


def paged_past(
    rows: Sequence[PagedRow], pools: dict[str, Pool], tables: dict[str, Tensor], is_static: bool = False,
    added: Sequence[int] | None = None, places: Mapping[str, Tensor] | None = None,
) -> list[Past] | None:  # fmt: skip
    """Each layer's prefix in its pages, by the block tables [B, pages]; None before anything was encoded.

    is_static: the prefix counts as long as the table is wide, not as long as the longest row. added, places: how many
    tokens of its own a call has for each row, and where they go, if layers are to write them there.
    """
    added = added or [0] * len(rows)
    past: dict[int, Past] = {}
    for name, pool in pools.items():
        first = first_columns(rows, pool)
        lengths = [row.length + more - column for row, more, column in zip(rows, added, first, strict=True)]
        columns = tables[name].shape[1] * pool.page_tokens if is_static else max(lengths)
        lengths_B = torch.tensor(lengths, dtype=torch.int32, device=tables[name].device)
        own_N = None if places is None else places[name]
        pages = BlockTable(tables[name], lengths_B, columns, pool.page_tokens, own_N)
        for n, layer in enumerate(pool.layers):
            past[layer] = tuple(PagedTensor(x[n], pages) for x in pool.tensors)
    return [past[layer] for layer in sorted(past)] if all(past.values()) else None


class Steps:
    """The steps of the canvases of `rows`, in the order of the places that the rows have.

    order, back: indices that bring tensors of the caller's rows into that order and back (None: it is the same).
    """

    def __init__(self, model: BlockDiffusionModel, pools: dict[str, Pool]):
        self.model, self.pools = model, pools
        self.order: Tensor | None = None
        self.back: Tensor | None = None
        self.past: list[Past] | None = None
        self._made_for: tuple[list[int], int, int] | None = None
        self.rows: list[PagedRow] = []
        self._placed: list[PagedRow] = []  # in the order of their places

    def shares(self, rows: Sequence[PagedRow]) -> int:
        """How many of these rows it was last made for."""
        return len(rows) if self.rows == rows else len(set(self.rows).intersection(rows))

    def serve(self, rows: Sequence[PagedRow], canvases: int, canvas_length: int) -> None:
        """Make it fit so many canvases of each of these rows, if it does not yet."""
        wanted = [row.stamp for row in rows], canvases, canvas_length
        if wanted != self._made_for:
            self._make(rows, canvases, canvas_length)
            self._made_for, self.rows = wanted, list(rows)

    def _make(self, rows: Sequence[PagedRow], canvases: int, canvas_length: int) -> None:
        raise NotImplementedError

    def _place(self, rows: Sequence[PagedRow], canvases: int, canvas_length: int, first_B: dict[str, Tensor]) -> None:
        """Positions, spans and RoPE of rows in the order of their places."""
        device = self.model.device
        start_B = torch.tensor([row.length for row in rows], device=device)
        self.positions_BT = start_B[:, None] + torch.arange(canvases * canvas_length, device=device)
        self.rope = self.model.rope(self.positions_BT)
        self.spans = {
            name: kind.running_spans(start_B, canvases, canvas_length).shifted(first_B[name])
            for name, kind in self.model.kinds.items()
        }
        self._placed = list(rows)
        for name, kind in self.model.kinds.items():
            if kind.keeps_selection:
                known = [row.kept[1] if row.kept[0] == self._mark(row) else {} for row in rows]
                self.spans[name].kept = KeptSelection.together(known)

    def _mark(self, row: PagedRow) -> tuple[int, int]:
        """What has to be the same for a selection to stand: the row and how many queries there are."""
        return row.stamp, self.positions_BT.shape[1]

    def keep(self) -> None:
        """After a call: note with the rows what layers have selected of them for all steps of their canvases."""
        for spans in self.spans.values():
            if spans.kept is None:
                continue
            for place, row in enumerate(self._placed):
                if row.kept[0] != self._mark(row):
                    row.kept = self._mark(row), {layer: ids[place] for layer, ids in spans.kept.ids.items()}
            spans.kept.open_B = None


class TabledSteps(Steps):
    """For kernels that read pages: a step has the same shapes for as long as the widest table stays in its bucket.

    Nothing in a step waits for the device.
    """

    def _make(self, rows: Sequence[PagedRow], canvases: int, canvas_length: int) -> None:
        device, tables, first_B = self.model.device, {}, {}
        for name, pool in self.pools.items():
            tables[name] = table_of(rows, pool, device, bucket(rows, pool))
            first_B[name] = torch.tensor(first_columns(rows, pool), device=device)
        self.past = paged_past(rows, self.pools, tables, is_static=True)
        self._place(rows, canvases, canvas_length, first_B)


class GatheredSteps(Steps):
    """For native ops: tensors [layers, slots, K, columns, d] in which a row keeps its slot while it takes part.

    A row's prefix fills the first columns of its slot (of a sliding layer: the last window - 1 tokens); zeros follow
    up to the column where the canvases of all rows begin.
    """

    def __init__(self, model: BlockDiffusionModel, pools: dict[str, Pool]):
        super().__init__(model, pools)
        self._tensors: dict[str, list[Tensor]] = {name: [] for name in pools}
        self._columns = dict.fromkeys(pools, 0)  # where canvases begin
        self._held: dict[int, tuple[PagedRow, int, int]] = {}  # by slot: row, and its length and cuts at that time

    def _make(self, rows: Sequence[PagedRow], canvases: int, canvas_length: int) -> None:
        seats, moves = self._seat(rows)
        seated: list[PagedRow] = [rows[0]] * len(rows)
        for row, slot in zip(rows, seats, strict=True):
            seated[slot] = row
        own, first_B = canvases * canvas_length, {}
        past: dict[int, tuple[ReservedTensor, ...]] = {}
        for name, pool in self.pools.items():
            first = [pool.first_kept(row.length) for row in seated]
            columns = max(row.length - column for row, column in zip(seated, first, strict=True))
            self._make_room(pool, len(rows), columns + own, is_new=not self._held)
            for x in self._tensors[name]:
                if moves:
                    come, go = (torch.tensor(slots, device=x.device) for slots in zip(*moves, strict=True))
                    x[:, go, :, : self._columns[name]] = x[:, come, :, : self._columns[name]]
                if columns > self._columns[name]:
                    x[:, :, :, self._columns[name] : columns] = 0
            self._columns[name] = columns
            self._fill(pool, seated, first)
            first_B[name] = torch.tensor(first, device=self.model.device)
            for n, layer in enumerate(pool.layers):
                both = [x[n, : len(rows), :, : columns + own] for x in self._tensors[name]]
                past[layer] = tuple(ReservedTensor(x, columns) for x in both)
        self.past = [past[layer] for layer in sorted(past)] if all(past.values()) else None
        self._held = {slot: (row, row.length, row.cuts) for slot, row in enumerate(seated)}
        self._place(seated, canvases, canvas_length, first_B)
        for name in self.spans:
            lengths = {row.length - self.pools[name].first_kept(row.length) for row in rows}
            self.spans[name].sees_all = canvases == 1 and len(lengths) == 1
        is_same = seats == list(range(len(rows)))
        self.back = None if is_same else torch.tensor(seats, device=self.model.device)
        self.order = None if self.back is None else self.back.argsort()

    def _seat(self, rows: Sequence[PagedRow]) -> tuple[list[int], list[tuple[int, int]]]:
        """The slot of each row, among the first ones; and which slots move to which others for it.

        Afterwards `_held` says what the slots hold, moves included; a row that comes twice has two slots.
        """
        slots = {row: slot for slot, (row, _, _) in self._held.items()}
        seats = [slots.pop(row, -1) for row in rows]
        free = iter(sorted(set(range(len(rows))).difference(seats)))
        moves, held = [], {}
        for n, slot in enumerate(seats):
            if not 0 <= slot < len(rows):
                seats[n] = next(free)
                if slot >= 0:
                    moves.append((slot, seats[n]))
            if slot >= 0:
                held[seats[n]] = self._held[slot]
        self._held = held
        return seats, moves

    def _make_room(self, pool: Pool, slots: int, columns: int, is_new: bool) -> None:
        """Have so many slots of so many columns; is_new: no row's prefix need be kept."""
        name, columns = pool.kind.name, -(-columns // SPARE_COLUMNS) * SPARE_COLUMNS
        old = list(self._tensors[name])
        if old:
            has_slots, has_columns = old[0].shape[1], old[0].shape[3]
            is_enough = slots <= has_slots and columns <= has_columns
            if is_enough and not (is_new and has_slots * has_columns > 4 * slots * columns):
                return
            if not is_new:  # a quarter more, so that not every canvas needs another place
                slots = max(slots, has_slots if slots <= has_slots else has_slots * 5 // 4)
                columns = max(columns, has_columns if columns <= has_columns else has_columns * 5 // 4)
        kept = self._columns[name]
        for n, x in enumerate(pool.tensors):
            layers, K, d = x.shape[0], *x.shape[3:]
            new = x.new_zeros(layers, slots, K, columns, d)
            if old and not is_new:
                new[:, : old[n].shape[1], :, :kept] = old[n][:, :, :, :kept]
            self._tensors[name][n : n + 1] = [new]

    def _fill(self, pool: Pool, seated: list[PagedRow], first: list[int]) -> None:
        """Copy what slots do not hold yet of their rows' prefixes: all of it, or what a row has grown by.

        first: the row column that each slot begins with.
        """
        fresh: list[tuple[int, int]] = []
        grown: list[tuple[int, int]] = []
        for slot, (row, column) in enumerate(zip(seated, first, strict=True)):
            _, length, cuts = self._held.get(slot, (None, 0, -1))
            begin = length if cuts == row.cuts and pool.first_kept(length) == column else column
            if begin < row.length:
                (grown if begin > column else fresh).append((slot, begin))
        for some in (fresh, grown):
            if some and pool.tensors:
                self._copy(pool, [(slot, seated[slot], first[slot], begin) for slot, begin in some])

    def _copy(self, pool: Pool, rows: list[tuple[int, PagedRow, int, int]]) -> None:
        """Copy the columns of rows from `begin` on to their slots, and zeros after them, all of the same width.

        rows: slot, row, the row column that the slot begins with, and `begin`.
        """
        name, device = pool.kind.name, self.model.device
        is_fresh = all(begin == first for _, _, first, begin in rows)
        width = self._columns[name] if is_fresh else max(row.length - begin for _, row, _, begin in rows)
        places = array("q")
        for _, row, _, begin in rows:
            pool.add_places(places, row.tables[name], row.first[name], begin, row.length)
            places.extend([ZEROS] * (width + begin - row.length))
        index = torch.frombuffer(places, dtype=torch.int64).to(device)
        slots, starts = ([slot for slot, *_ in rows], [begin - first for _, _, first, begin in rows])
        slot_N, start_N = torch.tensor([slots, starts], device=device)
        for x, to in zip(pool.tensors, self._tensors[name], strict=True):
            taken = x.flatten(1, 2).index_select(1, index).view(len(x), len(rows), width, *x.shape[3:])
            target = to.transpose(2, 3)  # [layers, slots, columns, K, d]
            if is_fresh:
                target[:, slot_N, :width] = taken
            else:
                column_NW = start_N[:, None] + torch.arange(width, device=device)
                target[:, slot_N[:, None], column_NW.clamp(max=target.shape[2] - 1)] = taken
