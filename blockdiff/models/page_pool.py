"""The pages of one kind of layer: which are in use, cached or free, and the tensors with their tokens."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from blockdiff.models.layer_kind import LayerKind

KV = tuple[Tensor, ...]
ZEROS, SPILL = 0, 1  # reserved pages: one that is never written, and one that padding is written to
CACHED_BYTES = 1 << 28  # before memory grows, cached pages may occupy this much, or as much as those in use


class Link:
    """A full page of published tokens, linked to the page of tokens before it.

    pages: kind of layer -> the page with these tokens; a kind whose page was evicted is missing.
    """

    __slots__ = ("pages", "parent", "tokens")

    def __init__(self, parent: Link | None, tokens: bytes):
        self.parent, self.tokens = parent, tokens
        self.pages: dict[str, int] = {}


Published = dict[tuple[Link | None, bytes], Link]


class Pool:
    """The pages of all layers of one kind; a page number means that page of each of these layers.

    A page in use has references. One without is cached while it is published, so that its tokens can be shared until
    the page is needed, and free otherwise.

    most: the largest number of pages. row_pages: the most pages that a row holds at a time (None: as many as its tokens
    fill). grows: whether memory is allocated as needed. published: (previous link, tokens) -> link, shared by all
    pools.
    """

    def __init__(
        self, kind: LayerKind, layers: Sequence[int], page_tokens: int, most: int, grows: bool, published: Published
    ):
        self.kind, self.layers, self.page_tokens, self.most, self.grows = kind, layers, page_tokens, most, grows
        self.published = published
        self.row_pages: int | None = None
        self.tensors: list[Tensor] = []  # like a layer's kv, each [layers, pages, P, ...]; empty before `make`
        self.references = [0, 0]  # of every page; the first two are ZEROS and SPILL
        self.versions = [0, 0]  # of every page's content; each write increments it
        self.free: list[int] = []
        self.cached: OrderedDict[int, None] = OrderedDict()  # the least recently used page first
        self.links: dict[int, Link] = {}  # of published pages
        self.evictions = 0

    @property
    def in_use(self) -> int:
        """The number of pages that rows refer to."""
        return len(self.references) - 2 - len(self.free) - len(self.cached)

    @property
    def available(self) -> int:
        """The number of pages that can be taken: unallocated, free or cached."""
        return self.most - self.in_use

    def first_kept(self, length: int) -> int:
        """Return the first column that a row of `length` tokens still needs."""
        return 0 if self.kind.window is None else max(0, length - self.kind.window + 1)

    def window_pages(self, added: int) -> int | None:
        """Return the most pages of a row while a call adds `added` tokens to it; None for layers without a window."""
        return None if self.kind.window is None else -(-(self.kind.window - 2 + added) // self.page_tokens) + 1

    def take(self) -> int:
        """Allocate a page for writing, with one reference."""
        if self.free:
            page = self.free.pop()
        elif self.cached and (len(self.references) - 2 >= self.most or self._caches_enough()):
            page, _ = self.cached.popitem(last=False)
            link = self.links.pop(page)
            del link.pages[self.kind.name]
            if not link.pages:
                del self.published[link.parent, link.tokens]
            self.evictions += 1
        else:
            assert len(self.references) - 2 < self.most, "a page was taken that had not been asked for"
            page = len(self.references)
            self.references.append(0)
            self.versions.append(0)
        self.references[page] = 1
        return page

    def contents(self, table: Sequence[int]) -> list[tuple[int, int]]:
        """Return (page, version of its content) for each page of a block table."""
        return [(page, self.versions[page]) for page in table]

    def _caches_enough(self) -> bool:
        if not self.grows or not self.tensors:
            return False  # all memory is allocated already, or nothing is cached
        bytes_each = sum(x[:, 0].numel() * x.element_size() for x in self.tensors)
        return len(self.cached) > max(self.in_use, CACHED_BYTES // bytes_each)

    def refer(self, page: int) -> None:
        """Add a reference to a page."""
        self.references[page] += 1
        self.cached.pop(page, None)

    def give_back(self, page: int) -> None:
        """Remove a reference to a page; without any left it becomes cached if it is published, else free."""
        self.references[page] -= 1
        if not self.references[page]:
            if page in self.links:
                self.cached[page] = None
            else:
                self.free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether several rows refer to a page or it is published, so that it must not be written."""
        return self.references[page] > 1 or page in self.links

    def publish(self, page: int, link: Link) -> None:
        """Set a full page as the link's page of this kind, unless it has one."""
        if self.kind.name not in link.pages:
            link.pages[self.kind.name], self.links[page] = page, link

    def copied(self, page: int) -> int:
        """Copy a shared page to a new one, give the shared one back, and return the new one."""
        copy = self.take()
        self.hold_all()
        for x in self.tensors:
            x[:, copy] = x[:, page]
        self.versions[copy] += 1
        self.give_back(page)
        return copy

    def add_places(self, places: array[int], table: list[int], first: int, begin: int, end: int) -> None:
        """Append the slots (token indices over all pages) of the columns [begin, end) of a row.

        table: the row's pages from page number `first` on.
        """
        size = self.page_tokens
        while begin < end:
            page, within = table[begin // size - first], begin % size
            count = min(size - within, end - begin)
            places.extend(range(page * size + within, page * size + within + count))
            begin += count

    def make(self, kv: Sequence[KV]) -> None:
        """Allocate page tensors with the shapes and dtypes of a call's kv; kv: one entry per layer of this kind."""
        self.tensors = [x.new_zeros(len(kv), 2, self.page_tokens, *x.shape[2:]) for x in kv[0]]

    def write(self, kv: Sequence[KV], index_N: Tensor) -> None:
        """Write a call's tensors [B, T, ...] for layers that did not write theirs themselves (those have an empty kv).

        index_N: the slot of each of the B * T tokens.
        """
        for n, tensors in enumerate(kv):
            for x, new in zip(self.tensors, tensors, strict=bool(tensors)):
                x[n].flatten(0, 1).index_copy_(0, index_N, new.flatten(0, 1))

    def hold_all(self) -> None:
        """Enlarge the tensors to hold every page taken so far, or `most` pages if they do not grow."""
        for n, x in enumerate(self.tensors):
            size, needed = x.shape[1], len(self.references) if self.grows else self.most + 2
            if size < needed:
                needed = max(needed, min(size + size // 2, self.most + 2))
                larger = x.new_empty(x.shape[0], needed, *x.shape[2:])
                larger[:, :size] = x
                self.tensors[n] = larger
