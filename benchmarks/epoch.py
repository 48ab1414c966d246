"""A pass over rows as long as GSM8K's, all canvases scored, beside a transformers loop that pads; and the data path.

    python -m benchmarks.epoch --steps 6 --repeats 3

Rows are random tokens whose lengths are drawn as GSM8K's are spread. An optimiser step takes the same examples, noise
and coins on both sides, and ends with AdamW. We pack them into rows of up to 2,048 tokens, which hold all that a step
takes: attention costs what documents cost, so nothing speaks for shorter ones. transformers' side pads every batch to
its longest row and its most canvases. Losses and gradients of a step are compared before anything is timed; the exit
code is 1 if they differ. Tokens are clean and canvas ones without padding.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from benchmarks import machine, peer
from benchmarks.models import Pair, pair, sizes
from benchmarks.timing import Stopwatch, Times, interleaved, once, quartiles
from benchmarks.training_step import GRADIENT_BOUND, LOSS_BOUND, loss_error
from blockdiff.canvas import Batch
from blockdiff.data.chat import Example
from blockdiff.data.collate import AllCanvases, Collator, micro_batches
from blockdiff.data.order import Order
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.objective import Objective
from blockdiff.terminal import quiet
from blockdiff.training.optimiser import build

# Mean and deviation of the logarithm of a length in tokens of a BPE of 4,096, and the longest: prompts, responses.
PROMPT, RESPONSE = (4.2, 0.35, 280), (4.59, 0.49, 472)


def examples_of(count: int, vocabulary: int, seed: int = 0) -> list[Example]:
    """Rows of random tokens, one response each."""
    draw = random.Random(seed)
    examples = []
    for sample in range(count):
        prompt, response = (
            max(8, min(longest, round(draw.lognormvariate(mean, deviation))))
            for mean, deviation, longest in (PROMPT, RESPONSE)
        )
        tokens = [draw.randrange(3, vocabulary) for _ in range(prompt + response)]
        examples.append(Example(sample, tokens, [(prompt, prompt + response)]))
    return examples


def with_coins_of_rows(batch: Batch) -> Batch:
    """All canvases of an example with one coin, packed or not: transformers' model has one a row."""
    return replace(batch, coin_BC=batch.address_BC3[..., 1] % 2 == 0)


class PaddedStep:
    """transformers' forward over one batch of rows, each padded to the longest and to the most canvases."""

    def __init__(self, models: Pair, batch: Batch, noisy_BCL: Tensor, experts: str):
        self.model, self.batch, self.experts = models.peer, batch, experts
        (B, S), (_, C, L) = batch.tokens_BS.shape, noisy_BCL.shape
        self.noisy_BT = noisy_BCL.flatten(1)
        start_BT = batch.start_BC.repeat_interleave(L, 1)
        is_there_BT = (torch.arange(L) < batch.length_BC[..., None]).flatten(1)
        place, canvas_T = torch.arange(S), torch.arange(C * L) // L
        sees_clean = (place < start_BT[..., None]) & is_there_BT[..., None]
        sees_canvas = (canvas_T[:, None] == canvas_T).expand(B, -1, -1)  # padding sees padding: nothing is empty
        mask = torch.cat([sees_clean, sees_canvas], -1)[:, None]
        self.masks = dict.fromkeys(set(models.peer.config.text_config.layer_types), mask)
        self.positions_BT = start_BT + torch.arange(L).repeat(C)
        self.coin_B = batch.coin_BC[:, 0]
        self.rows = self.coin_B.nonzero()[:, 0]

    def __call__(self) -> tuple[Tensor, Tensor]:
        """The sums of the canvas and of the AR loss."""
        self.model.set_experts_implementation(self.experts)
        batch, cache = self.batch, DynamicCache(config=self.model.config.text_config)
        # causal, and padding stands last: no mask is needed
        hidden_BSD = self.model.model.encoder(input_ids=batch.tokens_BS, past_key_values=cache).last_hidden_state
        kv = [(layer.keys, layer.values) for layer in cache.layers]
        cap = self.model.final_logit_softcapping
        pairs = batch.is_ar_scored_BS
        logits = torch.tanh(self.model.lm_head(hidden_BSD[pairs]).float() / cap) * cap
        ar = F.cross_entropy(logits, batch.tokens_BS.roll(-1, 1)[pairs], reduction="sum")
        signal = None
        if len(self.rows):
            with torch.no_grad():
                some = self._denoise(self.rows, [(k[self.rows], v[self.rows]) for k, v in kv], None)
            signal = some.new_zeros(len(batch.tokens_BS), *some.shape[1:]).index_copy_(0, self.rows, some)
        logits_BTV = self._denoise(torch.arange(len(batch.tokens_BS)), kv, signal)
        is_scored = batch.is_scored_BCL.flatten(1)
        return F.cross_entropy(logits_BTV[is_scored], batch.canvas_BCL.flatten(1)[is_scored], reduction="sum"), ar

    def _denoise(self, rows: Tensor, kv: Sequence[tuple[Tensor, Tensor]], signal: Tensor | None) -> Tensor:
        cache = DynamicCache(config=self.model.config.text_config)
        for n, (keys, values) in enumerate(kv):
            cache.update(keys, values, n)
        return self.model(
            decoder_input_ids=self.noisy_BT[rows],
            past_key_values=cache,
            self_conditioning_logits=signal,
            self_conditioning_mask=None if signal is None else self.coin_B[rows],
            decoder_attention_mask={kind: mask[rows] for kind, mask in self.masks.items()},
            decoder_position_ids=self.positions_BT[rows],
        ).logits


class Ours:
    """Our side: rows become batches, and these an optimiser step, as a training makes them."""

    def __init__(self, models: Pair, options: argparse.Namespace):
        self.objective = Objective(models.ours, Linear(), UniformCorruption(models.ours.vocab_size), sweep=True)
        self.options, self.optimiser = options, build(self.objective, lr=0.0)
        self.examples = examples_of(options.batch_size * options.steps, models.ours.vocab_size)
        self.order = Order(len(self.examples), options.batch_size, seed=0)
        self.collator = Collator(models.ours.canvas_length, 0, 1, 0, StratifiedTime(), canvases=AllCanvases())

    def padded(self, step: int) -> Batch:
        """The examples of an optimiser step as one batch, an example a row."""
        return with_coins_of_rows(micro_batches(self.examples, self.order, self.collator, step)[0])

    def packed(self, step: int) -> list[Batch]:
        """The same examples as they are trained on."""
        rows = self.options.micro_batch_size
        made = micro_batches(
            self.examples, self.order, self.collator, step, pack=self.options.pack or None, micro_batch_size=rows
        )
        return [with_coins_of_rows(batch) for batch in made]

    def noise(self, batch: Batch) -> Tensor:
        """The noisy canvases [B, C, L] of a batch."""
        alpha_BC = self.objective.schedule.alpha(batch.t_BC)
        return self.objective.corruption.corrupt(batch.canvas_BCL, alpha_BC, batch.address_BC3, 0)[0]

    def step(self, step: int, counts: tuple[float, float]) -> tuple[float, float]:
        """Take an optimiser step, from the rows on: both losses."""
        self.objective.zero_grad(set_to_none=True)
        totals = torch.zeros(2)
        for batch in self.packed(step):
            losses = self.objective(batch)
            both = torch.stack([losses["canvas"] / counts[0], losses["ar"] / counts[1]])
            both.sum().backward()
            totals += both.detach()
        self.optimiser.step()
        return float(totals[0]), float(totals[1])


class Theirs:
    """transformers' side: padded batches that are there already."""

    def __init__(self, models: Pair, batches: Sequence[Batch], noisy: Sequence[Tensor]):
        self.peer = models.peer
        trained = [p for name, p in models.peer.named_parameters() if "vision" not in name]
        self.optimiser = torch.optim.AdamW(trained, lr=0.0, fused=True)
        self.variants = {
            experts: [PaddedStep(models, b, n, experts) for b, n in zip(batches, noisy, strict=True)]
            for experts in peer.EXPERTS
        }

    def step(self, experts: str, step: int, counts: tuple[float, float]) -> tuple[float, float]:
        """Take an optimiser step: both losses."""
        self.peer.zero_grad(set_to_none=True)
        canvas_sum, ar_sum = self.variants[experts][step - 1]()
        canvas, ar = canvas_sum / counts[0], ar_sum / counts[1]
        (canvas + ar).backward()
        self.optimiser.step()
        return float(canvas.detach()), float(ar.detach())


def gradient_error(models: Pair) -> float:
    """The distance of the gradients of both sides, as a share of the peer's norm."""
    squares = [0.0, 0.0]
    for name, parameter in models.ours.named_parameters():
        truth = models.peer_parameter(name).grad
        assert parameter.grad is not None and truth is not None
        squares[0] += float((parameter.grad - truth).norm()) ** 2
        squares[1] += float(truth.norm()) ** 2
    return math.sqrt(squares[0] / squares[1])


def run(options: argparse.Namespace) -> int:
    """Compare, time, print; 1 where the sides disagree."""
    device = torch.device("cpu")
    models = pair(sizes(device)["15m"], device)
    ours, steps = Ours(models, options), range(1, options.steps + 1)
    padded = [ours.padded(step) for step in steps]
    counts = [(batch.canvas_count(), batch.ar_count()) for batch in padded]
    theirs = Theirs(models, padded, [ours.noise(batch) for batch in padded])

    loss = loss_error(ours.step(1, counts[0]), theirs.step("grouped_mm", 1, counts[0]))
    gradient = gradient_error(models)
    if not (loss <= LOSS_BOUND and gradient <= GRADIENT_BOUND):
        print(f"losses differ by {loss:.1e}, gradients by {gradient:.1e}: no times are given", file=sys.stderr)
        return 1

    def whole_pass(step_of: Callable[[int, tuple[float, float]], object]) -> Stopwatch:
        def work() -> None:
            for step, count in zip(steps, counts, strict=True):
                step_of(step, count)

        return once(work, device)

    work = {"ours": whole_pass(ours.step)}  # the data path is in our time
    work |= {experts: whole_pass(partial(theirs.step, experts)) for experts in peer.EXPERTS}
    times = interleaved(work, options.repeats, warmup=1)
    began = time.perf_counter()
    for step in steps:
        ours.packed(step)
    data_path = time.perf_counter() - began
    write(options, padded, times, data_path, {"losses": loss, "gradients": gradient})
    return 0


def write(
    options: argparse.Namespace,
    padded: Sequence[Batch],
    times: dict[str, Times],
    data_path: float,
    errors: dict[str, float],
) -> None:
    """Print the table, and write it and the figures where a file is named."""
    device = torch.device("cpu")
    tokens = sum(int((b.doc_start_BS >= 0).sum() + b.length_BC.sum()) for b in padded)
    fastest = min(peer.EXPERTS, key=lambda name: times[name].median)
    ratios = tuple(a / b for a, b in zip(times[fastest].seconds, times["ours"].seconds, strict=True))
    low, high = quartiles(ratios)
    padding = [1 - sum(int(n) for n in part) / total for part, total in _shares(padded)]
    record = {
        **machine.describe(device),
        "options": {k: str(v) for k, v in vars(options).items()},
        "errors": errors,
        "tokens": tokens,
        "seconds": {name: each.seconds for name, each in times.items()},
        "data_path_seconds": data_path,
        "padding": {"clean": padding[0], "canvases": padding[1]},
        "speedup": {"median": statistics.median(ratios), "low": low, "high": high},
    }
    lines = [
        machine.heading(record, options.repeats),
        "",
        "| | tokens/s | seconds | |",
        "|---|---|---|---|",
        f"| ours, packed to {options.pack} | {tokens / times['ours'].median:,.0f} | {times['ours'].median:.2f} | |",
        f"| transformers, {fastest}, padded ({padding[0]:.0%} of clean, {padding[1]:.0%} of canvas positions) | "
        f"{tokens / times[fastest].median:,.0f} | {times[fastest].median:.2f} | "
        f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f}) |",
        f"| rows to batches alone | {tokens / data_path:,.0f} | {data_path:.3f} | "
        f"{times['ours'].median / data_path:.0f} times the steps' speed |",
        "",
        f"{options.steps} optimiser steps of {options.batch_size} examples, {tokens} tokens; "
        f"losses differ by {errors['losses']:.0e}, gradients by {errors['gradients']:.0e}.",
    ]
    print("\n".join(lines))
    if options.output is not None:
        machine.write(options.output, record, "\n".join(lines) + "\n")


def _shares(batches: Sequence[Batch]) -> list[tuple[list[int], int]]:
    """Tokens that are not padding in each batch and all positions of them: clean columns, then canvases."""
    clean = [int((b.doc_start_BS >= 0).sum()) for b in batches], sum(b.tokens_BS.numel() for b in batches)
    return [clean, ([int(b.length_BC.sum()) for b in batches], sum(b.canvas_BCL.numel() for b in batches))]


def main(words: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.epoch", description=__doc__)
    parser.add_argument("--steps", type=int, default=6, help="optimiser steps of a pass")
    parser.add_argument("--batch-size", type=int, default=8, help="examples of an optimiser step")
    parser.add_argument("--pack", type=int, default=2048, help="tokens of a packed row (0: one example a row)")
    parser.add_argument("--micro-batch-size", type=int, help="packed rows that run together (default: all)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="FILE.json; the table goes beside it")
    quiet()
    return run(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
