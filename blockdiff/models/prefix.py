"""The prefix: keys and values of clean tokens, with room to grow, and what the rows that own them look like."""

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

    hidden [B, S, D]: the last call's tokens after the final norm; kinds: the kind of each layer; lengths_B: cached
    tokens of each row, int64; common_length: their length where the host knows it is the same for all rows, else
    None. A full layer holds all tokens; a sliding layer the last window - 1, so its first column stands for row column
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
        """The prefix of a first call; lengths_B None: every row is full."""
        B = hidden.shape[0]
        nothing_B = torch.zeros(B, dtype=torch.int64, device=hidden.device)
        empty = [tuple(x[:, :0] for x in layer) for layer in kv]
        first_B = {kind.name: nothing_B for kind in kinds if kind.window is not None}
        start = cls(hidden[:, :0], empty, kinds, nothing_B, 0, 0, first_B)
        return start.extended(hidden, kv, lengths_B)

    def __len__(self) -> int:
        return self.lengths_B.shape[0]

    def layers(self) -> list[KV]:
        """Each layer's prefix tensors [B, columns, ...], without the spare room."""
        return [
            kv if kind.window is not None else tuple(x[:, : self.columns] for x in kv)
            for kind, kv in zip(self.kinds, self._held_kv(), strict=True)
        ]

    def held(self, kind: LayerKind, spans: Spans) -> Spans:
        """Spans over row columns as spans over the columns that layers of this kind hold."""
        return spans if kind.window is None else spans.shifted(self.first_B[kind.name])

    def canvas(
        self, length: int, rope: Callable[[Tensor], dict[str, Rope]]
    ) -> tuple[Tensor, dict[str, Spans], dict[str, Rope]]:
        """Positions [B, L], spans and RoPE of one canvas per row right after its tokens; made once for all its steps.

        rope: what gives a model's RoPE of positions. What layers keep of a selection they keep with this prefix.
        """
        if length not in self._canvases:
            self.require_whole_blocks()
            start_B1 = self.lengths_B[:, None]
            everything = torch.zeros_like(start_B1), torch.full_like(start_B1, length)
            spans = {}
            for kind in set(self.kinds):
                own = self.held(kind, kind.denoise_spans(start_B1, *everything, length))
                # a sliding layer holds just the keys that a canvas sees
                sees_all = self.common_length is not None and kind.sees_whole_canvases
                spans[kind.name] = Spans(own.bounds_BT4, sees_all=sees_all)
                if kind.keeps_selection:
                    spans[kind.name].kept = self._kept.setdefault((kind.name, length), KeptSelection())
            positions_BL = start_B1 + torch.arange(length, device=start_B1.device)
            self._canvases[length] = positions_BL, spans, rope(positions_BL)
        return self._canvases[length]

    def require_whole_blocks(self) -> None:
        """Raise BlockdiffError if a row ends within a block that its tokens see whole: nothing can follow there."""
        block = next((kind.block for kind in self.kinds if kind.block is not None), None)
        if block is None:
            return
        lengths = self.lengths_B.tolist() if self.common_length is None else [self.common_length]
        if cut := next((length for length in lengths if length % block), None):
            raise BlockdiffError(
                f"a row of {cut} tokens ends within a block of {block}; encode whole blocks, and put the rest of the "
                "tokens into the canvas behind them"
            )

    def select(self, rows: Tensor) -> Prefix:
        """The prefix of some rows (int64 [B'] indices)."""
        kv = [tuple(x[rows] for x in layer) for layer in self._held_kv()]
        first_B = {name: first[rows] for name, first in self.first_B.items()}
        hidden, lengths_B = self.hidden[rows], self.lengths_B[rows]
        some = Prefix(hidden, kv, self.kinds, lengths_B, self.columns, self.common_length, first_B)
        some._kept = {key: kept.select(rows) for key, kept in self._kept.items()}
        return some

    def extended(self, hidden: Tensor, kv: list[KV], added_B: Tensor | None) -> Prefix:
        """This prefix with a call's kv appended at each row's own length; consumes it (its buffers are reused)."""
        tokens = hidden.shape[1]
        is_common = self.common_length is not None and added_B is None
        lengths_B = self.lengths_B + (tokens if added_B is None else added_B)
        columns = self.columns + tokens
        first_B = {k.name: (lengths_B - k.window + 1).clamp(min=0) for k in set(self.kinds) if k.window is not None}
        old_kv, self._kv = self._held_kv(), None
        merged: list[KV] = []
        for n, (kind, new) in enumerate(zip(self.kinds, kv, strict=True)):
            old, old_kv[n] = old_kv[n], ()  # a layer's old buffers go as soon as its new ones are there
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
        """A full layer's tensor with the call's tokens written after each row's own."""
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
    """The last `limit` columns of both, in memory of their own."""
    both = torch.cat([old, new], 1) if old.shape[1] else new
    return both if both.shape[1] <= limit else both[:, both.shape[1] - limit :].clone()


def _sources(held_B: Tensor, added_B: Tensor, old_columns: int, tokens: int, limit: int) -> Tensor:
    """Where, in [old | new] columns, each row's last `limit` tokens stand: [B, columns], rows of few tokens padded.

    Row b's tokens are old columns [0, held_b) and new ones [old_columns, old_columns + added_b).
    """
    columns = torch.arange(min(old_columns + tokens, limit), device=held_B.device)
    place = (held_B + added_B - limit).clamp(min=0)[:, None] + columns
    source = torch.where(place < held_B[:, None], place, place - held_B[:, None] + old_columns)
    return source.clamp(max=old_columns + tokens - 1)
