"""Fixed buffers that repeated calls over rows in pages read: positions, spans, RoPE, block tables."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.kernels.span_attention.paged import BlockTable, Gathered, GatheredPool, PagedTensor
from blockdiff.layers.attention import Past
from blockdiff.models.layer_kind import Rope
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.page_pool import SPILL, Pool
from blockdiff.spans import KeptSelection, Spans

if TYPE_CHECKING:
    from blockdiff.models.page_rows import PagedRow

OF_ROPE = ("cos", "sin", "query_scale")
LEAST_PAGES = 4  # least width of a block table: unused pages cost little, and each width needs its own CUDA graph


@dataclass(frozen=True)
class StepInputs:
    """The arguments of `BlockDiffusionModel.forward` for canvases of some rows, except the canvases themselves."""

    positions_BL: Tensor
    spans: dict[str, Spans]
    rope: dict[str, Rope]
    past: list[Past]

    def of_first(self, tokens: int) -> StepInputs:
        """Return the arguments for a call over the first `tokens` tokens of the canvases."""
        if tokens == self.positions_BL.shape[1]:
            return self
        spans = {name: Spans(each.bounds_BT4[:, :tokens], is_padded=False) for name, each in self.spans.items()}
        rope = {name: tuple(x[:, :tokens] for x in each) for name, each in self.rope.items()}
        return StepInputs(self.positions_BL[:, :tokens], spans, rope, self.past)


class StepBuffers:
    """Buffers for denoising steps over at most `most` rows, each with a canvas: `load` once, `denoise` often.

    Load rows whenever one is added, removed or extended. The key that `load` returns determines the launches of
    `denoise` and the memory they use.

    keeps: whether masks, dense copies of pages and selections, which are computed from the buffers, are kept until rows
    are loaded again; a captured step must recompute them, since it is replayed on other rows. is_clean: the buffers are
    for `encode`, which writes `canvas_length` clean tokens after each row; nothing is kept.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        pools: Mapping[str, Pool],
        make_pools: Callable[[], object],
        most: int,
        canvas_length: int,
        keeps: bool,
        is_clean: bool,
    ):
        self.model, self.make_pools, self.is_clean = model if is_clean else model.denoiser, make_pools, is_clean
        self.most, self.canvas_length, self.keeps = most, canvas_length, keeps and not is_clean
        kinds = {name: name for name in pools} if is_clean else model.canvas_kinds
        self.pools = {name: pools[joint] for name, joint in kinds.items()}
        self.rows: list[PagedRow] = []
        self._stamps: list[int] = []  # of the rows at the time they were loaded
        self._buffers: dict[tuple[str, ...], Tensor] = {}
        self._widths: dict[str, int] = {}  # of the block tables of each kind of layer
        self._gathered: dict[str, GatheredPool] = {}  # by kind of layer
        self._kept: StepInputs | None = None

    def load(self, rows: Sequence[PagedRow]) -> Hashable:
        """Fill the buffers for these rows, and return a key.

        Steps with equal keys and numbers of rows launch the same kernels on the same memory.
        """
        self.make_pools()
        stamps = [row.stamp for row in rows]
        widths = {name: table_width(rows, pool) for name, pool in self.pools.items()}
        is_known = widths == self._widths
        fresh = [n for n, row in enumerate(rows) if not (is_known and self._stamps[n : n + 1] == [row.stamp])]
        if set(self.rows).isdisjoint(rows):
            self._gathered.clear()  # all copies are outdated, and they may be large
        if fresh or len(rows) != len(self.rows):
            self._kept = None
        self.rows, self._stamps, self._widths = list(rows), stamps, widths
        if fresh:
            self._write(fresh)
        # on a CPU pools grow, which moves them in memory
        memory = [(x.data_ptr(), x.shape) for pool in self.pools.values() for x in pool.tensors]
        return tuple(widths.values()), tuple(memory)

    def denoise(self, canvas_BL: Tensor, soft_BLD: Tensor | None = None) -> Tensor:
        """Return the hidden states [B, L, D], after the final norm, of the loaded rows' canvases.

        canvas_BL: int64 noisy tokens on the model's device, the first L of each canvas. soft_BLD: the signal of the
        last prediction (None: none).
        """
        inputs = self._kept or self._inputs()
        if self.keeps:
            self._kept = inputs
        inputs = inputs.of_first(canvas_BL.shape[1])
        hidden, _ = self.model(canvas_BL, inputs.positions_BL, inputs.spans, inputs.past, True, soft_BLD, inputs.rope)
        if self.keeps:
            self._note_selections(inputs.spans)
        return hidden

    def encode(self, tokens_BT: Tensor) -> Tensor:
        """Return the hidden states [B, T, D], after the final norm, of clean tokens that are written after the rows.

        The caller must reserve their pages before loading the rows, and append the tokens to the rows afterwards.
        """
        inputs = self._inputs()
        hidden, kv = self.model(tokens_BT, inputs.positions_BL, inputs.spans, inputs.past, rope=inputs.rope)
        for name, pool in self.pools.items():
            pool.write([kv[n] for n in pool.layers], self._own_places(name))
        return hidden

    # -- parts -------------------------------------------------------------------------------------------------

    def _write(self, indices: list[int]) -> None:
        """Fill the buffers of the loaded rows with these indices."""
        model, rows, tokens = self.model, [self.rows[n] for n in indices], self.canvas_length
        firsts = {name: first_columns(rows, pool) for name, pool in self.pools.items()}
        lists: list[Sequence[int]] = [indices, [row.length for row in rows]]
        for name, pool in self.pools.items():
            new_slots = places_of(pool, rows, [tokens] * len(rows), tokens) if self.is_clean else []
            lists += [firsts[name], block_tables(rows, pool, self._widths[name]), new_slots]
        to_B, start_B, *of_pools = uploaded(lists, model.device)
        to = slice(None) if indices == list(range(len(self.rows))) else to_B
        positions_BL = start_B[:, None] + torch.arange(tokens, device=model.device)
        self._set(to, positions_BL, "positions")
        for name, rope in model.rope(positions_BL).items():
            for part, x in zip(OF_ROPE, rope, strict=False):
                self._set(to, x, name, part)
        for name in self.pools:
            first_B, table_N, own_N, *of_pools = of_pools
            length_B, kind, width = start_B, model.kinds[name], self._widths[name]
            if self.is_clean:
                self._set(to, own_N.view(positions_BL.shape), name, "places")
                spans = kind.encode_spans(torch.zeros_like(positions_BL), start_B)
                length_B = start_B + tokens  # attention reads the call's own tokens from the pages, too
            else:
                spans = kind.canvas_spans(start_B, tokens)
            if any(firsts[name]):
                spans, length_B = spans.shifted(first_B), length_B - first_B
            self._set(to, spans.bounds_BT4, name, "bounds")
            self._set(to, length_B.int(), name, "lengths")
            self._set(to, table_N.view(len(rows), width).int(), name, "table", str(width))

    def _set(self, to: slice | Tensor, x: Tensor, *name: str) -> None:
        if name not in self._buffers:
            self._buffers[name] = x.new_zeros(self.most, *x.shape[1:])
        self._buffers[name][slice(len(x)) if isinstance(to, slice) else to] = x

    def _own_places(self, name: str) -> Tensor:
        """Return the slots [B * T] that the encoded tokens are written to."""
        return self._buffers[name, "places"][: len(self.rows)].flatten()

    def _inputs(self) -> StepInputs:
        """Return the arguments of a call over the loaded rows, as views of the buffers."""
        used, rows = slice(len(self.rows)), self.rows
        spans, past, rope = dict[str, Spans](), dict[int, Past](), dict[str, "Rope"]()
        for name, pool in self.pools.items():
            spans[name] = Spans(self._buffers[name, "bounds"][used], is_padded=False, is_causal=self.is_clean)
            if self.keeps and self.model.kinds[name].keeps_selection:
                selected = [row.selection[1] if row.selection[0] == self._mark(row) else {} for row in rows]
                spans[name].kept = KeptSelection.together(selected)
            rope[name] = tuple(self._buffers[name, part][used] for part in OF_ROPE if (name, part) in self._buffers)
            table_BM = self._buffers[name, "table", str(self._widths[name])][used]
            own_N = self._own_places(name) if self.is_clean else None
            pages = BlockTable(table_BM, self._buffers[name, "lengths"][used], pool.page_tokens, own_N)
            if self.keeps:
                lengths = [row.length - column for row, column in zip(rows, first_columns(rows, pool), strict=True)]
                contents = [pool.contents(row.tables[pool.kind.name]) for row in rows]
                pages = BlockTable(table_BM, pages.lengths_B, pool.page_tokens, lengths=lengths, contents=contents)
            copies = self._gathered.setdefault(name, GatheredPool(pool.tensors)) if self.keeps else None
            for n, layer in enumerate(pool.layers):
                past[layer] = tuple(
                    PagedTensor(x[n], pages, None if copies is None else Gathered(copies, tensor, n))
                    for tensor, x in enumerate(pool.tensors)
                )
        return StepInputs(self._buffers["positions",][used], spans, rope, [past[layer] for layer in sorted(past)])

    def _mark(self, row: PagedRow) -> tuple[int, int]:
        """Return the key of a row's stored selections, valid while its tokens and number of queries are equal."""
        return row.stamp, self.canvas_length

    def _note_selections(self, spans: dict[str, Spans]) -> None:
        """Store this call's selections in the rows, for later steps of the same canvases."""
        for each in spans.values():
            if each.kept is None:
                continue
            for n, row in enumerate(self.rows):
                if row.selection[0] != self._mark(row):
                    row.selection = self._mark(row), {layer: ids[n] for layer, ids in each.kept.ids.items()}
            each.kept.open_B = None


def table_width(rows: Sequence[PagedRow], pool: Pool) -> int:
    """Return the width of rows' block tables: the next power of two of the widest, at least LEAST_PAGES."""
    return 1 << (max(LEAST_PAGES, *(len(row.tables[pool.kind.name]) for row in rows)) - 1).bit_length()


def block_tables(rows: Sequence[PagedRow], pool: Pool, width: int) -> list[int]:
    """Return the block tables of rows, flat, `width` pages each, zeros after a row's last page."""
    tables = [row.tables[pool.kind.name] for row in rows]
    return [page for table in tables for page in (*table, *[0] * (width - len(table)))]


def first_columns(rows: Sequence[PagedRow], pool: Pool) -> list[int]:
    """Return the first column of each row that is still in its block table."""
    return [row.first[pool.kind.name] * pool.page_tokens for row in rows]


def places_of(pool: Pool, rows: Sequence[PagedRow], counts: Sequence[int], width: int) -> array[int]:
    """Return the slots of the next `counts[b]` tokens of each row, `width` per row; padding goes to page SPILL."""
    places, name = array("q"), pool.kind.name
    for row, added in zip(rows, counts, strict=True):
        pool.add_places(places, row.tables[name], row.first[name], row.length, row.length + added)
        places.extend([SPILL * pool.page_tokens] * (width - added))
    return places


def uploaded(lists: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Copy lists of integers to a device in one transfer; return int64 tensors, aligned to 16 bytes for Triton."""
    numbers, begins = array("q"), list[int]()
    for each in lists:
        begins.append(len(numbers))
        numbers.extend(each)
        numbers.extend([0] * (len(numbers) % 2))
    together = torch.frombuffer(numbers, dtype=torch.int64).to(device)
    return [together[begin : begin + len(each)] for begin, each in zip(begins, lists, strict=True)]
