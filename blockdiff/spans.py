"""Spans: the attention mask as four integers per query, and the builders that every pass uses.

A query sees one contiguous run of prefix keys (cached tokens) and one contiguous run of own keys (this call's
tokens). Nothing here knows about heads or caches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor


class Spans:
    """The prefix and own keys of every query: int32 `bounds_BT4` = (prefix_lo, prefix_hi, own_lo, own_hi), half open.

    A span with hi <= lo is empty. sees_all: every query sees every prefix and own key of the call, so no mask is
    needed. is_padded: queries may be padding. is_causal: the tokens are clean, so each sees itself and earlier tokens
    and, in an image, all of the image. kept: the prefix blocks that layers have selected for all steps of a canvas
    (None: they select in every call).
    """

    kept: KeptSelection | None = None
    first_query = 0  # the call's first token that is a query

    def __init__(self, bounds_BT4: Tensor, sees_all: bool = False, is_padded: bool = True, is_causal: bool = False):
        self.bounds_BT4 = bounds_BT4 if bounds_BT4.dtype is torch.int32 else bounds_BT4.to(torch.int32)
        self.is_causal = is_causal
        self.sees_all, self.is_padded = sees_all, is_padded and not sees_all
        self._dense: dict[tuple[int, int], Tensor] = {}
        self._written_BT4: Tensor | None = None
        self._hulls: dict[int, list[list[int]]] = {}

    @functools.cached_property
    def padding_BT(self) -> Tensor | None:
        """True for queries that are padding; None if the host knows without waiting that there are none."""
        if not self.is_padded:
            return None
        padding_BT = self.bounds_BT4[..., 3] <= self.bounds_BT4[..., 2]  # a query that is no padding sees itself
        return None if padding_BT.is_cpu and not padding_BT.any() else padding_BT

    @property
    def written_BT4(self) -> Tensor:
        """The bounds as contiguous memory: if the queries of a row share their bounds, a copy for each."""
        if self.bounds_BT4.is_contiguous():
            return self.bounds_BT4
        if self._written_BT4 is None:
            self._written_BT4 = self.bounds_BT4.contiguous()
        return self._written_BT4

    @functools.cached_property
    def in_one_run(self) -> Spans:
        """The spans of clean tokens over one row of keys: the prefix's, then the call's own."""
        prefix_lo, prefix_hi, _, own_hi = self.bounds_BT4.unbind(-1)
        nothing = torch.zeros_like(own_hi)
        return Spans(torch.stack([prefix_lo, prefix_hi + own_hi, nothing, nothing], -1), is_causal=True)

    def dense(self, prefix_tokens: int, own_tokens: int) -> Tensor:
        """The mask as booleans [B, T, prefix_tokens + own_tokens]: for tests, pictures and the SDPA path."""
        key = (prefix_tokens, own_tokens)
        if key not in self._dense:
            B, T, _ = self.bounds_BT4.shape
            prefix_lo, prefix_hi, own_lo, own_hi = self._distinct().unsqueeze(-2).unbind(-1)
            column = torch.arange(prefix_tokens + own_tokens, device=self.bounds_BT4.device, dtype=torch.int32)
            own_column = column - prefix_tokens
            in_prefix = (column >= prefix_lo) & (column < prefix_hi.clamp(max=prefix_tokens))
            in_own = (own_column >= own_lo.clamp(min=0)) & (own_column < own_hi)
            self._dense[key] = (in_prefix | in_own).expand(B, T, -1)
        return self._dense[key]

    def select(self, rows: Tensor) -> Spans:
        """Return the spans of some rows."""
        return Spans(self.bounds_BT4[rows], self.sees_all, self.is_padded, self.is_causal)

    def shifted(self, first_B: Tensor) -> Spans:
        """Return the spans over a prefix that has lost its first `first_B` columns."""
        shift = torch.stack([first_B, first_B, torch.zeros_like(first_B), torch.zeros_like(first_B)], -1)
        bounds = (self._distinct() - shift[:, None]).clamp(min=0).to(torch.int32)
        return Spans(bounds.expand_as(self.bounds_BT4), self.sees_all, self.is_padded, self.is_causal)

    def part(self, queries: slice, prefix: int, own: int) -> Spans:
        """Return the spans of some queries, over keys without the first `prefix` and the first `own` ones."""
        bounds = self._distinct()
        bounds = bounds if bounds.shape[1] == 1 else bounds[:, queries]
        bounds = bounds - torch.tensor([prefix, prefix, own, own], dtype=bounds.dtype, device=bounds.device)
        return Spans(bounds.expand(-1, len(range(*queries.indices(self.bounds_BT4.shape[1]))), -1))

    def hulls(self, queries: int) -> list[list[int]]:
        """Return [prefix_lo, prefix_hi, own_lo, own_hi] for each tile of `queries` neighbouring queries.

        These are the ranges of keys that any of its queries sees in any row.
        """
        if queries not in self._hulls:
            B, T, _ = self.bounds_BT4.shape
            lo_BT2, hi_BT2 = self.bounds_BT4[..., 0::2], self.bounds_BT4[..., 1::2]
            is_empty_BT2 = hi_BT2 <= lo_BT2
            rest = -T % queries
            ends = []
            for values, nothing, best in ((lo_BT2, 1 << 30, torch.amin), (hi_BT2, 0, torch.amax)):
                filled = values.masked_fill(is_empty_BT2, nothing)
                filled = torch.nn.functional.pad(filled, (0, 0, 0, rest), value=nothing)
                ends.append(best(filled.view(B, -1, queries, 2), dim=(0, 2)))
            lo, hi = ends
            self._hulls[queries] = torch.stack([lo.minimum(hi), hi], -1).flatten(1).tolist()
        return self._hulls[queries]

    def _distinct(self) -> Tensor:
        """Return the bounds [B, T, 4], or [B, 1, 4] if all queries of a row share them, in an expanded tensor."""
        return self.bounds_BT4 if self.bounds_BT4.stride(1) else self.bounds_BT4[:, :1]


@dataclass(eq=False)
class KeptSelection:
    """The blocks of their prefixes that layers have selected for some rows, kept for all denoising steps of a canvas.

    ids: for each layer, int64 [B, T, heads, k], -1 for no block. open_B: the rows that have no selection yet (None: all
    rows for a layer that is not in `ids`, no row for the others).
    """

    ids: dict[Hashable, Tensor] = field(default_factory=dict)
    open_B: Tensor | None = None

    def of(self, layer: Hashable, select: Callable[[], Tensor]) -> Tensor:
        """Return the selection of a layer. Rows without one select now, by `select`, and the result is kept."""
        if layer not in self.ids:
            self.ids[layer] = select()
        elif self.open_B is not None:
            both = self.ids[layer], select()
            width = max(ids.shape[-1] for ids in both)
            old, new = (F.pad(ids, (0, width - ids.shape[-1]), value=-1) for ids in both)
            self.ids[layer] = torch.where(self.open_B[:, None, None, None], new, old)
        return self.ids[layer]

    def select(self, rows: Tensor) -> KeptSelection:
        """Return the selections of some rows, which must all have one."""
        return KeptSelection({layer: ids[rows] for layer, ids in self.ids.items()})

    @classmethod
    def together(cls, rows: Sequence[Mapping[Hashable, Tensor]]) -> KeptSelection:
        """Join the selections of rows, each [T, heads, k] by layer. Rows without one select in the next call."""
        first = next((row for row in rows if row), None)
        if first is None:
            return cls()
        ids = {}
        for layer, like in first.items():
            width = max(row[layer].shape[-1] for row in rows if row)
            nothing = like.new_full((*like.shape[:2], width), -1)
            of_rows = (row[layer] if row else nothing for row in rows)
            ids[layer] = torch.stack([F.pad(each, (0, width - each.shape[-1]), value=-1) for each in of_rows])
        is_open = [not row for row in rows]
        return cls(ids, torch.tensor(is_open, device=nothing.device) if any(is_open) else None)


@dataclass(frozen=True, eq=False)
class Sweep:
    """The spans of one call over clean rows and their canvases: its tokens are the rows', then the canvases'.

    clean: the spans of the clean tokens over each other. noisy: the spans of the canvases' tokens; their prefix is the
    first `columns` clean tokens of the same call. stop_gradient: no gradient flows from the canvases into these.
    wants_clean: the result has the clean tokens, too; otherwise they are only keys of the canvases.
    """

    clean: Spans
    noisy: Spans
    columns: int
    stop_gradient: bool = False
    wants_clean: bool = True

    @property
    def clean_tokens(self) -> int:
        """The number of clean tokens in each row of the call."""
        return self.clean.bounds_BT4.shape[1]

    @property
    def first_query(self) -> int:
        """The first token of the call that is in the result."""
        return 0 if self.wants_clean else self.clean_tokens

    def with_clean(self) -> Sweep:
        """Return the same call with the clean tokens in its result."""
        return replace(self, wants_clean=True)

    @functools.cached_property
    def joint_BT4(self) -> Tensor:
        """The spans of the result's tokens: the call's first `columns` tokens are their prefix, all are own."""
        noisy = self.noisy.bounds_BT4.clone()
        noisy[..., 2:] += self.clean_tokens
        if not self.wants_clean:
            return noisy
        clean = self.clean.bounds_BT4.clone()
        clean[..., :2] = 0
        return torch.cat([clean, noisy], 1)

    @functools.cached_property
    def padding_BT(self) -> Tensor | None:
        """True for tokens of the result that are padding; None if the host knows that there are none."""
        if not self.wants_clean:
            return self.noisy.padding_BT
        parts = [(each.padding_BT, each.bounds_BT4[..., 0]) for each in (self.clean, self.noisy)]
        if all(padding_BT is None for padding_BT, _ in parts):
            return None
        return torch.cat([torch.zeros_like(like, dtype=torch.bool) if x is None else x for x, like in parts], 1)


def _stack(prefix_lo: Tensor, prefix_hi: Tensor, own_lo: Tensor, own_hi: Tensor, is_valid: Tensor) -> Tensor:
    bounds = torch.stack(torch.broadcast_tensors(prefix_lo, prefix_hi, own_lo, own_hi), dim=-1)
    return torch.where(is_valid[..., None], bounds, 0).to(torch.int32)


def encode_spans(
    doc_start_BT: Tensor, window: int | None = None, past_B: Tensor | None = None, run_BT2: Tensor | None = None
) -> Spans:
    """Return the causal spans of an encode call, whose token i is at row column `past + i`.

    doc_start_BT: the column at which each token's document starts, -1 for padding. window: keys that a sliding layer
    sees, the query included (None: all). past_B: tokens of each row cached before the call (None: none). run_BT2: the
    first and the end token, counted in the call, of a run that its tokens see as a whole, such as an image (None: each
    token is a run). A window narrower than a run does not cut it.
    """
    i = torch.arange(doc_start_BT.shape[1], device=doc_start_BT.device)
    run_lo, run_hi = (i, i + 1) if run_BT2 is None else run_BT2.unbind(-1)
    past = torch.zeros_like(doc_start_BT[:, :1]) if past_B is None else past_B[:, None]
    oldest = torch.zeros_like(past)
    if window is not None:
        oldest = past + torch.minimum(i + 1 - window, run_lo)
    first = torch.maximum(doc_start_BT, oldest)
    own_lo = (first - past).clamp(min=0)
    return Spans(_stack(first.clamp(min=0), past, own_lo, run_hi, doc_start_BT >= 0), is_causal=True)


def block_runs(doc_start_BT: Tensor, block: int, past_B: Tensor | None = None) -> Tensor:
    """Return the block of each token of an encode call as a run [B, T, 2] for `encode_spans`.

    Blocks of `block` tokens count from the start of each document; its last one may be shorter. A call must begin where
    a block does.
    """
    column_BT = torch.arange(doc_start_BT.shape[1], device=doc_start_BT.device).expand_as(doc_start_BT)
    past = 0 if past_B is None else past_B[:, None]
    first_BT = doc_start_BT + (past + column_BT - doc_start_BT) // block * block - past
    is_last_BT = F.pad(doc_start_BT[:, 1:] != doc_start_BT[:, :-1], (0, 1), value=True)
    doc_end_BT = (column_BT + 1).where(is_last_BT, doc_start_BT.shape[1]).flip(1).cummin(1).values.flip(1)
    return torch.stack([first_BT.clamp(min=0), doc_end_BT.minimum(first_BT + block)], -1)


def denoise_spans(
    start_BC: Tensor, doc_start_BC: Tensor, length_BC: Tensor, canvas_length: int, window: int | None = None
) -> Spans:
    """Return the spans of C canvases per row side by side, T = C * canvas_length: no canvas sees another.

    start_BC: the row column of each canvas's first token. doc_start_BC: the column of its document's first token.
    length_BC: its valid tokens (0: no canvas). All queries of a canvas see the same last window - 1 prefix keys and all
    its own tokens.
    """
    B, C = start_BC.shape
    j = torch.arange(canvas_length, device=start_BC.device)
    offset = torch.arange(C, device=start_BC.device)[:, None] * canvas_length
    start, doc_start, length = start_BC[..., None], doc_start_BC[..., None], length_BC[..., None]
    oldest = doc_start if window is None else torch.maximum(doc_start, start - window + 1)
    shape = (B, C, canvas_length)
    bounds = _stack(
        oldest.expand(shape), start.expand(shape), offset.expand(shape), (offset + length).expand(shape), j < length
    )
    return Spans(bounds.reshape(B, C * canvas_length, 4))


def canvas_spans(start_B: Tensor, canvas_length: int, window: int | None = None) -> Spans:
    """Return the spans of the canvas that follows each row; none of its tokens is padding.

    start_B: the number of columns of each row. All tokens of a canvas see the same last window - 1 columns of the row
    and the whole canvas.
    """
    oldest_B = torch.zeros_like(start_B) if window is None else (start_B - window + 1).clamp(min=0)
    bounds_B4 = torch.stack([oldest_B, start_B, torch.zeros_like(start_B), torch.full_like(start_B, canvas_length)], -1)
    # an expanded view: a mask is made once for all queries
    return Spans(bounds_B4[:, None].expand(-1, canvas_length, -1), is_padded=False)
