"""A picture of what the experts must pay: `python -m benchmarks.expert_roofline FILE.png [RESULTS.json]`.

One layer of the released model, forward, bf16: the time to move its bytes, the time to compute its products, and the
targets; with a results file of the benchmarks, what was measured.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from typing import NamedTuple

from benchmarks.kernel_expert_mlp import FORWARD, Shape

# What an H200 was measured to reach: copies, bytes a second; large bf16 products, operations a second.
BANDWIDTH, FLOPS = 4.3e12, 780e12
BANDWIDTH_TARGET, FLOPS_TARGET = 0.70, 0.45
TOKENS = [2**n for n in range(4, 17)]


class Floors(NamedTuple):
    """Seconds that the bytes and the operations of a forward take at the least."""

    bytes_seconds: float
    flops_seconds: float


class Point(NamedTuple):
    """What was measured at a number of tokens: our seconds, and the fastest peer's."""

    tokens: int
    ours: float
    peer: str
    theirs: float


def floors(tokens: int) -> Floors:
    """For so many tokens that each take 8 of 128 experts at random; D 2816, F 704."""
    shape = Shape("released", tokens, 128, 8, 2816, 704)
    used = shape.E * (1 - (1 - shape.k / shape.E) ** tokens)
    return Floors(shape.bytes(2, round(used)) / BANDWIDTH, shape.flops(FORWARD) / FLOPS)


def points(path: str) -> list[Point]:
    """The released model's forward lines with uniform routing, of a results file of the benchmarks."""
    found = []
    with open(path, encoding="utf-8") as file:
        for line in json.load(file)["results"]:
            words = re.match(r"([\d,]+) tokens, .*, uniform, forward(;|$)", line["case"])
            if line["suite"] == "experts" and line["size"] == "released" and words and line["ours_seconds"]:
                peer = line["fastest_peer"]
                ours, theirs = (statistics.median(s) for s in (line["ours_seconds"], line["peer_seconds"][peer]))
                found.append(Point(int(words[1].replace(",", "")), ours, peer, theirs))
    return found


def draw(path: str, measured: list[Point]) -> None:
    """Milliseconds over tokens, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 4.2), layout="constrained")
    both = [floors(tokens) for tokens in TOKENS]
    floor = [1e3 * max(each) for each in both]
    target = [1e3 * max(b / BANDWIDTH_TARGET, f / FLOPS_TARGET) for b, f in both]
    axes.plot(TOKENS, [1e3 * f.bytes_seconds for f in both], ":", label=f"bytes at {BANDWIDTH / 1e12:.1f} TB/s")
    axes.plot(TOKENS, [1e3 * f.flops_seconds for f in both], ":", label=f"products at {FLOPS / 1e12:.0f} TFLOP/s")
    axes.plot(TOKENS, floor, "k", label="the later of the two: the floor")
    axes.plot(TOKENS, target, "k--", label=f"target: {BANDWIDTH_TARGET:.0%} and {FLOPS_TARGET:.0%} of these")
    if measured:
        axes.plot([p.tokens for p in measured], [1e3 * p.ours for p in measured], "o", label="measured: ours")
        axes.plot([p.tokens for p in measured], [1e3 * p.theirs for p in measured], "x", label="the fastest peer")
    axes.set(xscale="log", yscale="log", xlabel="tokens (each takes 8 of 128 experts)", ylabel="milliseconds")
    axes.set_xticks(TOKENS[::2], [f"{tokens:,}" for tokens in TOKENS[::2]])
    axes.set_title("One layer's experts forward, D 2816, F 704, bf16, on an H200", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expert_roofline", description=__doc__)
    parser.add_argument("path", metavar="FILE.png", help="the picture to write")
    parser.add_argument("results", metavar="RESULTS.json", nargs="?", help="of the benchmarks: what was measured")
    options = parser.parse_args()
    draw(options.path, points(options.results) if options.results else [])
