"""The pages of one kind of layer: which are in use, cached or free, and the tensors that hold their tokens."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from blockdiff.models.layer_kind import LayerKind

KV = tuple[Tensor, ...]
ZEROS, SPILL = 0, 1  # pages of no row: one that is never written, and one that padding is written to
CACHED_BYTES = 1 << 28  # cached pages may take so much, or as much as those in use, before memory grows for new ones


class Link:
    """One full page of tokens in the chain of those published, after the link of the tokens before it.

    pages: the page that holds them, by kind of layer; a kind whose page was given to others is missing.
    """

    __slots__ = ("pages", "parent", "tokens")

    def __init__(self, parent: Link | None, tokens: bytes):
        self.parent, self.tokens = parent, tokens
        self.pages: dict[str, int] = {}


Published = dict[tuple[Link | None, bytes], Link]


class Pool:
    """The pages of all layers of one kind; a page number stands for that page of each of them.

    A page in use has references; one that has none is free, or cached while it is published: its tokens can be
    shared until the page is needed. most: the most pages there may be; row_pages: how many of them a row holds at the
    same time, however long it is (None: as many as its tokens fill); grows: whether memory is taken as needed;
    published: all links by the link before and the tokens, which the pools share.
    """

    def __init__(
        self, kind: LayerKind, layers: Sequence[int], page_tokens: int, most: int, grows: bool, published: Published
    ):
        self.kind, self.layers, self.page_tokens, self.most, self.grows = kind, layers, page_tokens, most, grows
        self.published = published
        self.row_pages: int | None = None
        self.tensors: list[Tensor] = []  # as a layer's kv, each [layers, pages, P, ...]; none before `make`
        self.references = [0, 0]  # of every page; the first two are ZEROS and SPILL
        self.versions = [0, 0]  # of what stands in every page; each write makes another one
        self.free: list[int] = []
        self.cached: OrderedDict[int, None] = OrderedDict()  # the one that was given back first comes first
        self.links: dict[int, Link] = {}  # of published pages
        self.evictions = 0

    @property
    def in_use(self) -> int:
        """The number of pages that rows refer to."""
        return len(self.references) - 2 - len(self.free) - len(self.cached)

    @property
    def available(self) -> int:
        """The number of pages that can still be taken."""
        return self.most - self.in_use

    def first_kept(self, length: int) -> int:
        """The first column that a row of so many tokens still needs."""
        return 0 if self.kind.window is None else max(0, length - self.kind.window + 1)

    def window_pages(self, added: int) -> int | None:
        """The most pages that a row holds while a call adds so many tokens to it; None for layers without a window."""
        return None if self.kind.window is None else -(-(self.kind.window - 2 + added) // self.page_tokens) + 1

    def take(self) -> int:
        """A page to write to, with one reference."""
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
        """The pages of a block table, each with the version of what stands in it."""
        return [(page, self.versions[page]) for page in table]

    def _caches_enough(self) -> bool:
        if not self.grows or not self.tensors:
            return False  # the memory is there already, or nothing is cached
        bytes_each = sum(x[:, 0].numel() * x.element_size() for x in self.tensors)
        return len(self.cached) > max(self.in_use, CACHED_BYTES // bytes_each)

    def refer(self, page: int) -> None:
        """Count one more reference to a page."""
        self.references[page] += 1
        self.cached.pop(page, None)

    def give_back(self, page: int) -> None:
        """Count one reference to a page less; without any it is cached, if it is published, or free."""
        self.references[page] -= 1
        if not self.references[page]:
            if page in self.links:
                self.cached[page] = None
            else:
                self.free.append(page)

    def is_shared(self, page: int) -> bool:
        """True where several rows refer to the page, or others could find it."""
        return self.references[page] > 1 or page in self.links

    def publish(self, page: int, link: Link) -> None:
        """Let others find a full page, if the link has none."""
        if self.kind.name not in link.pages:
            link.pages[self.kind.name], self.links[page] = page, link

    def copied(self, page: int) -> int:
        """A page of one's own with the tokens of a shared one, which is given back."""
        own = self.take()
        self.hold_all()
        for x in self.tensors:
            x[:, own] = x[:, page]
        self.versions[own] += 1
        self.give_back(page)
        return own

    def add_places(self, places: array[int], table: list[int], first: int, begin: int, end: int) -> None:
        """Append where the columns [begin, end) of a row stand, counted in tokens over all pages.

        table: the row's pages after its first so many.
        """
        size = self.page_tokens
        while begin < end:
            page, within = table[begin // size - first], begin % size
            count = min(size - within, end - begin)
            places.extend(range(page * size + within, page * size + within + count))
            begin += count

    def make(self, kv: Sequence[KV]) -> None:
        """Make the tensors in the form of a call's: `kv` has one entry for each of this kind's layers."""
        self.tensors = [x.new_zeros(len(kv), 2, self.page_tokens, *x.shape[2:]) for x in kv[0]]

    def write(self, kv: Sequence[KV], index_N: Tensor) -> None:
        """Write a call's tensors [B, T, ...] of those of this kind's layers that did not write theirs themselves.

        index_N: a token's place, B * T of them.
        """
        for n, tensors in enumerate(kv):
            for x, new in zip(self.tensors, tensors, strict=bool(tensors)):
                x[n].flatten(0, 1).index_copy_(0, index_N, new.flatten(0, 1))

    def hold_all(self) -> None:
        """Make the tensors large enough for every page there is; all at once where they do not grow."""
        for n, x in enumerate(self.tensors):
            held, wanted = x.shape[1], len(self.references) if self.grows else self.most + 2
            if held < wanted:
                wanted = max(wanted, min(held + held // 2, self.most + 2))
                larger = x.new_empty(x.shape[0], wanted, *x.shape[2:])
                larger[:, :held] = x
                self.tensors[n] = larger
