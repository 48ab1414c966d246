"""The tiles of keys that span attention's forward loads."""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.spans import Spans


def visited(spans: Spans, prefix: int, own: int, queries: int, N: int) -> Tensor:
    """The keys that the forward loads for each query: booleans [B, T, prefix + own], in tiles of `queries` by N keys.

    A tile of queries walks, in either source, the key tiles from the first to the last key that any of them sees.
    """
    bounds, parts = spans.bounds_BT4, []
    B, T = bounds.shape[:2]
    for first, keys in ((0, prefix), (2, own)):
        is_visited = torch.zeros(B, T, -(-keys // N) * N, dtype=torch.bool)
        for b in range(B):
            for t in range(0, T, queries):
                lo, hi = bounds[b, t : t + queries, first].clamp(min=0), bounds[b, t : t + queries, first + 1]
                sees = hi.clamp(max=keys) > lo
                if bool(sees.any()):
                    begin, end = int(lo[sees].min()) // N, -(-int(hi[sees].clamp(max=keys).max()) // N)
                    is_visited[b, t : t + queries, begin * N : end * N] = True
        parts.append(is_visited[..., :keys])
    return torch.cat(parts, -1)
