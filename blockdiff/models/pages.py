"""The prefixes of an engine's rows, in pages that rows can share.

`page_rows.py` does the accounting of pages; here tokens are encoded into them and canvases are denoised over them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from blockdiff import memory
from blockdiff.errors import BlockdiffError
from blockdiff.images import PlacedImage, RowImages
from blockdiff.kernels.span_attention.paged import BlockTable, PagedTensor
from blockdiff.layers.attention import KV, Past
from blockdiff.models.image_features import ImageFeatures
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.models.page_buffers import (
    StepBuffers,
    block_tables,
    first_columns,
    places_of,
    table_width,
    uploaded,
)
from blockdiff.models.page_keys import identities
from blockdiff.models.page_pool import SPILL, Link, Pool, Published
from blockdiff.models.page_rows import NO_LIMIT, PagedRow, PagedRows
from blockdiff.models.weights import weight_addresses, weights_version

PAGE_TOKENS = 128
SHARE_OF_MEMORY = {"cpu": 0.4, "cuda": 0.8}  # for pages; on a CPU torch keeps a dense copy of rows in use as well


class Pages(PagedRows):
    """All pages of one model, on its device.

    page_tokens: tokens of a page, a multiple of the block if the model has a prefix of blocks. capacity: tokens that
    all pages of a kind of layers hold (None: as the device's memory allows; on a CPU memory is allocated as needed,
    elsewhere all with the first encode). weight_addresses: the addresses of the model's weights. After
    `follow_weights` finds the weights changed, new rows share nothing with earlier ones.
    """

    def __init__(self, model: BlockDiffusionModel, page_tokens: int = PAGE_TOKENS, capacity: int | None = None):
        block = max(kind.block or 1 for kind in model.kinds.values())
        page_tokens = -(-page_tokens // block) * block
        by_kind = {name: [n for n, each in enumerate(model.layer_kinds) if each == name] for name in model.kinds}
        most, grows = (capacity or 0) // page_tokens, model.device.type == "cpu"
        links: Published = {}
        pools = {
            name: Pool(model.kinds[name], layers, page_tokens, most, grows, links) for name, layers in by_kind.items()
        }
        super().__init__(pools, links, page_tokens)
        self.model = model
        self.images = ImageFeatures(model)
        self.kept_free: int | None = None  # bytes reserved for calls; None: unknown, calls get a share of the memory
        self.share = 1.0  # of the memory for pages that this model may use
        self._version = weights_version(model)
        self.weight_addresses = weight_addresses(self._version)
        self._buffers: StepBuffers | None = None  # of `denoise`
        if capacity is None:
            self.grow()

    def follow_weights(self) -> None:
        """Forget all encoded tokens if the weights have changed since the last call (see `weights_version`).

        Call it before opening rows, once a step.
        """
        version = weights_version(self.model)
        if version != self._version:
            self.forget()
            self.images.clear()
            self._version, self.weight_addresses = version, weight_addresses(version)

    def grow(self, tokens: int | None = None, rows: int | None = None, added: int = 0) -> bool:
        """Enlarge the pools to hold `tokens` tokens (None: as many as memory allows); never shrink one.

        rows: the number of rows with these tokens; layers with a window then get pages for the windows of that many
        rows, and the others the remaining memory (None: unknown, all kinds get equally many). added: the most tokens
        that a call adds to a row, if more than a canvas. Returns False if memory does not suffice for all.
        """
        needed = NO_LIMIT if tokens is None else -(-tokens // self.page_tokens)
        most, canvas = dict.fromkeys(self.pools, needed), self.model.canvas_length
        for name, pool in self.pools.items():
            if rows is not None and (of_canvas := pool.window_pages(canvas)) is not None:
                pool.row_pages = max(pool.row_pages or 0, pool.window_pages(max(added, canvas)) or 0)
                most[name] = min(needed, rows * of_canvas + pool.row_pages)
        if all(pool.most >= most[name] for name, pool in self.pools.items()):
            return True
        counts = page_counts(most, self._page_bytes(), self._available())
        # the ranks of tensor parallelism must admit the same rows, whatever memory each has
        counts = {name: self.model.vocabulary.least_of_ranks(count) for name, count in counts.items()}
        for name, pool in self.pools.items():
            pool.most = max(pool.most, counts[name])
        return counts == most

    @property
    def grows(self) -> bool:
        """Whether memory is allocated as needed, not all at once."""
        return all(pool.grows for pool in self.pools.values())

    def stand_in(self, tokens: int, added: int) -> PagedRow:
        """Return a row of `tokens` tokens in reserved pages, for measuring the time or memory of calls, not results."""
        row = PagedRow(Link(None, b""), {}, {}, tokens, tokens, stamp=next(self._stamps))
        for name, pool in self.pools.items():
            row.first[name] = pool.first_kept(tokens) // self.page_tokens
            row.tables[name] = [SPILL] * (-(-(tokens + added) // self.page_tokens) - row.first[name])
        return row

    def make_pools(self) -> dict[str, Pool]:
        """Allocate the pools' tensors for every page, unless done already, and return the pools."""
        if not all(pool.tensors for pool in self.pools.values()):
            for pool in self.pools.values():
                pool.make([self._token_kv[layer] for layer in pool.layers])
        for pool in self.pools.values():
            pool.hold_all()
        return self.pools

    @functools.cached_property
    def _token_kv(self) -> list[KV]:
        """The tensors that each layer stores for a token."""
        model = self.model
        nothing_11 = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        spans = {name: kind.encode_spans(nothing_11) for name, kind in model.kinds.items()}
        with torch.no_grad():
            return model(nothing_11, nothing_11, spans)[1]

    def _page_bytes(self) -> dict[str, int]:
        """Return the bytes of a page, by kind of layers."""
        kv, size = self._token_kv, self.page_tokens
        return {name: size * sum(x.nbytes for n in pool.layers for x in kv[n]) for name, pool in self.pools.items()}

    def _available(self) -> int | None:
        """Return the bytes of the device's memory that pages may use, None if unknown."""
        available, device = memory.available_bytes(self.model.device), self.model.device.type
        if available is None:
            return None
        if self.kept_free is not None:
            return int(max(0, available - self.kept_free) * self.share)
        return int(available * SHARE_OF_MEMORY.get(device, 0.4) * self.share)

    # -- passes ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(
        self,
        rows: Sequence[PagedRow],
        tokens_BT: Tensor,
        lengths: Sequence[int],
        images: Sequence[Sequence[PlacedImage]] | None = None,
        call: Callable[[Sequence[PagedRow], Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Encode clean tokens that follow their rows' tokens; return hidden states [B, T, D] after the final norm.

        The tokens are not accepted yet (see `accept`). tokens_BT: int64, right-padded, preferably on the CPU, where
        their values are read. lengths: number of tokens of each row. images: the images of each row, with columns of
        this call (None: none). call: computes the hidden states and writes the pages, such as a captured call (None:
        call the model). Raises BlockdiffError if there is not enough memory (see `reserve`).
        """
        if not all(self.reserve(row, added) for row, added in zip(rows, lengths, strict=True)):
            raise BlockdiffError(
                f"no room for {sum(lengths)} more tokens: {self.free_tokens()} of the pages' tokens are free; "
                "release rows or raise capacity"
            )
        hidden = self._encoded(rows, tokens_BT, lengths, images) if call is None else call(rows, tokens_BT)
        for row, tokens, added, of_row in zip(
            rows, tokens_BT.tolist(), lengths, images or [()] * len(rows), strict=True
        ):
            self._append(row, identities(tokens[:added], of_row))
        return hidden

    def _encoded(
        self,
        rows: Sequence[PagedRow],
        tokens_BT: Tensor,
        lengths: Sequence[int],
        images: Sequence[Sequence[PlacedImage]] | None,
    ) -> Tensor:
        """Call the model on clean tokens, write them to the pages of their rows, and return their hidden states."""
        model, device = self.model, self.model.device
        pools, width = self.make_pools(), tokens_BT.shape[1]
        firsts = {name: first_columns(rows, pool) for name, pool in pools.items()}
        # the call's own tokens are written to the pages before attention reads them there, so lengths include them
        ends = [row.length + added for row, added in zip(rows, lengths, strict=True)]
        afters = {name: [end - first for end, first in zip(ends, firsts[name], strict=True)] for name in pools}
        lists: list[Sequence[int]] = [[row.length for row in rows], lengths]
        for name, pool in pools.items():
            table = block_tables(rows, pool, table_width(rows, pool))
            lists += [firsts[name], afters[name], table, places_of(pool, rows, lengths, width)]
        past_B, added_B, *of_pools = uploaded(lists, device)
        column_T = torch.arange(width, device=device)
        doc_start_BT = torch.where(column_T < added_B[:, None], 0, -1)
        placed = None if images is None else self._placed(images, width)
        spans, past, places = {}, dict[int, Past](), {}
        for name, pool in pools.items():
            first_B, after_B, table_N, places[name], *of_pools = of_pools
            spans[name] = model.kinds[name].encode_spans(doc_start_BT, past_B, placed)
            if any(firsts[name]):
                spans[name] = spans[name].shifted(first_B)
            table_BM = table_N.view(len(rows), -1).int()
            pages = BlockTable(table_BM, after_B.int(), pool.page_tokens, places[name], afters[name])
            for n, layer in enumerate(pool.layers):
                past[layer] = tuple(PagedTensor(x[n], pages) for x in pool.tensors)
        of_layers = [past[layer] for layer in sorted(past)]
        hidden, kv = model(tokens_BT.to(device), past_B[:, None] + column_T, spans, of_layers, images=placed)
        for name, pool in self.pools.items():
            pool.write([kv[n] for n in pool.layers], places[name])
        return hidden

    @torch.no_grad()
    def denoise(self, rows: Sequence[PagedRow], canvas_BL: Tensor, soft_BLD: Tensor | None = None) -> Tensor:
        """Return the hidden states [B, L, D], after the final norm, of the canvas after each row; rows are unchanged.

        canvas_BL: int64 noisy tokens on the model's device. soft_BLD: the signal of the last prediction (None: none).
        To alternate between several sets of rows, use `step_buffers` for each.
        """
        steps, length = self._buffers, canvas_BL.shape[1]
        if steps is None or steps.most < len(rows) or steps.canvas_length != length:
            steps = self._buffers = self.step_buffers(len(rows), length)
        steps.load(rows)
        return steps.denoise(canvas_BL, soft_BLD)

    def step_buffers(self, most: int, canvas_length: int, keeps: bool = True, is_clean: bool = False) -> StepBuffers:
        """Return buffers for repeated calls over at most `most` rows; arguments as in `StepBuffers`."""
        return StepBuffers(self.model, self.pools, self.make_pools, most, canvas_length, keeps, is_clean)

    def _placed(self, images: Sequence[Sequence[PlacedImage]], width: int) -> RowImages | None:
        """Return the images of a call's rows, `width` columns each, with cached features; None if there are none."""
        placed = RowImages.of(images, width)
        if placed is None:
            return None
        return replace(placed.with_features(torch.cat(self.images.of(placed.inputs))), inputs=()).to(self.model.device)


def page_counts(most: Mapping[str, int], page_bytes: Mapping[str, int], available: int | None) -> dict[str, int]:
    """Divide `available` bytes into numbers of pages by kind of layers, at most `most` of each (None: all of `most`).

    All kinds get equally many pages, except those that need fewer, whose share goes to the others.
    """
    if available is None:
        return dict(most)
    counts, remaining = dict[str, int](), available
    for name in sorted(most, key=lambda name: most[name]):
        each = sum(bytes_of for other, bytes_of in page_bytes.items() if other not in counts)
        counts[name] = min(most[name], remaining // each)
        remaining -= counts[name] * page_bytes[name]
    return counts
