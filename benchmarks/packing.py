"""What packing gains: an optimiser step with and without, on the rows of a file. Losses are compared first.

    python -m benchmarks.packing gsm8k/train.jsonl --columns prompt=question,response=answer --pack 512

A random model of a preset and a byte-level BPE made from the rows; no download. The exit code is 1 if a packed step
has other losses or gradients than the unpacked one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import machine
from benchmarks.timing import interleaved, once
from blockdiff.canvas import Batch
from blockdiff.checkpoint import fitted, init, preset_config
from blockdiff.data.chat import Encoder, Example
from blockdiff.data.collate import AllCanvases, Collator, RandomCanvases, micro_batches
from blockdiff.data.order import Order
from blockdiff.data.rows import texts_of
from blockdiff.data.sources import Source, rows_of
from blockdiff.data.tokenizer import byte_level_bpe
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.objective import Objective

LOSS_BOUND, GRADIENT_BOUND = 1e-5, 1e-4  # relative, fp32; all gradients as one vector


@dataclass(frozen=True)
class Layout:
    """How the global batch is laid out: tokens of a packed row, rows of a micro-batch (None: no packing, all rows)."""

    pack: int | None
    micro_batch_size: int | None

    def __str__(self) -> str:
        rows = "all rows at once" if self.micro_batch_size is None else f"{self.micro_batch_size} rows at a time"
        return f"{'one example per row' if self.pack is None else f'packed to {self.pack}'}, {rows}"


@dataclass(frozen=True)
class Line:
    """One layout measured: rows, shares of padding, seconds of an optimiser step and of laying it out, tokens/s."""

    layout: str
    rows: float
    clean_padding: float
    canvas_padding: float
    step_ms: float
    layout_ms: float
    tokens_per_second: float


def measure(
    examples: Sequence[Example], collator: Collator, objective: Objective, layouts: Sequence[Layout], options: Any
) -> list[Line]:
    """Every layout over the same optimiser steps, timed in turns; tokens are clean and canvas ones, no padding."""
    device = objective.model.device
    order = Order(len(examples), options.batch_size, seed=0)
    steps = range(1, options.steps + 1)

    def batches(layout: Layout, step: int) -> list[Batch]:
        return micro_batches(
            examples, order, collator, step, pack=layout.pack, micro_batch_size=layout.micro_batch_size
        )

    def run(window: Sequence[Batch]) -> tuple[float, float]:
        objective.zero_grad(set_to_none=True)
        counts = [max(1.0, sum(getattr(b, name)() for b in window)) for name in ("canvas_count", "ar_count")]
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        for batch in window:
            losses = objective(batch.to(device))
            pair = torch.stack([losses.canvas_sum / counts[0], losses.ar_sum / counts[1]])
            pair.sum().backward()
            totals += pair.detach()
        canvas, ar = totals.tolist()
        return canvas, ar

    _compare(objective, [partial(run, batches(layout, 1)) for layout in layouts], layouts)
    laid_out = {layout: [batches(layout, step) for step in steps] for layout in layouts}

    def run_all(windows: Sequence[Sequence[Batch]]) -> None:
        for window in windows:
            run(window)

    work = {str(layout): once(partial(run_all, windows), device) for layout, windows in laid_out.items()}
    times = interleaved(work, options.repeats, warmup=1)
    lines = []
    for layout, windows in laid_out.items():
        flat = [batch for window in windows for batch in window]
        clean, canvas = _padding(flat)
        seconds = times[str(layout)].median / len(steps)
        real = sum(int((b.doc_start_BS >= 0).sum() + b.length_BC.sum()) for b in flat) / len(steps)
        began = time.perf_counter()
        for step in steps:
            batches(layout, step)
        laying = (time.perf_counter() - began) / len(steps)
        rows = sum(len(b.tokens_BS) for b in flat) / len(steps)
        lines.append(Line(str(layout), rows, clean, canvas, 1e3 * seconds, 1e3 * laying, real / seconds))
    return lines


def _compare(
    objective: Objective, runs: Sequence[Callable[[], tuple[float, float]]], layouts: Sequence[Layout]
) -> None:
    """Exit unless the losses and gradients of every layout are those of the first."""

    def gradients() -> torch.Tensor:
        return torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])

    truth, expected = runs[0](), gradients()
    for run, layout in zip(runs[1:], layouts[1:], strict=True):
        loss_error = max(abs(a / b - 1) for a, b in zip(run(), truth, strict=True) if b)
        gradient_error = float((gradients() - expected).norm() / expected.norm())
        print(f"{layout}: losses differ by {loss_error:.1e}, gradients by {gradient_error:.1e}", file=sys.stderr)
        if not (loss_error <= LOSS_BOUND and gradient_error <= GRADIENT_BOUND):
            sys.exit(f"{layout}: losses or gradients are not those of {layouts[0]}; no times are given")


def _padding(batches: Sequence[Batch]) -> tuple[float, float]:
    """Shares of clean columns and of canvas positions that are padding."""
    columns = sum(b.tokens_BS.numel() for b in batches)
    positions = sum(b.canvas_BCL.numel() for b in batches)
    clean = sum(int((b.doc_start_BS >= 0).sum()) for b in batches)
    return 1 - clean / columns, 1 - sum(int(b.length_BC.sum()) for b in batches) / positions


def main(words: list[str] | None = None) -> None:
    """Measure and print a table, or JSON with --json."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("rows", type=Path, help="a file of rows, such as JSONL")
    parser.add_argument("--columns", default="", help="prompt=COLUMN,response=COLUMN where they are called otherwise")
    parser.add_argument("--preset", default="gsm8k")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--pack", type=int, default=512)
    parser.add_argument("--canvases", default="all", help="canvases of an example that are run, or all")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--micro-batch-size", type=int, default=4, help="of the layouts that do not run all rows")
    parser.add_argument("--steps", type=int, default=4, help="different optimiser steps per repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(words)

    columns = dict(pair.split("=", 1) for pair in options.columns.split(",") if pair)
    rows = list(rows_of(Source(options.rows, columns=columns)))
    tokenizer = byte_level_bpe((text for row in rows for text in texts_of(row)), options.vocab_size)
    model = init(fitted(preset_config(options.preset), tokenizer), seed=0, tokenizer=tokenizer, device=options.device)
    rows = rows[: options.batch_size * options.steps]
    examples, made = Encoder(tokenizer, tokenizer.eos_token_id, model.canvas_length).encode(rows)
    canvases = AllCanvases() if options.canvases == "all" else RandomCanvases(int(options.canvases))
    collator = Collator(model.canvas_length, 0, tokenizer.eos_token_id, 0, StratifiedTime(), canvases=canvases)
    objective = Objective(model, Linear(), UniformCorruption(model.vocab_size))
    lengths = sorted(len(example.tokens) for example in examples)
    few, pack = options.micro_batch_size, options.pack
    layouts = [Layout(None, None), Layout(None, few), Layout(pack, None), Layout(pack, max(1, few // 2))]
    lines = measure(examples, collator, objective, layouts, options)
    if options.json:
        record = {**machine.describe(model.device), "options": {k: str(v) for k, v in vars(options).items()}}
        print(json.dumps(record | {"lines": [asdict(line) for line in lines]}, indent=2))
        return
    print(f"{made}")
    print(f"tokens of an example: median {statistics.median(lengths)}, longest {lengths[-1]}")
    print("| layout | rows | padding: clean | padding: canvases | step ms | lay out ms | tokens/s |")
    print("|---|---|---|---|---|---|---|")
    for line in lines:
        print(
            f"| {line.layout} | {line.rows:.1f} | {line.clean_padding:.0%} | {line.canvas_padding:.0%} | "
            f"{line.step_ms:.0f} | {line.layout_ms:.1f} | {line.tokens_per_second:,.0f} |"
        )


if __name__ == "__main__":
    main()
