"""The prefixes of many rows in pages that rows can share: what an engine samples with.

A row holds a block table for each kind of layer. Sliding layers give pages back as their window leaves them. Full
pages are published under the tokens they hold and all tokens before these, so that a row which begins alike can share
them instead of encoding the tokens again.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from blockdiff import memory
from blockdiff.errors import BlockdiffError
from blockdiff.kernels import NATIVE
from blockdiff.models.family import BlockDiffusionModel, family_of
from blockdiff.models.page_pool import SPILL, ZEROS, Link, Pool, Published
from blockdiff.models.page_steps import GatheredSteps, Steps, TabledSteps, first_columns, paged_past, table_of

PAGE_TOKENS = 128
MOST_STEPS = 32  # sets of rows that are denoised in turns without being gathered again
SHARE_OF_MEMORY = {"cpu": 0.4, "cuda": 0.8}  # that pages may take: native ops on a CPU gather live rows a second time


@dataclass(eq=False)
class PagedRow:
    """A row's cached tokens: how many, and the pages that hold them by kind of layer.

    first: how many pages before those in the table were given back; links: where its full pages are published;
    tail: its tokens after them; stamp: changes whenever the row does; cuts: how often it was truncated.
    """

    root: Link
    tables: dict[str, list[int]]
    first: dict[str, int]
    length: int = 0
    links: list[Link] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    stamp: int = 0
    cuts: int = 0


@dataclass(frozen=True)
class PageStatistics:
    """What the pages hold, by kind of layer, and what happened so far.

    pages: in use; cached: not in use, and their tokens can be shared; published: all that can be shared;
    reused_tokens: what `reuse` found, of the asked_tokens of new rows; evictions: cached pages given to other tokens.
    """

    pages: dict[str, int]
    cached: dict[str, int]
    published: dict[str, int]
    reused_tokens: int
    asked_tokens: int
    evictions: int


class Pages:
    """All pages of one model, on its device.

    page_tokens: tokens of a page; capacity: tokens that fit in all, of each kind of layer (None: what the device has
    memory for; on a CPU memory is taken as it is needed, elsewhere all of it with the first encode); identity: of the
    model, its adapter and its quantisation: rows share pages only where it is the same. It may be changed between rows.
    """

    def __init__(
        self,
        model: BlockDiffusionModel,
        page_tokens: int = PAGE_TOKENS,
        capacity: int | None = None,
        identity: str = "",
    ):
        self.model, self.page_tokens, self.identity = model, page_tokens, identity
        most = (_capacity(model) if capacity is None else capacity) // page_tokens
        by_kind = {name: [n for n, each in enumerate(model.layer_kinds) if each == name] for name in model.kinds}
        grows = model.device.type == "cpu"
        self._links: Published = {}
        self.pools = {
            name: Pool(model.kinds[name], layers, page_tokens, most, grows, self._links)
            for name, layers in by_kind.items()
        }
        self._rows: set[PagedRow] = set()
        self._stamps = itertools.count(1)
        self._steps: list[Steps] = []  # the one used last comes last
        self._reused = self._asked = 0

    # -- rows --------------------------------------------------------------------------------------------------

    def open(self) -> PagedRow:
        """An empty row."""
        root = self._links.setdefault((None, key := self.identity.encode()), Link(None, key))
        row = PagedRow(root, {name: [] for name in self.pools}, dict.fromkeys(self.pools, 0), stamp=next(self._stamps))
        self._rows.add(row)
        return row

    def reuse(self, row: PagedRow, tokens: Sequence[int], multiple: int = 1) -> int:
        """Share the pages of the longest beginning of `tokens` that others have encoded; returns the tokens now in it.

        tokens: all of the row's tokens, from its first on; multiple: the row's length becomes a multiple of it. Nothing
        is shared after a row's own tokens unless these end with a page. The tokens themselves are compared.
        """
        if row.tail:
            return row.length
        size, found = self.page_tokens, list[Link]()
        link = row.links[-1] if row.links else row.root
        self._asked += 0 if row.length else len(tokens)
        for first in range(row.length, len(tokens) - size + 1, size):
            following = self._links.get((link, key_of(tokens[first : first + size])))
            if following is None:
                break
            found.append(link := following)
        pages_before = row.length // size
        while found and not self._can_share(found, pages_before, multiple):
            found.pop()
        if not found:
            return row.length
        length = row.length + len(found) * size
        self._reused += length - row.length
        for name, pool in self.pools.items():
            self._cut(row, pool, pages_before)  # what was reserved
            self._leave(row, pool, length)
            for each in found[max(0, row.first[name] - pages_before) :]:
                pool.refer(each.pages[name])
                row.tables[name].append(each.pages[name])
        row.length, row.stamp = length, next(self._stamps)
        row.links += found
        return length

    def reserve(self, row: PagedRow, tokens: int) -> bool:
        """Make room for so many more tokens of a row; False, with nothing changed, where there is no memory."""
        last, begun = divmod(row.length, self.page_tokens)
        pages = -(-(row.length + tokens) // self.page_tokens)
        wanted = []
        for name, pool in self.pools.items():
            table, first = row.tables[name], row.first[name]
            missing = max(0, pages - first - len(table))
            is_copied = bool(begun and tokens) and pool.is_shared(table[last - first])
            if missing + is_copied > pool.available:
                return False
            if missing or is_copied:
                wanted.append((pool, table, missing, last - first if is_copied else None))
        for pool, table, missing, place in wanted:
            if place is not None:
                table[place] = pool.copied(table[place])
            table += [pool.take() for _ in range(missing)]
        return True

    def truncate(self, row: PagedRow, tokens: int) -> None:
        """Drop a row's tokens after the first so many.

        Raises BlockdiffError where a sliding layer has given back pages that the row would need again.
        """
        size, length = self.page_tokens, min(tokens, row.length)
        for name, pool in self.pools.items():
            if pool.first_kept(length) // size < row.first[name]:
                raise BlockdiffError(
                    f"a row of {row.length} tokens cannot be cut to {length}: its {name} layers have given back pages "
                    "that it would need; encode the tokens anew"
                )
        for pool in self.pools.values():
            self._cut(row, pool, -(-length // size))
        full = length // size
        if full < len(row.links):
            row.tail = tokens_of(row.links[full].tokens)
        row.length, row.stamp, row.cuts = length, next(self._stamps), row.cuts + 1
        del row.links[full:], row.tail[length - full * size :]

    def release(self, row: PagedRow) -> None:
        """Give a row's pages back; published ones can be shared until others need the room. The row is used up."""
        for pool in self.pools.values():
            self._cut(row, pool, 0)
        self._rows.discard(row)
        row.length, row.links, row.tail, row.stamp = 0, [], [], next(self._stamps)

    # -- passes ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode(self, rows: Sequence[PagedRow], tokens_BT: Tensor, lengths: Sequence[int]) -> Tensor:
        """Encode clean tokens causally and append them to their rows: hidden states [B, T, D] after the final norm.

        tokens_BT: int64, rows right-padded, best on the CPU (their values are needed there); lengths: how many tokens
        each row gets. Raises BlockdiffError where there is no room: `reserve` asks before.
        """
        if not all(self.reserve(row, added) for row, added in zip(rows, lengths, strict=True)):
            raise BlockdiffError(
                f"no room for {sum(lengths)} more tokens: {self.free_tokens()} of the pages' tokens are free; "
                "release rows or make capacity larger"
            )
        model, device, given = self.model, self.model.device, tokens_BT.tolist()
        numbers = [[row.length for row in rows], list(lengths)]
        past_B1, added_B1 = torch.tensor(numbers, device=device)[..., None]
        column_T = torch.arange(tokens_BT.shape[1], device=device)
        doc_start_BT = torch.where(column_T < added_B1, 0, -1)
        spans = {name: kind.encode_spans(doc_start_BT, past_B1[:, 0]) for name, kind in model.kinds.items()}
        past = None
        if any(numbers[0]):
            tables = {name: table_of(rows, pool, device) for name, pool in self.pools.items()}
            past = paged_past(rows, self.pools, tables)
            spans = {
                name: each.shifted(torch.tensor(first_columns(rows, self.pools[name]), device=device))
                for name, each in spans.items()
            }
        hidden, kv = model(tokens_BT.to(device), past_B1 + column_T, spans, past)
        for name, pool in self.pools.items():
            places = array("q")
            for row, added in zip(rows, lengths, strict=True):
                pool.add_places(places, row.tables[name], row.first[name], row.length, row.length + added)
                places.extend([SPILL * self.page_tokens] * (len(column_T) - added))
            pool.write([kv[n] for n in pool.layers], torch.frombuffer(places, dtype=torch.int64).to(device))
        for row, tokens, added in zip(rows, given, lengths, strict=True):
            self._append(row, tokens[:added])
        return hidden

    @torch.no_grad()
    def denoise(
        self, rows: Sequence[PagedRow], canvas_BT: Tensor, soft_BTD: Tensor | None = None, canvases: int = 1
    ) -> Tensor:
        """Hidden states [B, T, D], after the final norm, of the canvases that follow each row; leaves the rows alone.

        rows: in any order, one may come twice; canvas_BT: int64 noisy tokens, on the model's device; soft_BTD: the
        signal of the last prediction (None: none); canvases: how many of a row stand side by side: each sees those
        before it, as `spans.running_spans` says.
        """
        steps = self._steps_of(rows)
        steps.serve(rows, canvases, canvas_BT.shape[1] // canvases)
        if steps.order is not None:
            canvas_BT = canvas_BT[steps.order]
            soft_BTD = None if soft_BTD is None else soft_BTD[steps.order]
        hidden, _ = self.model(canvas_BT, steps.positions_BT, steps.spans, steps.past, True, soft_BTD, steps.rope)
        return hidden if steps.back is None else hidden[steps.back]

    # -- memory ------------------------------------------------------------------------------------------------

    def free_tokens(self) -> int:
        """How many tokens can still be reserved, whole pages of them."""
        return min(pool.available for pool in self.pools.values()) * self.page_tokens

    @property
    def statistics(self) -> PageStatistics:
        """What the pages hold now, and what happened since the beginning."""
        pools = self.pools.items()
        return PageStatistics(
            pages={name: pool.in_use for name, pool in pools},
            cached={name: len(pool.cached) for name, pool in pools},
            published={name: len(pool.links) for name, pool in pools},
            reused_tokens=self._reused,
            asked_tokens=self._asked,
            evictions=sum(pool.evictions for pool in self.pools.values()),
        )

    def check(self) -> None:
        """Raise AssertionError unless every page is free, cached or held by exactly the open rows that it counts."""
        for name, pool in self.pools.items():
            held = Counter(page for row in self._rows for page in row.tables[name])
            assert pool.references[:2] == [0, 0] and not {ZEROS, SPILL} & {*held, *pool.free, *pool.cached}
            assert [held[page] for page in range(len(pool.references))] == pool.references
            unused = [page for page in range(2, len(pool.references)) if not held[page]]
            assert sorted([*pool.free, *pool.cached]) == unused and pool.cached.keys() <= pool.links.keys()
            assert len(pool.references) - 2 <= pool.most and not set(pool.free) & pool.links.keys()
            for page, link in pool.links.items():
                assert link.pages[name] == page and self._links[link.parent, link.tokens] is link
            for row in self._rows:
                first = row.first[name]
                assert first <= pool.first_kept(row.length) // self.page_tokens
                assert first + len(row.tables[name]) >= -(-row.length // self.page_tokens)
        for row in self._rows:
            assert len(row.links) * self.page_tokens + len(row.tail) == row.length
        published = {id(link) for pool in self.pools.values() for link in pool.links.values()}
        assert {id(link) for link in self._links.values() if link.parent is not None} == published

    # -- parts -------------------------------------------------------------------------------------------------

    def _can_share(self, found: list[Link], pages_before: int, multiple: int) -> bool:
        """Whether all that a row needs after the found links is there still, and its length is such a multiple."""
        length = (pages_before + len(found)) * self.page_tokens
        return length % multiple == 0 and all(
            name in link.pages
            for name, pool in self.pools.items()
            for link in found[max(0, pool.first_kept(length) // self.page_tokens - pages_before) :]
        )

    def _append(self, row: PagedRow, tokens: list[int]) -> None:
        """Note the tokens that were written after a row's own; publish its full pages and leave what windows left."""
        row.length, row.stamp = row.length + len(tokens), next(self._stamps)
        row.tail += tokens
        for _ in range(len(row.tail) // self.page_tokens):
            page_of_tokens, row.tail = row.tail[: self.page_tokens], row.tail[self.page_tokens :]
            key = row.links[-1] if row.links else row.root, key_of(page_of_tokens)
            link = self._links.setdefault(key, Link(*key))
            for name, pool in self.pools.items():
                pool.publish(row.tables[name][len(row.links) - row.first[name]], link)
            row.links.append(link)
        for pool in self.pools.values():
            self._leave(row, pool, row.length)

    def _leave(self, row: PagedRow, pool: Pool, length: int) -> None:
        """Give back the pages that a row of such a length needs no more."""
        table, first = row.tables[pool.kind.name], pool.first_kept(length) // self.page_tokens
        for page in table[: first - row.first[pool.kind.name]]:
            pool.give_back(page)
        del table[: first - row.first[pool.kind.name]]
        row.first[pool.kind.name] = first

    def _cut(self, row: PagedRow, pool: Pool, pages: int) -> None:
        """Give back all pages after a row's first so many, the last one first: it is the first to be forgotten."""
        table, kept = row.tables[pool.kind.name], max(0, pages - row.first[pool.kind.name])
        for page in reversed(table[kept:]):
            pool.give_back(page)
        del table[kept:]

    def _steps_of(self, rows: Sequence[PagedRow]) -> Steps:
        """The steps that were last made for most of these rows, else new ones in place of the oldest."""
        chosen = max(self._steps, key=lambda steps: steps.shares(rows), default=None)
        if chosen is None or not chosen.shares(rows):
            # in place of those whose rows are gone, or else of those that have not been used for longest
            gone = next((steps for steps in self._steps if self._rows.isdisjoint(steps.rows)), None)
            chosen = gone or (self._steps[0] if len(self._steps) == MOST_STEPS else None)
        if chosen is None:
            is_native = self.model.kernels.span_attention is NATIVE.span_attention
            chosen = (GatheredSteps if is_native else TabledSteps)(self.model, self.pools)
        else:
            self._steps.remove(chosen)
        self._steps.append(chosen)
        return chosen


def key_of(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, to be found by."""
    return array("q", tokens).tobytes()


def tokens_of(key: bytes) -> list[int]:
    """The token ids of `key_of`."""
    return array("q", key).tolist()


def _capacity(model: BlockDiffusionModel) -> int:
    """How many tokens fit into the share of the device's memory that pages may take."""
    each = (
        family_of(model.config).outline(model.config).cached_per_token
        * torch.empty(0, dtype=model.dtype).element_size()
    )
    available = memory.available_bytes(model.device)
    return 1 << 40 if available is None else int(available * SHARE_OF_MEMORY.get(model.device.type, 0.4)) // each
