"""Logits in plain torch, and the cut of rows into chunks, of which one is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.autocast import upcast

CHUNK_BYTES = 64 << 20  # of one fp32 chunk of logits on a GPU; the cross-entropy holds two or three
CPU_BYTES = 8 << 20  # of one on a CPU


def logits(hidden: Tensor, table_VD: Tensor, softcap: float | None) -> Tensor:
    """Compute `softcap * tanh(h E^T / softcap)` [..., V]: product in the model's dtype, cap in at least fp32."""
    z = upcast(F.linear(hidden, table_VD))
    if softcap is None:
        return z
    return z.div(softcap).tanh().mul(softcap) if z.requires_grad else z.div_(softcap).tanh_().mul_(softcap)


def chunk_rows(hidden_ND: Tensor, vocabulary: int) -> int:
    """Return how many rows of fp32 logits fill a chunk; on a CPU a chunk that fits its caches."""
    rows = max(1, (min(CHUNK_BYTES, CPU_BYTES) if hidden_ND.is_cpu else CHUNK_BYTES) // (4 * vocabulary))
    return max(rows, min(64, CHUNK_BYTES // (4 * vocabulary)))  # the product needs some rows to be efficient


def chunks(hidden_ND: Tensor, vocabulary: int) -> Iterator[slice]:
    """Yield slices of at most `chunk_rows` rows each, at least one slice."""
    rows = chunk_rows(hidden_ND, vocabulary)
    for lo in range(0, max(hidden_ND.shape[0], 1), rows):
        yield slice(lo, min(lo + rows, hidden_ND.shape[0]))


def fits(rows: int, vocabulary: int, dtype: torch.dtype) -> bool:
    """Whether `rows` rows of logits in a dtype fit in one chunk."""
    return rows * vocabulary * dtype.itemsize <= CHUNK_BYTES
