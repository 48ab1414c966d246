"""A picture of the tiles that span attention loads: `python -m benchmarks.visited_tiles FILE.png`."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from blockdiff.spans import Spans, denoise_spans, encode_spans


def visited(spans: Spans, prefix: int, own: int, queries: int, N: int) -> Tensor:
    """Which keys the forward loads for each query: booleans [B, T, prefix + own], in tiles of `queries` by N keys.

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


def draw(path: str, queries: int = 8, N: int = 8) -> None:
    """A packed row of two documents: its sliding encode, and the denoise of four canvases over it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    S, L, window = 96, 16, 24
    doc_start = torch.zeros(1, S, dtype=torch.int64)
    doc_start[:, 40:] = 40
    start, docs = torch.tensor([[12, 24, 60, 80]]), torch.tensor([[0, 0, 40, 40]])
    length = torch.tensor([[L, L, L, 10]])
    panels = [
        ("encode, window 24: two documents of 40 and 56 tokens", encode_spans(doc_start, window), 0, S),
        ("denoise, full layer: four canvases over their prefixes", denoise_spans(start, docs, length, L), S, 4 * L),
    ]
    widths = [prefix + own for _, _, prefix, own in panels]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), width_ratios=widths, layout="constrained")
    for axis, (title, spans, prefix, own) in zip(axes, panels, strict=True):
        loads = visited(spans, prefix, own, queries, N)[0]
        sees = spans.dense(prefix, own)[0]
        axis.imshow(loads.int() + sees.int(), cmap=ListedColormap(["white", "#c9d9ee", "#2f5d9b"]), aspect="auto")
        for x in range(0, prefix + own + 1, N):
            axis.axvline(x - 0.5, color="0.85", linewidth=0.4)
        for y in range(0, sees.shape[0] + 1, queries):
            axis.axhline(y - 0.5, color="0.85", linewidth=0.4)
        if prefix:
            axis.axvline(prefix - 0.5, color="black", linewidth=1.2)
        share = float(loads.float().mean())
        axis.set(title=title, ylabel="queries")
        axis.set_xlabel(f"{'prefix | own' if prefix else 'own'} keys; {share:.0%} visited")
    figure.suptitle("dark: seen; light: computed with them and masked; white: never visited", fontsize=10)
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.visited_tiles", description=__doc__)
    parser.add_argument("path", metavar="FILE.png", help="the picture to write")
    draw(parser.parse_args().path)
