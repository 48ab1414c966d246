"""Block-sparse attention against dense attention over the same keys: time, selection included, on this machine.

    python -m benchmarks.block_sparse --tokens 32768

A line is printed only where both agree: with as many blocks as there are, on a short row, to 1e-4.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.kernels.block_sparse.native import block_sparse_attention, select_blocks


def inputs(tokens: int, heads: int, dim: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Queries, keys, values, index queries and index keys of one row, with one key head and one index head."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, tokens, heads, dim), *((1, tokens, 1, dim),) * 3, (1, tokens, dim))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def sparse(drawn: tuple[Tensor, ...], block: int, topk: int) -> Tensor:
    """Selection and attention."""
    q, k, v, idx_q, idx_k = drawn
    visible = torch.arange(1, q.shape[1] + 1)[None]
    ids = select_blocks(idx_q, idx_k, visible, block=block, topk=topk)
    return block_sparse_attention(q, k, v, ids, visible, None, block, q.shape[-1] ** -0.5)


def dense(drawn: tuple[Tensor, ...]) -> Tensor:
    """torch's causal attention, whose keys are not repeated in memory."""
    q, k, v = (x.transpose(1, 2) for x in drawn[:3])
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def seconds(run: Callable[[], object]) -> float:
    """The time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main(words: list[str] | None = None) -> None:
    """Compare the two."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--topk", type=int, default=16)
    given = parser.parse_args(words)
    with torch.no_grad():
        few = inputs(min(given.tokens, 3000), given.heads, given.dim)
        error = float((sparse(few, given.block, 1 << 20) - dense(few)).abs().max())
        if error > 1e-4:
            raise SystemExit(f"sparse with all blocks and dense differ by {error:.1e}; no time is printed")
        drawn = inputs(given.tokens, given.heads, given.dim)
        ours, theirs = seconds(lambda: sparse(drawn, given.block, given.topk)), seconds(lambda: dense(drawn))
    print(
        f"{given.tokens:,} tokens, {given.heads} query heads, {given.topk} blocks of {given.block}, d {given.dim}, "
        f"{torch.get_num_threads()} threads: sparse {ours:.1f} s, dense {theirs:.1f} s, {theirs / ours:.2f} times"
    )


if __name__ == "__main__":
    main()
