"""Whole workloads of sampling: `Sampler.generate` against transformers' `generate` and against our lockstep loop.

    python -m benchmarks.sampling puzzles --model runs/quickstart/model --prompts data/sudoku4/test.jsonl
    python -m benchmarks.sampling ragged shared --output FILE.json

puzzles: the quickstart's test puzzles of mixed difficulty. ragged: 15M parameters, 64 requests with prompts of 16 to
512 tokens and responses of 1 to 6 canvases, whose steps a canvas are scripted. shared: 15M, 200 requests that begin
with the same 512 tokens. Settings are those shipped; times are wall time, from prompts to answers, in turns. Outputs
are compared first, and where they disagree no speed-up is printed.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

import blockdiff
from benchmarks import machine, models
from benchmarks.denoise_step import agreement, logits_of_two_steps
from benchmarks.peer import EXPERTS
from benchmarks.sampling_peer import Peer, addressed_draws
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.sampling import Generation, Request, Result, Sampler, step
from blockdiff.sampling.prepare import prepare_sequences
from blockdiff.sampling.strategies import Composed, released
from blockdiff.sampling.strategy import Canvases
from blockdiff.seeding import child_seed
from blockdiff.terminal import quiet
from tests.oracles.lockstep import generate_in_lockstep
from tests.support.peaks import peak_memory

CPU = torch.device("cpu")
SAME = 0.99  # the share of requests that must have equal tokens under the same draws; near-ties may flip others
COMPARED = 128  # requests that are answered with the same draws
SHARED, OWN = 512, 16  # tokens of a prompt: shared by all requests, and a request's own


@dataclass(frozen=True)
class ScriptedStops(Composed):
    """Stopping rules for weights that never settle: a request's id sets the number of steps of its canvases."""

    steps: tuple[int, ...] = ()

    def stop(self, canvases: Canvases) -> Tensor:
        """Return which canvases have done their steps."""
        own_B = torch.tensor([self.steps[int(id)] for id in canvases.ids], device=canvases.step_B.device)
        return canvases.step_B + 1 >= own_B


@dataclass(frozen=True)
class Workload:
    """Requests for two models with the same weights; `steps` scripts their stops (None: the model's own rule)."""

    name: str
    models: models.Pair
    requests: tuple[Request, ...]
    generation: Generation
    limits: tuple[int, ...]
    steps: tuple[int, ...] | None = None

    def sampler(self) -> Sampler:
        """Return a fresh sampler of ours, which shares nothing with an earlier call."""
        rules = released(self.generation)
        if self.steps is not None:
            rules = ScriptedStops(**vars(rules), steps=self.steps)
        return Sampler(self.models.ours, None, self.generation, strategy=rules)

    def ours(self, limit: int) -> list[Result]:
        """Return the answers of `Sampler.generate`."""
        return self.sampler().generate(self.requests, batch_size=limit)

    def lockstep(self, limit: int) -> list[Result]:
        """Return the answers of the loop in which rows wait for each other."""
        sampler = self.sampler()
        asked = [sequence for request in self.requests for sequence in prepare_sequences(request, sampler.settings)]
        generate_in_lockstep(sampler.model, sampler.settings, asked, limit)
        return [each.result(sampler.settings) for each in asked]


class Meter:
    """Counts canvas forwards and times the parts while `work` runs once.

    The model's time is inside it and its vocabulary. The method's is spent on random numbers and the strategy's
    decisions, which any scheduler needs. The rest is scheduling: choosing rows, and moving their data.
    """

    def __init__(self, model: Any, work: Callable[[], Any]):
        self.canvas_forwards, self.encoded_tokens, self.model_seconds, self.method_seconds = 0, 0, 0.0, 0.0
        self._depth, self._began = 0, 0.0
        hooks: list[Any] = [model.register_forward_pre_hook(self._count, with_kwargs=True)]
        for module in (model, model.vocabulary):
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave))
        self._length = model.canvas_length
        drawn = mock.patch.object(step, "words", self._timed(step.words))
        decided = mock.patch.object(Composed, "decide", self._timed(Composed.decide))
        with drawn, decided:
            began = time.perf_counter()
            try:
                self.result = work()
            finally:
                self.seconds = time.perf_counter() - began
                for hook in hooks:
                    hook.remove()

    @property
    def scheduling(self) -> float:
        """The share of wall time that is neither the model's nor the method's."""
        return 1 - (self.model_seconds + self.method_seconds) / self.seconds

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = function(*given, **named)
            self.method_seconds += time.perf_counter() - began
            return result

        return timed

    def _count(self, _: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens_BT = inputs[0] if inputs else named["tokens_BT"]
        is_noisy = inputs[4] if len(inputs) > 4 else named.get("is_noisy", False)
        noisy = int(is_noisy.sum()) if isinstance(is_noisy, Tensor) else tokens_BT.numel() * bool(is_noisy)
        self.canvas_forwards += noisy // self._length
        self.encoded_tokens += tokens_BT.numel() - noisy

    def _enter(self, *_: Any) -> None:
        if not self._depth:
            self._began = time.perf_counter()
        self._depth += 1

    def _leave(self, *_: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.model_seconds += time.perf_counter() - self._began


def puzzles(model: str, prompts: Path, count: int, limits: Sequence[int]) -> Workload:
    """Return the first puzzles of a file, with the model trained for them."""
    tokenizer = load_tokenizer(Path(model))
    texts = [json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines()[:count]]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    requests = tuple(
        Request(n, tokens=bos + tokenizer(text, add_special_tokens=False)["input_ids"], seed=child_seed(0, n))
        for n, text in enumerate(texts)
    )
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(model, dtype=torch.float32).eval()
    ours = blockdiff.load(model, dtype="float32", device="cpu").eval()
    generation = Sampler(ours, tokenizer).generation
    return Workload("puzzles", models.Pair(ours, theirs), requests, generation, tuple(limits))  # type: ignore[arg-type]


def scripted(name: str, preset: str, count: int, limits: Sequence[int], seed: int = 0, longest: int = 512) -> Workload:
    """Return a workload with random weights, random prompts, and scripted steps and lengths."""
    pair = models.pair(models.Size(preset, preset, 1, 64, (2, 4)), CPU)
    pair.ours.eval(), pair.peer.eval()
    length, draw = pair.ours.canvas_length, torch.Generator().manual_seed(seed)

    def between(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=draw))

    def tokens(number: int) -> list[int]:
        drawn: list[int] = torch.randint(3, pair.ours.vocab_size, (number,), generator=draw).tolist()
        return drawn

    start = tokens(longest) if name == "shared" else []
    requests = []
    for n in range(count):
        own = tokens(OWN if start else between(min(16, longest), longest))
        canvases = 1 if start else between(1, 6)
        requests.append(Request(n, tokens=start + own, seed=n, max_new_tokens=canvases * length))
    steps = tuple(between(2, 8) for _ in range(count))
    # Only its limit ends a response, no token of the vocabulary does.
    generation = Generation(max_new_tokens=6 * length, eos_ids=(pair.ours.vocab_size + 1,), pad_id=0)
    return Workload(name, pair, tuple(requests), generation, tuple(limits), steps)


def compared(work: Workload, limit: int) -> dict[str, Any]:
    """Compare the answers of all sides; `agrees`, and the figures behind it."""
    if work.steps is None:
        some = replace(work, requests=work.requests[:COMPARED])
        ours = some.ours(limit)
        theirs: dict[int, tuple[list[int], float]] = {}
        L, V = work.models.ours.canvas_length, work.models.ours.vocab_size
        peer = Peer(work.models.peer, work.generation)
        for first in range(0, len(some.requests), limit):
            batch = some.requests[first : first + limit]
            with addressed_draws([int(request.seed or 0) for request in batch], L, V):
                theirs |= peer.answer(batch, limit)
        same = [
            mine.tokens == theirs[int(mine.id)][0][: len(mine.tokens)]
            and abs(len(mine.tokens) / sum(mine.steps) - theirs[int(mine.id)][1]) < 1e-4
            for mine in ours
        ]
        share = sum(same) / len(same)
        found: dict[str, Any] = {"same_as_transformers": share, "agrees": share >= SAME}
        mine, lockstep = some.ours(limit), some.lockstep(limit)
    else:
        # Random weights are chaotic: a rounding grows with every step. So logits are compared, and in fp64 our own two.
        pair, draw = work.models, torch.Generator().manual_seed(1)

        def drawn(seed: int) -> tuple[Tensor, Tensor]:
            draw.manual_seed(seed)
            tokens_BS = torch.randint(3, pair.ours.vocab_size, (2, 64), generator=draw)
            return tokens_BS, torch.randint(pair.ours.vocab_size, (2, pair.ours.canvas_length), generator=draw)

        chosen = models.with_wide_margins(pair.ours, drawn, lambda these: logits_of_two_steps(pair, *these))
        with torch.no_grad():
            logits = agreement(pair, *chosen)
        double = replace(work, models=pair._replace(ours=_double(pair.ours)), requests=_shortest(work.requests, 6))
        mine, lockstep = double.ours(4), double.lockstep(4)
        found = {"errors": {name: error for name, (error, _) in logits.errors.items()}, "agrees": logits.is_met}
    alike = sum(a.tokens == b.tokens and a.steps == b.steps for a, b in zip(mine, lockstep, strict=True)) / len(mine)
    return {**found, "same_as_lockstep": alike, "agrees": found["agrees"] and alike >= SAME}


def measure(work: Workload, limit: int, repeats: int, experts: str) -> dict[str, Any]:
    """Compare outputs, time all three in turns, then count our forwards and memory; return the line."""
    line: dict[str, Any] = {"workload": work.name, "requests": len(work.requests), "limit": limit}
    line |= compared(work, min(limit, 32))
    if not line["agrees"]:
        return line
    experts = fastest_experts(work, limit) if experts == "auto" else experts
    seconds: dict[str, list[float]] = {"ours": [], "lockstep": [], "transformers": []}
    for _ in range(repeats):
        peer = Peer(work.models.peer, work.generation, work.steps, experts)
        meter = Meter(work.models.ours, lambda: work.ours(limit))
        slow = Meter(work.models.ours, lambda: work.lockstep(limit))
        began = time.perf_counter()
        peer.answer(work.requests, limit)
        for name, taken in (("ours", meter.seconds), ("lockstep", slow.seconds)):
            seconds[name].append(taken)
        seconds["transformers"].append(time.perf_counter() - began)
    steps = [count for result in meter.result for count in result.steps]
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    few = replace(work, requests=work.requests[: 2 * min(limit, 16)])
    return line | {
        "seconds": seconds,
        "speedup": {name: median[name] / median["ours"] for name in ("transformers", "lockstep")},
        "executed_over_needed": meter.canvas_forwards / sum(steps),
        "transformers_executed_over_needed": peer.canvas_forwards / sum(steps),
        "encoded_tokens": {"ours": meter.encoded_tokens, "lockstep": slow.encoded_tokens},
        "scheduling": {"ours": meter.scheduling, "lockstep": slow.scheduling},
        "draws_and_decisions": {
            name: each.method_seconds / each.seconds for name, each in (("ours", meter), ("lockstep", slow))
        },
        "transformers_experts": experts,
        "steps_histogram": dict(sorted(Counter(steps).items())),
        "peak_bytes": {"requests": len(few.requests), "ours": peak_memory(lambda: few.ours(limit), CPU)},
    }


def fastest_experts(work: Workload, limit: int) -> str:
    """Return the variant of transformers' experts that answers the first requests fastest."""
    some, taken = work.requests[: limit if work.steps is None else min(limit, 8)], {}
    for name in EXPERTS:
        peer = Peer(work.models.peer, work.generation, work.steps, name)
        peer.answer(some[:2], limit)
        began = time.perf_counter()
        peer.answer(some, limit)
        taken[name] = time.perf_counter() - began
    return min(taken, key=lambda name: taken[name])


def told(line: dict[str, Any]) -> str:
    """Return a line for a person."""
    head = f"{line['workload']}, {line['requests']} requests, limit {line['limit']}:"
    if not line["agrees"]:
        found = {name: value for name, value in line.items() if name.startswith(("same", "errors"))}
        return f"{head} DISAGREES {found}"
    times = ", ".join(f"{name} {statistics.median(taken):.2f} s" for name, taken in line["seconds"].items())
    ratios = ", ".join(f"{ratio:.2f}x {name}" for name, ratio in line["speedup"].items())
    theirs = f"transformers {line['transformers_executed_over_needed']:.2f}"
    ran = f"executed/needed {line['executed_over_needed']:.3f} ({theirs})"
    share = f"scheduling {line['scheduling']['ours']:.1%} of the time (lockstep {line['scheduling']['lockstep']:.1%})"
    tokens = f"tokens encoded {line['encoded_tokens']['ours']:,} (lockstep {line['encoded_tokens']['lockstep']:,})"
    memory = f"peak {line['peak_bytes']['ours'] / 2**20:.1f} MiB with {line['peak_bytes']['requests']} requests"
    return f"{head} {times}; {ratios}; {ran}; {share}; {tokens}; {memory}; steps {line['steps_histogram']}"


def _double(model: Any) -> Any:
    """Return a copy of our model that computes in fp64."""
    return copy.deepcopy(model).double()


def _shortest(requests: Sequence[Request], count: int) -> tuple[Request, ...]:
    return tuple(sorted(requests, key=lambda each: len(each.tokens or ()) * (each.max_new_tokens or 1))[:count])


def main(words: Sequence[str] | None = None) -> int:
    """Print a line per workload and limit; return 1 if one disagrees."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sampling", description=__doc__.split("\n")[0])
    parser.add_argument("workloads", nargs="+", choices=("puzzles", "ragged", "shared"))
    parser.add_argument("--model", default="runs/quickstart/model", help="of puzzles")
    parser.add_argument("--prompts", type=Path, default=Path("data/sudoku4/test.jsonl"), help="of puzzles")
    parser.add_argument("--preset", default="15m", help="of ragged and shared")
    parser.add_argument("--count", type=int, help="requests (default: 1000, 64, 200)")
    parser.add_argument("--limits", default="32", help="comma-separated: rows that run together")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--experts", default="auto", help="transformers': grouped_mm, eager or auto (the faster one)")
    parser.add_argument("--output", type=Path, help="JSON to write, with the printed lines beside it as .md")
    given = parser.parse_args(words)
    quiet()
    limits = [int(limit) for limit in given.limits.split(",")]
    made: dict[str, Callable[[], Workload]] = {
        "puzzles": lambda: puzzles(given.model, given.prompts, given.count or 1000, limits),
        "ragged": lambda: scripted("ragged", given.preset, given.count or 64, limits),
        "shared": lambda: scripted("shared", given.preset, given.count or 200, limits, longest=SHARED),
    }
    lines: list[dict[str, Any]] = []
    for name in given.workloads:
        work = made[name]()
        for limit in limits:
            lines.append(measure(work, limit, given.repeats, given.experts))
            print(told(lines[-1]), flush=True)
            if given.output is not None:  # all lines so far, after each one
                record = {"machine": machine.describe(CPU), "repeats": given.repeats, "lines": lines}
                machine.write(given.output, record, "".join(f"- {told(each)}\n" for each in lines))
    return 0 if all(line["agrees"] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
