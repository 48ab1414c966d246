"""Logits in plain torch, and the chunks of whole rows in which they are made: one chunk of them lives at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import upcast

CHUNK_BYTES = 64 << 20  # one fp32 chunk of logits; the cross-entropy holds two or three of them
CPU_BYTES = 8 << 20  # chunks on a CPU


def logits(hidden: Tensor, table_VD: Tensor, softcap: float | None) -> Tensor:
    """`softcap * tanh(h E^T / softcap)`, the product in the model's dtype, the cap in fp32 at least; [..., V]."""
    z = upcast(F.linear(hidden, table_VD))
    if softcap is None:
        return z
    return z.div(softcap).tanh().mul(softcap) if z.requires_grad else z.div_(softcap).tanh_().mul_(softcap)


def chunk_rows(hidden_ND: Tensor, vocabulary: int) -> int:
    """The number of rows whose fp32 logits fill a chunk, on a CPU one that stays in its caches."""
    rows = max(1, (min(CHUNK_BYTES, CPU_BYTES) if hidden_ND.is_cpu else CHUNK_BYTES) // (4 * vocabulary))
    return max(rows, min(64, CHUNK_BYTES // (4 * vocabulary)))  # the product needs some rows to be efficient


def chunks(hidden_ND: Tensor, vocabulary: int) -> Iterator[slice]:
    """One slice of rows after the other, at least one; each has at most `chunk_rows`."""
    rows = chunk_rows(hidden_ND, vocabulary)
    for lo in range(0, max(hidden_ND.shape[0], 1), rows):
        yield slice(lo, min(lo + rows, hidden_ND.shape[0]))


def fits(rows: int, vocabulary: int, dtype: torch.dtype) -> bool:
    """True where so many rows of logits, in that dtype, are no more than a chunk."""
    return rows * vocabulary * dtype.itemsize <= CHUNK_BYTES
