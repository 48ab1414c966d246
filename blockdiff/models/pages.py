"""The prefixes of an engine's rows, in pages that rows can share.

`page_rows.py` keeps count of the pages that a row holds and shares; here tokens are encoded into them and canvases are
denoised over them.
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
SHARE_OF_MEMORY = {"cpu": 0.4, "cuda": 0.8}  # that pages may take: torch on a CPU gathers live rows a second time


class Pages(PagedRows):
    """All pages of one model, on its device.

    page_tokens: tokens of a page, in whole blocks if the model's clean tokens see such; capacity: tokens that fit in
    all, of each kind of layer (None: what the device has memory for; on a CPU memory is taken as it is needed,
    elsewhere all of it with the first encode); weight_addresses: where the model's weights lie. Rows share nothing with
    those that were opened before `follow_weights` has found the weights changed.
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
        self.kept_free: int | None = None  # bytes left to the calls; None: they are unknown, and get a share
        self.share = 1.0  # of the memory that is there for pages
        self._version = weights_version(model)
        self.weight_addresses = weight_addresses(self._version)
        self._buffers: StepBuffers | None = None  # of `denoise`
        if capacity is None:
            self.grow()

    def follow_weights(self) -> None:
        """Forget all that other weights have encoded, if they changed since the last call: see `weights_version`.

        Who opens rows calls it before the first of them: once a step.
        """
        version = weights_version(self.model)
        if version != self._version:
            self.forget()
            self.images.clear()
            self._version, self.weight_addresses = version, weight_addresses(version)

    def grow(self, tokens: int | None = None, rows: int | None = None, added: int = 0) -> bool:
        """Let so many tokens fit (None: as many as the device has memory for); no kind of layers gets fewer pages.

        rows: how many hold them, so that layers with a window get pages for what they see of so many rows, and the
        others get what is left (None: unknown, and all get equally many); added: the most tokens that a call adds to a
        row, where this is more than a canvas. False where the device has no memory for all beside what is held.
        """
        wanted = NO_LIMIT if tokens is None else -(-tokens // self.page_tokens)
        most, canvas = dict.fromkeys(self.pools, wanted), self.model.canvas_length
        for name, pool in self.pools.items():
            if rows is not None and (of_canvas := pool.window_pages(canvas)) is not None:
                pool.row_pages = max(pool.row_pages or 0, pool.window_pages(max(added, canvas)) or 0)
                most[name] = min(wanted, rows * of_canvas + pool.row_pages)
        if all(pool.most >= most[name] for name, pool in self.pools.items()):
            return True
        counts = page_counts(most, self._page_bytes(), self._available())
        # the ranks of tensor parallelism admit the same rows, whatever memory each of them has
        counts = {name: self.model.vocabulary.least_of_ranks(count) for name, count in counts.items()}
        for name, pool in self.pools.items():
            pool.most = max(pool.most, counts[name])
        return counts == most

    @property
    def grows(self) -> bool:
        """True where memory is taken as it is needed, and not all at once."""
        return all(pool.grows for pool in self.pools.values())

    def stand_in(self, tokens: int, added: int) -> PagedRow:
        """A row of so many tokens in pages of nobody, to which a call may add more: for what calls take, not give."""
        row = PagedRow(Link(None, b""), {}, {}, tokens, tokens, stamp=next(self._stamps))
        for name, pool in self.pools.items():
            row.first[name] = pool.first_kept(tokens) // self.page_tokens
            row.tables[name] = [SPILL] * (-(-(tokens + added) // self.page_tokens) - row.first[name])
        return row

    def make_pools(self) -> dict[str, Pool]:
        """Make the pools' tensors, with room for every page, where that is not done yet; returns the pools."""
        if not all(pool.tensors for pool in self.pools.values()):
            for pool in self.pools.values():
                pool.make([self._token_kv[layer] for layer in pool.layers])
        for pool in self.pools.values():
            pool.hold_all()
        return self.pools

    @functools.cached_property
    def _token_kv(self) -> list[KV]:
        """The tensors that layers keep of a token."""
        model = self.model
        nothing_11 = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        spans = {name: kind.encode_spans(nothing_11) for name, kind in model.kinds.items()}
        with torch.no_grad():
            return model(nothing_11, nothing_11, spans)[1]

    def _page_bytes(self) -> dict[str, int]:
        """The bytes of a page of each kind of layers."""
        kv, size = self._token_kv, self.page_tokens
        return {name: size * sum(x.nbytes for n in pool.layers for x in kv[n]) for name, pool in self.pools.items()}

    def _available(self) -> int | None:
        """The bytes that pages may take of the device's memory; None where that is not known."""
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
        """Encode clean tokens behind those of their rows: hidden states [B, T, D] after the final norm.

        The tokens are not accepted: `accept` lets them stand. tokens_BT: int64, rows right-padded, best on the CPU
        (their values are needed there); lengths: how many tokens each row gets; images: those of each row in the call,
        with its columns (None: no row has any); call: gives the hidden states of rows and tokens, and writes these into
        the pages (None: a call of the model that is made for them). Raises BlockdiffError where there is no room:
        `reserve` asks before.
        """
        if not all(self.reserve(row, added) for row, added in zip(rows, lengths, strict=True)):
            raise BlockdiffError(
                f"no room for {sum(lengths)} more tokens: {self.free_tokens()} of the pages' tokens are free; "
                "release rows or make capacity larger"
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
        """Write clean tokens into the pages of their rows; returns their hidden states."""
        model, device = self.model, self.model.device
        pools, width = self.make_pools(), tokens_BT.shape[1]
        firsts = {name: first_columns(rows, pool) for name, pool in pools.items()}
        # the call's own tokens are written into the pages before attention reads them there, and counted
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
        """Hidden states [B, L, D], after the final norm, of the canvas that follows each row; leaves the rows alone.

        canvas_BL: int64 noisy tokens, on the model's device; soft_BLD: the signal of the last prediction (None: none).
        A caller that denoises several sets of rows in turns takes `step_buffers` for each.
        """
        steps, length = self._buffers, canvas_BL.shape[1]
        if steps is None or steps.most < len(rows) or steps.canvas_length != length:
            steps = self._buffers = self.step_buffers(len(rows), length)
        steps.load(rows)
        return steps.denoise(canvas_BL, soft_BLD)

    def step_buffers(self, most: int, canvas_length: int, keeps: bool = True, is_clean: bool = False) -> StepBuffers:
        """Buffers for denoising at most so many rows again and again, or for encoding, see `StepBuffers`."""
        return StepBuffers(self.model, self.pools, self.make_pools, most, canvas_length, keeps, is_clean)

    def _placed(self, images: Sequence[Sequence[PlacedImage]], width: int) -> RowImages | None:
        """The images of a call's rows, of so many columns, with the features that are kept of them."""
        placed = RowImages.of(images, width)
        if placed is None:
            return None
        return replace(placed.with_features(torch.cat(self.images.of(placed.inputs))), inputs=()).to(self.model.device)


def page_counts(wanted: Mapping[str, int], page_bytes: Mapping[str, int], available: int | None) -> dict[str, int]:
    """The numbers of pages, by kind of layers, that fit into so many bytes; no kind gets more than is wanted of it.

    All get equally many, but for those that want fewer: what these leave goes to the others.
    """
    if available is None:
        return dict(wanted)
    counts, left = dict[str, int](), available
    for name in sorted(wanted, key=lambda name: wanted[name]):
        each = sum(bytes_of for other, bytes_of in page_bytes.items() if other not in counts)
        counts[name] = min(wanted[name], left // each)
        left -= counts[name] * page_bytes[name]
    return counts
