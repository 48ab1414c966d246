"""Prefixes in pages beside `Prefix`: `python -m benchmarks.pages [MODEL]`, milliseconds on this machine.

For every number of rows: a denoising step with the rows as they were, one after a quarter of the rows has left and
others were encoded in their place, and the same two with a dense prefix, which then selects the rows that stay and
joins the new ones to them. Hidden states are compared first. Steps of both take turns, and the least of each is shown:
other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch

import blockdiff
from blockdiff.models.family import BlockDiffusionModel
from blockdiff.models.pages import Pages
from blockdiff.models.prefix import Prefix


def least(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Milliseconds of each call, the least of its turns."""
    found = [float("inf")] * len(calls)
    for turn in range(repeats + 1):
        for n, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if turn:  # the first is a warm-up
                found[n] = min(found[n], 1e3 * (time.perf_counter() - start))
    return found


@torch.no_grad()
def measure(model: BlockDiffusionModel, count: int, prompt: int, repeats: int) -> list[float]:
    """Same rows with pages and without, and a quarter of them new with pages and without; milliseconds."""
    draw, L = torch.Generator().manual_seed(0), model.canvas_length
    tokens, canvas = (torch.randint(model.vocab_size, (count, n), generator=draw) for n in (prompt, L))
    soft = torch.randn(count, L, model.vocabulary.table.shape[1], generator=draw)
    pages, new = Pages(model), max(1, count // 4)
    rows = [pages.open() for _ in range(count)]
    pages.encode(rows, tokens, [prompt] * count)
    prefix, staying = model.encode(tokens), torch.arange(new, count)
    error = (pages.denoise(rows, canvas, soft) - model.denoise(canvas, prefix, soft)).abs().max()
    if not error < 1e-3:
        raise SystemExit(f"hidden states differ by {error:.1e}: nothing is timed")

    def change() -> None:
        for row in rows[:new]:
            pages.release(row)
        rows[:] = rows[new:] + [pages.open() for _ in range(new)]
        pages.encode(rows[-new:], tokens[:new], [prompt] * new)
        pages.denoise(rows, canvas, soft)

    def change_dense() -> None:
        stay, come = prefix.select(staying), model.encode(tokens[:new])
        kv: list[tuple[torch.Tensor, ...]] = []
        for pair in zip(stay.layers(), come.layers(), strict=True):
            kv.append(tuple(torch.cat(both) for both in zip(*pair, strict=True)))
        lengths_B = torch.cat([stay.lengths_B, come.lengths_B])
        first_B = {name: torch.cat([first, come.first_B[name]]) for name, first in stay.first_B.items()}
        joined = Prefix(prefix.hidden, kv, prefix.kinds, lengths_B, prompt, prompt, first_B)
        model.denoise(canvas, joined, soft)

    same = [lambda: pages.denoise(rows, canvas, soft), lambda: model.denoise(canvas, prefix, soft)]
    return least(same, repeats) + least([change, change_dense], repeats)


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("model", nargs="?", help="a checkpoint; default: the presets sudoku4 and 15m, untrained")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 100])
    parser.add_argument("--prompt", type=int, nargs="+", help="tokens; default: 17 for sudoku4, else 512")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print("| model | rows | prompt | same rows: pages, dense | a quarter new: pages, dense |\n|---|---|---|---|---|")
    for name in [options.model] if options.model else ["sudoku4", "15m"]:
        model = blockdiff.load(name, dtype="float32", device="cpu") if options.model else blockdiff.init(name, seed=0)
        for prompt in options.prompt or [17 if name == "sudoku4" else 512]:
            for count in options.rows:
                times = [f"{ms:.1f}" for ms in measure(model, count, prompt, options.repeats)]
                print(f"| {name} | {count} | {prompt} | {', '.join(times[:2])} | {', '.join(times[2:])} |", flush=True)


if __name__ == "__main__":
    main()
