"""`Prefix`: the keys and values of rows' clean tokens, which `encode` returns and extends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.models.layer_kind import LayerKind, Rope
from blockdiff.spans import KeptSelection, Spans

KV = tuple[Tensor, ...]


class Prefix:
    """The result of `encode`: every layer's kv of the rows' clean tokens, right-padded.

    hidden [B, S, D]: the last call's tokens after the final norm. kinds: the kind of each layer. lengths_B: number of
    tokens of each row, int64. common_length: their length if the host knows that it is equal for all rows, else None.
    A full layer has all tokens; a sliding layer the last window - 1, so that its first column is row column
    `first_B[kind]`.
    """

    def __init__(
        self,
        hidden: Tensor,
        kv: list[KV],
        kinds: Sequence[LayerKind],
        lengths_B: Tensor,
        columns: int,
        common_length: int | None,
        first_B: dict[str, Tensor],
    ):
        self.hidden, self.kinds, self.lengths_B = hidden, kinds, lengths_B
        self.columns, self.common_length, self.first_B = columns, common_length, first_B
        self._kv: list[KV] | None = kv  # None once consumed
        self._canvases: dict[int, tuple[Tensor, dict[str, Spans], dict[str, Rope]]] = {}  # by canvas length
        self._kept: dict[tuple[str, int], KeptSelection] = {}  # by kind and canvas length

    @classmethod
    def of(cls, hidden: Tensor, kv: list[KV], kinds: Sequence[LayerKind], lengths_B: Tensor | None) -> Prefix:
        """Make the prefix of a first call; lengths_B: tokens of each row (None: no row is padded)."""
        B = hidden.shape[0]
        nothing_B = torch.zeros(B, dtype=torch.int64, device=hidden.device)
        empty = [tuple(x[:, :0] for x in layer) for layer in kv]
        first_B = {kind.name: nothing_B for kind in kinds if kind.window is not None}
        start = cls(hidden[:, :0], empty, kinds, nothing_B, 0, 0, first_B)
        return start.extended(hidden, kv, lengths_B)

    def __len__(self) -> int:
        return self.lengths_B.shape[0]

    def layers(self) -> list[KV]:
        """Return each layer's prefix tensors [B, columns, ...], without spare columns."""
        return [
            kv if kind.window is not None else tuple(x[:, : self.columns] for x in kv)
            for kind, kv in zip(self.kinds, self._held_kv(), strict=True)
        ]

    def held(self, kind: LayerKind, spans: Spans) -> Spans:
        """Shift spans over row columns to the columns that layers of this kind have."""
        return spans if kind.window is None else spans.shifted(self.first_B[kind.name])

    def canvas(
        self, length: int, rope: Callable[[Tensor], dict[str, Rope]]
    ) -> tuple[Tensor, dict[str, Spans], dict[str, Rope]]:
        """Return positions [B, L], spans and RoPE of one canvas per row, right after its tokens; cached for all steps.

        rope: the model's function from positions to RoPE. Kept selections of layers are stored in this prefix.
        """
        if length not in self._canvases:
            self.require_whole_blocks()
            start_B1 = self.lengths_B[:, None]
            everything = torch.zeros_like(start_B1), torch.full_like(start_B1, length)
            spans = {}
            for kind in set(self.kinds):
                shifted = self.held(kind, kind.denoise_spans(start_B1, *everything, length))
                # a sliding layer has exactly the keys that a canvas sees
                sees_all = self.common_length is not None and kind.sees_whole_canvases
                spans[kind.name] = Spans(shifted.bounds_BT4, sees_all=sees_all)
                if kind.keeps_selection:
                    spans[kind.name].kept = self._kept.setdefault((kind.name, length), KeptSelection())
            positions_BL = start_B1 + torch.arange(length, device=start_B1.device)
            self._canvases[length] = positions_BL, spans, rope(positions_BL)
        return self._canvases[length]

    def require_whole_blocks(self) -> None:
        """Raise BlockdiffError if a row ends within a block that its tokens see whole, so that nothing can follow."""
        block = next((kind.block for kind in self.kinds if kind.block is not None), None)
        if block is None:
            return
        lengths = self.lengths_B.tolist() if self.common_length is None else [self.common_length]
        if cut := next((length for length in lengths if length % block), None):
            raise BlockdiffError(
                f"a row of {cut} tokens ends within a block of {block}; encode whole blocks, and put the rest of the "
                "tokens into the canvas after them"
            )

    def select(self, rows: Tensor) -> Prefix:
        """Return the prefix of some rows (int64 indices [B'])."""
        kv = [tuple(x[rows] for x in layer) for layer in self._held_kv()]
        first_B = {name: first[rows] for name, first in self.first_B.items()}
        hidden, lengths_B = self.hidden[rows], self.lengths_B[rows]
        some = Prefix(hidden, kv, self.kinds, lengths_B, self.columns, self.common_length, first_B)
        some._kept = {key: selection.select(rows) for key, selection in self._kept.items()}
        return some

    def extended(self, hidden: Tensor, kv: list[KV], added_B: Tensor | None) -> Prefix:
        """Append a call's kv at each row's length, and return the new prefix; this one is consumed (buffers reused)."""
        tokens = hidden.shape[1]
        is_common = self.common_length is not None and added_B is None
        lengths_B = self.lengths_B + (tokens if added_B is None else added_B)
        columns = self.columns + tokens
        first_B = {k.name: (lengths_B - k.window + 1).clamp(min=0) for k in set(self.kinds) if k.window is not None}
        old_kv, self._kv = self._held_kv(), None
        merged: list[KV] = []
        for n, (kind, new) in enumerate(zip(self.kinds, kv, strict=True)):
            old, old_kv[n] = old_kv[n], ()  # free a layer's old buffers as soon as its new ones exist
            window = kind.window
            if window is None:
                merged.append(tuple(self._append(a, b, columns) for a, b in zip(old, new, strict=True)))
            elif is_common:
                merged.append(tuple(_last_columns(a, b, window - 1) for a, b in zip(old, new, strict=True)))
            else:
                held_B = self.lengths_B - self.first_B[kind.name]
                source = _sources(held_B, lengths_B - self.lengths_B, old[0].shape[1], tokens, window - 1)
                rows = torch.arange(len(self), device=source.device)[:, None]
                merged.append(tuple(torch.cat([a, b], 1)[rows, source] for a, b in zip(old, new, strict=True)))
        common = self.common_length + tokens if is_common and self.common_length is not None else None
        return Prefix(hidden, merged, self.kinds, lengths_B, columns, common, first_B)

    def _held_kv(self) -> list[KV]:
        if self._kv is None:
            raise BlockdiffError(
                "this prefix was consumed by encode(..., prefix=...), which reuses its memory; "
                "use the prefix that encode returned"
            )
        return self._kv

    def _append(self, old: Tensor, new: Tensor, columns: int) -> Tensor:
        """Return a full layer's tensor with the call's tokens written at each row's length."""
        B, tokens = new.shape[:2]
        if not old.shape[1]:
            return new
        carries_gradient = torch.is_grad_enabled() and (old.requires_grad or new.requires_grad)
        if carries_gradient and self.common_length is not None:
            return torch.cat([old[:, : self.common_length], new], 1)
        if old.shape[1] < columns:
            room = columns if carries_gradient else max(columns, old.shape[1] + old.shape[1] // 2)
            old = torch.cat([old, old.new_zeros(B, room - old.shape[1], *old.shape[2:])], 1)
        if self.common_length is not None:
            old[:, self.common_length : self.common_length + tokens] = new
            return old
        rows = torch.arange(B, device=new.device)[:, None]
        places = self.lengths_B[:, None] + torch.arange(tokens, device=new.device)
        if carries_gradient:
            return old.index_put((rows, places), new)
        return old.index_put_((rows, places), new)


def _last_columns(old: Tensor, new: Tensor, limit: int) -> Tensor:
    """Return the last `limit` columns of [old | new] in new memory."""
    both = torch.cat([old, new], 1) if old.shape[1] else new
    return both if both.shape[1] <= limit else both[:, both.shape[1] - limit :].clone()


def _sources(held_B: Tensor, added_B: Tensor, old_columns: int, tokens: int, limit: int) -> Tensor:
    """Return the indices, in [old | new] columns, of each row's last `limit` tokens: [B, columns], short rows padded.

    Row b's tokens are old columns [0, held_b) and new ones [old_columns, old_columns + added_b).
    """
    columns = torch.arange(min(old_columns + tokens, limit), device=held_B.device)
    column = (held_B + added_B - limit).clamp(min=0)[:, None] + columns
    source = torch.where(column < held_B[:, None], column, column - held_B[:, None] + old_columns)
    return source.clamp(max=old_columns + tokens - 1)
