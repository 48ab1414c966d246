"""The pages of rows, without the model: block tables, references, and prefix sharing.

A row has a block table for each kind of layer. Tokens are first written to its pages and accepted later; until then the
row can be truncated to its earlier state. When tokens are accepted, sliding layers give back the pages that their
window has left, and full pages are published under their tokens and all tokens before them. A row with the same
beginning shares published pages instead of encoding the tokens again. Published pages that no row refers to stay cached
until their memory is needed.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blockdiff.errors import BlockdiffError
from blockdiff.models.page_keys import is_in_run, packed_identities, unpacked_identities
from blockdiff.models.page_pool import SPILL, ZEROS, Link, Pool, Published

NO_LIMIT = 1 << 40  # pages, if the device's memory is unknown


@dataclass(eq=False)
class PagedRow:
    """A row's cached tokens: their number, and their pages by kind of layer (`tables`).

    first: number of pages before those in the table that were given back. accepted: number of accepted tokens. links:
    the links of its published pages. tail: identities of the tokens after them. stamp: a number that changes whenever
    the row does. selection: the stamp and the number of queries of the last selection, and the blocks that each layer
    selected then (`KeptSelection`).
    """

    root: Link
    tables: dict[str, list[int]]
    first: dict[str, int]
    length: int = 0
    accepted: int = 0
    links: list[Link] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    stamp: int = 0
    selection: tuple[tuple[int, int], dict[Any, Any]] = field(default_factory=lambda: ((0, 0), {}))


@dataclass(frozen=True)
class PageStatistics:
    """Counts of pages by kind of layer, and of events so far.

    pages: in use. shared: in use by several rows. cached: not in use, but can be shared. published: all that can be
    shared. reused_tokens: tokens that `reuse` shared, out of asked_tokens of new rows. evictions: cached pages that
    were given to other tokens.
    """

    pages: dict[str, int]
    shared: dict[str, int]
    cached: dict[str, int]
    published: dict[str, int]
    reused_tokens: int
    asked_tokens: int
    evictions: int


class PagedRows:
    """The rows of some pools of pages, one for each kind of layer."""

    def __init__(self, pools: dict[str, Pool], links: Published, page_tokens: int):
        self.pools, self.page_tokens, self._links = pools, page_tokens, links
        self._root = Link(None, b"")  # the link before a row's first page; rows with another root share nothing
        self._rows: set[PagedRow] = set()
        self._stamps = itertools.count(1)
        self._reused = self._asked = 0
        self.empty = PagedRow(self._root, {name: [] for name in pools}, dict.fromkeys(pools, 0))  # pads calls

    # -- rows --------------------------------------------------------------------------------------------------

    def open(self) -> PagedRow:
        """Open an empty row."""
        tables, first = {name: list[int]() for name in self.pools}, dict.fromkeys(self.pools, 0)
        row = PagedRow(self._root, tables, first, stamp=next(self._stamps))
        self._rows.add(row)
        return row

    def reuse(self, row: PagedRow, tokens: Sequence[int]) -> int:
        """Share the published pages of the longest prefix of `tokens`; return the row's new length.

        tokens: all of the row's tokens, from its first on, as `page_keys.identities`. Pages are added only if the row's
        present tokens fill whole pages. A shared prefix never ends within a run of placeholders.
        """
        if row.tail:
            return row.length
        size, links = self.page_tokens, list[Link]()
        link = row.links[-1] if row.links else row.root
        self._asked += 0 if row.length else len(tokens)
        for first in range(row.length, len(tokens) - size + 1, size):
            following = self._links.get((link, packed_identities(tokens[first : first + size])))
            if following is None:
                break
            links.append(link := following)
        pages_before = row.length // size
        while links and (
            is_in_run(tokens, size * (pages_before + len(links))) or not self._can_share(links, pages_before)
        ):
            links.pop()
        if not links:
            return row.length
        length = row.length + len(links) * size
        self._reused += length - row.length
        for name, pool in self.pools.items():
            self._cut(row, pool, pages_before)  # reserved pages
            self._leave(row, pool, length)
            for each in links[max(0, row.first[name] - pages_before) :]:
                pool.refer(each.pages[name])
                row.tables[name].append(each.pages[name])
        row.length, row.accepted, row.stamp = length, length, next(self._stamps)
        row.links += links
        return length

    def reserve(self, row: PagedRow, tokens: int) -> bool:
        """Allocate pages for `tokens` more tokens of a row; without enough memory change nothing and return False."""
        last, begun = divmod(row.length, self.page_tokens)
        pages = -(-(row.length + tokens) // self.page_tokens)
        changes = []
        for name, pool in self.pools.items():
            table, first = row.tables[name], row.first[name]
            missing = max(0, pages - first - len(table))
            is_copied = bool(begun and tokens) and pool.is_shared(table[last - first])
            if missing + is_copied > pool.available:
                return False
            if missing or is_copied:
                changes.append((pool, table, missing, last - first if is_copied else None))
        for pool, table, missing, shared in changes:
            if shared is not None:
                table[shared] = pool.copied(table[shared])
            table += [pool.take() for _ in range(missing)]
        return True

    def has_room(self, row: PagedRow, tokens: int) -> bool:
        """Whether there is memory for `tokens` more tokens of a row, encoded in one or several calls."""
        pages = -(-(row.length + tokens) // self.page_tokens)
        for name, pool in self.pools.items():
            table, needed = row.tables[name], pages - row.first[name]
            if pool.row_pages is not None:
                needed = min(needed, pool.row_pages)
            if needed - len(table) > pool.available:
                return False
        return True

    def holds(self, tokens: int, added: int) -> bool:
        """Whether a row of `tokens` tokens fits at all, if a call adds at most `added` of them."""
        for pool in self.pools.values():
            pages, within = -(-tokens // self.page_tokens), pool.window_pages(added)
            if pool.most < (pages if within is None else min(pages, within)):
                return False
        return True

    def accept(self, row: PagedRow) -> None:
        """Accept all tokens of a row: publish its full pages, and give back those that windows have left."""
        row.accepted = row.length
        for _ in range(row.accepted // self.page_tokens - len(row.links)):
            page_of_tokens, row.tail = row.tail[: self.page_tokens], row.tail[self.page_tokens :]
            key = row.links[-1] if row.links else row.root, packed_identities(page_of_tokens)
            link = self._links.setdefault(key, Link(*key))
            for name, pool in self.pools.items():
                pool.publish(row.tables[name][len(row.links) - row.first[name]], link)
            row.links.append(link)
        for pool in self.pools.values():
            self._leave(row, pool, row.accepted)
        row.stamp = next(self._stamps)

    def truncate(self, row: PagedRow, tokens: int) -> None:
        """Drop all but a row's first `tokens` tokens. Tokens that were not accepted leave no trace.

        Raises BlockdiffError if a sliding layer has given back pages that the shorter row needs.
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
        if length // size < len(row.links):
            row.tail = unpacked_identities(row.links[length // size].tokens)
            del row.links[length // size :]
        del row.tail[length - len(row.links) * size :]
        row.length, row.accepted, row.stamp = length, min(row.accepted, length), next(self._stamps)

    def release(self, row: PagedRow) -> None:
        """Close a row and give its pages back. Published pages stay cached until their memory is needed."""
        for pool in self.pools.values():
            self._cut(row, pool, 0)
        self._rows.discard(row)
        row.length, row.accepted, row.links, row.tail, row.stamp = 0, 0, [], [], next(self._stamps)

    def forget(self) -> None:
        """Let rows opened from now on share nothing with earlier ones; open rows continue unchanged."""
        for pool in self.pools.values():
            pool.free += reversed(pool.cached)
            pool.cached.clear()
            pool.links.clear()
        self._links.clear()
        self._root = Link(None, b"")

    # -- memory ------------------------------------------------------------------------------------------------

    def free_tokens(self) -> int:
        """Return the number of tokens that a new row could have, in whole pages."""
        return self._tokens({name: pool.available for name, pool in self.pools.items()})

    @property
    def capacity(self) -> int:
        """The largest number of tokens of one row, in whole pages, if there are no other rows."""
        return self._tokens({name: pool.most for name, pool in self.pools.items()})

    def _tokens(self, pages: dict[str, int]) -> int:
        """Return the most tokens of a row in these numbers of pages; layers with a window set no limit."""
        most = [pages[n] for n, pool in self.pools.items() if pool.row_pages is None or pages[n] < pool.row_pages]
        return min(most, default=NO_LIMIT) * self.page_tokens

    @property
    def statistics(self) -> PageStatistics:
        """The current counts of pages, and of events since the start."""
        pools = self.pools.items()
        return PageStatistics(
            pages={name: pool.in_use for name, pool in pools},
            shared={name: sum(count > 1 for count in pool.references) for name, pool in pools},
            cached={name: len(pool.cached) for name, pool in pools},
            published={name: len(pool.links) for name, pool in pools},
            reused_tokens=self._reused,
            asked_tokens=self._asked,
            evictions=sum(pool.evictions for pool in self.pools.values()),
        )

    def check(self) -> None:
        """Raise AssertionError unless every page is free or cached, or its references equal the open rows with it."""
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
                assert first <= pool.first_kept(row.accepted) // self.page_tokens
                assert first + len(row.tables[name]) >= -(-row.length // self.page_tokens)
        for row in self._rows:
            assert len(row.links) * self.page_tokens + len(row.tail) == row.length >= row.accepted
            assert len(row.links) == row.accepted // self.page_tokens
        published = {id(link) for pool in self.pools.values() for link in pool.links.values()}
        assert {id(link) for link in self._links.values()} == published

    # -- parts -------------------------------------------------------------------------------------------------

    def _can_share(self, links: list[Link], pages_before: int) -> bool:
        """Whether none of the pages was evicted that a row needs if it shares these links."""
        length = (pages_before + len(links)) * self.page_tokens
        return all(
            name in link.pages
            for name, pool in self.pools.items()
            for link in links[max(0, pool.first_kept(length) // self.page_tokens - pages_before) :]
        )

    def _append(self, row: PagedRow, tokens: list[int]) -> None:
        """Add the identities of tokens that were written to the row's pages; they are not yet accepted."""
        first, last = row.length // self.page_tokens, -(-(row.length + len(tokens)) // self.page_tokens)
        for name, pool in self.pools.items():
            for page in row.tables[name][first - row.first[name] : last - row.first[name]]:
                pool.versions[page] += 1
        row.length, row.stamp = row.length + len(tokens), next(self._stamps)
        row.tail += tokens

    def _leave(self, row: PagedRow, pool: Pool, length: int) -> None:
        """Give back the pages that a row of `length` tokens no longer needs."""
        table, first = row.tables[pool.kind.name], pool.first_kept(length) // self.page_tokens
        for page in table[: first - row.first[pool.kind.name]]:
            pool.give_back(page)
        del table[: first - row.first[pool.kind.name]]
        row.first[pool.kind.name] = first

    def _cut(self, row: PagedRow, pool: Pool, pages: int) -> None:
        """Give back all but a row's first `pages` pages, the last page first, so that it is evicted first."""
        table, end = row.tables[pool.kind.name], max(0, pages - row.first[pool.kind.name])
        for page in reversed(table[end:]):
            pool.give_back(page)
        del table[end:]
