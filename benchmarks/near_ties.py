"""How often rounding changes what a request samples: the same requests alone and in batches, by dtype.

    python -m benchmarks.near_ties MODEL --prompts FILE.jsonl [--batch-size 32] [--output FILE.json]

The draws of a request depend on its seed alone, so tokens can differ between batch sizes only where a matrix
product rounds differently and two candidates lie that close. docs/sampling.md quotes what this prints.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import blockdiff
from blockdiff.sampling import Generation, Request, Result, Sampler

DTYPES = ("float64", "float32", "bfloat16")


@dataclass(frozen=True)
class Comparison:
    """One dtype: of `requests`, how many gave other tokens, and other numbers of steps, in the batch."""

    dtype: str
    requests: int
    other_tokens: int
    other_steps: int
    seconds_alone: float
    seconds_batched: float

    @property
    def share(self) -> float:
        """The share of requests whose tokens differ."""
        return self.other_tokens / self.requests


def compare(sampler: Sampler, requests: Sequence[Request], batch_size: int, **settings: Any) -> Comparison:
    """Answer the requests one by one and `batch_size` at a time, and count those whose answers differ.

    `settings` go to `Sampler.generate`. Raises ValueError for a request that cannot be answered.
    """
    runs: list[list[Result]] = []
    seconds = []
    for size in (1, batch_size):
        started = time.perf_counter()
        runs.append(sampler.generate(requests, batch_size=size, **settings))
        seconds.append(time.perf_counter() - started)
    alone, batched = runs
    for result in alone:
        if result.error is not None:
            raise ValueError(f"request {result.id}: {result.error}")
    pairs = list(zip(alone, batched, strict=True))
    return Comparison(
        dtype=str(sampler.model.dtype).removeprefix("torch."),
        requests=len(pairs),
        other_tokens=sum(a.tokens != b.tokens for a, b in pairs),
        other_steps=sum(a.steps != b.steps for a, b in pairs),
        seconds_alone=seconds[0],
        seconds_batched=seconds[1],
    )


def read_requests(path: Path, limit: int | None) -> list[Request]:
    """Requests of a prompts file, or of training rows; ids are line numbers from 1."""
    lines = path.read_text(encoding="utf-8").splitlines()[:limit]
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
    return [
        Request(n, prompt=row.get("prompt"), messages=row.get("messages"), seed=row.get("seed"))
        for n, row in enumerate(rows, start=1)
    ]


def main(words: Sequence[str] | None = None) -> list[Comparison]:
    """Print a line per dtype, and write the numbers with their circumstances where asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.near_ties", description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a checkpoint directory or hub id")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL: prompt or messages, optionally seed")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--limit", type=int, help="only the first N lines")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--steps", type=int, help="most denoising steps per canvas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path, help="JSON to write")
    options = parser.parse_args(words)

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    generation = Generation.from_pretrained(options.model)
    requests = read_requests(options.prompts, options.limit)
    print(f"requests one by one against {options.batch_size} at a time")
    print(f"{'dtype':10} {'requests':>8} {'other tokens':>18} {'other steps':>11}")
    comparisons = []
    for dtype in options.dtypes:
        model = blockdiff.load(options.model, dtype=dtype, device=options.device)
        found = compare(
            Sampler(model, tokenizer, generation),
            requests,
            options.batch_size,
            seed=options.seed,
            max_new_tokens=options.max_new_tokens,
            max_steps=options.steps,
        )
        comparisons.append(found)
        differ = f"{found.other_tokens} ({found.share:.2%})"
        print(f"{dtype:10} {found.requests:8} {differ:>18} {found.other_steps:11}", flush=True)
    if options.output is not None:
        device = str(model.device)
        circumstances = {
            "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "batch_size": options.batch_size,
            "seed": options.seed,
        }
        measured = [{**vars(found), "share": found.share} for found in comparisons]
        options.output.write_text(json.dumps({**circumstances, "dtypes": measured}, indent=1) + "\n")
    return comparisons


if __name__ == "__main__":
    main()
