"""The prefix: keys and values of clean tokens, with room to grow, and what the rows that own them look like."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

KV = tuple[Tensor, ...]


class Prefix:
    """What `encode` returns: every layer's kv of the rows' clean tokens, right-padded.

    hidden [B, S, D]: the last call's tokens after the final norm; lengths_B: cached tokens of each row, int64;
    common_length: their length where the host knows it is the same for all rows, else None.
    """

    def __init__(self, hidden: Tensor, kv: list[KV], lengths_B: Tensor, columns: int, common_length: int | None):
        self.hidden, self.lengths_B = hidden, lengths_B
        self.columns, self.common_length = columns, common_length
        self._kv = kv
        self.geometry: dict[int, Any] = {}  # what denoise derives from the lengths, by canvas length

    def __len__(self) -> int:
        return self.lengths_B.shape[0]

    def layer(self, n: int) -> KV:
        """Layer n's prefix tensors [B, columns, ...], without the spare room."""
        return tuple(x[:, : self.columns] for x in self._kv[n])

    def select(self, rows: Tensor) -> Prefix:
        """The prefix of some rows (int64 [B'] indices)."""
        kv = [tuple(x[rows] for x in layer) for layer in self._kv]
        return Prefix(self.hidden[rows], kv, self.lengths_B[rows], self.columns, self.common_length)

    def extended(self, hidden: Tensor, kv: list[KV], added_B: Tensor | None) -> Prefix:
        """This prefix with a call's kv appended at each row's own length; consumes it (its buffers are reused)."""
        tokens = hidden.shape[1]
        columns = self.columns + tokens
        merged = []
        for old, new in zip(self._kv, kv, strict=True):
            merged.append(tuple(self._append(a, b, columns) for a, b in zip(old, new, strict=True)))
        lengths_B = self.lengths_B + (tokens if added_B is None else added_B)
        common = self.common_length + tokens if self.common_length is not None and added_B is None else None
        return Prefix(hidden, merged, lengths_B, columns if common is None else common, common)

    def _append(self, old: Tensor, new: Tensor, columns: int) -> Tensor:
        B, tokens = new.shape[:2]
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
