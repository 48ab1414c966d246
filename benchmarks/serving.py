"""The server over HTTP, asked by OpenAI's client: its own cost, throughput beside transformers, the first canvas.

    python -m benchmarks.serving --model runs/quickstart/model --prompts data/sudoku4/test.jsonl
    python -m benchmarks.serving --sizes 15m --clients 1,8 --requests 32 --output FILE.json
    python -m benchmarks.serving --soak 5000

quickstart: puzzles, one canvas an answer. 15m: random weights, 8 steps for each of two canvases. Both servers run in
processes of their own. Answers are compared first, with transformers drawing our numbers (only for that): 99 % of the
puzzles' must be equal; random weights amplify every rounding, so there the logits of two steps are compared. Where
they disagree no speed-up is printed, and the exit code is 1. The front's cost is the time of a request over HTTP, from
one client, less that of the same request by an `Engine` in the client's process, both with one denoising step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import torch

from benchmarks import machine, models, serving_soak
from benchmarks.denoise_step import agreement, logits_of_two_steps
from benchmarks.sampling import SAME
from blockdiff import checkpoint
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.tokenizer import byte_level_bpe
from blockdiff.sampling import Engine, Request, Sampler
from blockdiff.sampling import Result as Answer
from blockdiff.terminal import quiet

CPU = torch.device("cpu")
COMPARED = 64
WARM = 4  # requests before anything is timed


@dataclass(frozen=True)
class Workload:
    """A checkpoint and requests for it; max_tokens: of each answer."""

    name: str
    model: str
    prompts: tuple[str, ...]
    max_tokens: int
    agreement: dict[str, float] | None  # of logits; None: only the answers are compared
    agrees: bool

    def body(self, number: int, **more: Any) -> dict[str, Any]:
        """Return the body of request number `number`."""
        said = dict(prompt=self.prompts[number % len(self.prompts)], seed=number, max_tokens=self.max_tokens)
        return {"model": self.model, **said, **more}


def quickstart(model: str, prompts: Path) -> Workload:
    """Return the puzzles of a file."""
    rows = tuple(json.loads(line)["prompt"] for line in prompts.read_text(encoding="utf-8").splitlines())
    return Workload("quickstart", model, rows, 17, None, True)


def random_15m(folder: Path) -> Workload:
    """Save a model of 15M random weights and a tokenizer of bytes in a folder; prompts have about 128 tokens."""
    pair = models.pair(models.Size("15m", "15m", 1, 64, (2, 4)), CPU)
    pair.ours.eval(), pair.peer.eval()
    draw, V, L = torch.Generator().manual_seed(1), pair.ours.vocab_size, pair.ours.canvas_length

    def drawn(seed: int) -> Any:
        draw.manual_seed(seed)
        return torch.randint(3, V, (2, 64), generator=draw), torch.randint(V, (2, L), generator=draw)

    chosen = models.with_wide_margins(pair.ours, drawn, lambda these: logits_of_two_steps(pair, *these))
    with torch.no_grad():
        errors = agreement(pair, *chosen)
    endless = Generation(max_steps=8, max_new_tokens=2 * L, eos_ids=(V + 1,), pad_id=0)
    checkpoint.save(pair.ours, folder, tokenizer=byte_level_bpe(["some text"], 300), generation=endless)
    prompts = tuple("".join(chr(97 + (7 * n * n + 3 * i * n + i) % 26) for i in range(128)) for n in range(200))
    found = {name: error for name, (error, _) in errors.errors.items()}
    return Workload("15m", str(folder), prompts, 2 * L, found, errors.is_met)


@dataclass(frozen=True)
class Running:
    """A server in a separate process."""

    address: str
    pid: int


@contextmanager
def served(words: Sequence[str], seconds: float = 120.0) -> Iterator[Running]:
    """Start a server by a command of Python, which prints its address; it ends with the block."""
    with tempfile.NamedTemporaryFile("w+") as said:
        process = subprocess.Popen([sys.executable, "-m", *words], stdout=said, stderr=said, env=os.environ.copy())
        try:
            end = time.monotonic() + seconds
            while not (address := re.search(r"http://127\.0\.0\.1:\d+", text := Path(said.name).read_text())):
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"{' '.join(words)} does not serve: {text[-2000:]}")
                time.sleep(0.1)
            yield Running(address[0], process.pid)
        finally:
            process.terminate()
            process.wait(60)


def our_server(model: str, rows: int, *more: str) -> Any:
    """Start `blockdiff serve` for a model."""
    return served(["blockdiff", "serve", model, "--port", "0", "--max-rows", str(rows), "--device", "cpu", *more])


def their_server(model: str) -> Any:
    """Start the thin server over transformers."""
    return served(["benchmarks.serving_peer", model])


def client_of(address: str) -> openai.AsyncOpenAI:
    """Return OpenAI's client, without retries."""
    return openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=600)


async def _all(address: str, work: Workload, clients: int, count: int, **more: Any) -> tuple[float, list[str]]:
    """Return the seconds that `clients` clients take for all requests, and the answers."""
    numbers, texts = iter(range(count)), [""] * count
    async with client_of(address) as client:

        async def one() -> None:
            for number in numbers:
                answer = await client.completions.create(**work.body(number, **more))
                texts[number] = answer.choices[0].text

        began = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(clients)))
        return time.perf_counter() - began, texts


async def _first_canvases(address: str, work: Workload, clients: int, count: int) -> list[float]:
    """Return the seconds to the first chunk of each request."""
    numbers, found = iter(range(count)), list[float]()
    async with client_of(address) as client:

        async def one() -> None:
            for number in numbers:
                began = time.perf_counter()
                stream = await client.completions.create(**work.body(number, stream=True))
                async for _ in stream:
                    found.append(time.perf_counter() - began)
                    break
                async for _ in stream:
                    pass

        await asyncio.gather(*(one() for _ in range(clients)))
    return found


def front(work: Workload, address: str, count: int) -> dict[str, Any]:
    """Return median milliseconds per request: by an engine here, over HTTP by a bare client, and by OpenAI's client."""
    sampler = Sampler.from_pretrained(work.model, device="cpu")
    engine = Engine(sampler.model, settings=sampler.settings, max_rows=1)
    bare, theirs = httpx.Client(base_url=address), openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    taken: dict[str, list[float]] = {"engine": [], "http": [], "openai": []}
    same = 0
    for number in range(WARM + count):
        body = work.body(number)
        request = Request(number, prompt=body["prompt"], seed=number, max_new_tokens=body["max_tokens"], max_steps=1)
        began = time.perf_counter()
        engine.submit(request)
        while engine.step():
            pass
        answer = next(event for event in engine.events() if isinstance(event, Answer))
        times = [time.perf_counter()]
        found = bare.post("/v1/completions", json={**body, "steps": 1}).json()
        times.append(time.perf_counter())
        theirs.completions.create(**body, extra_body={"steps": 1})
        times.append(time.perf_counter())
        same += found["choices"][0]["text"] == answer.text
        if number >= WARM:
            for name, start, end in zip(taken, [began, *times], times, strict=False):
                taken[name].append(1e3 * (end - start))
    cost = {name: [b - a for a, b in zip(taken["engine"], taken[name], strict=True)] for name in ("http", "openai")}
    return {
        "requests": count,
        "same": same / (WARM + count),
        "ms": {name: statistics.median(each) for name, each in taken.items()},
        "front_ms": {name: statistics.median(each) for name, each in cost.items()},
    }


def measure(work: Workload, clients: Sequence[int], count: int) -> dict[str, Any]:
    """Return all lines of a workload."""
    line: dict[str, Any] = {"workload": work.name, "agrees": work.agrees, "errors": work.agreement, "clients": {}}
    with our_server(work.model, max(clients)) as our, their_server(work.model) as their:
        both = ours, _ = our.address, their.address
        if work.agreement is None:
            compared = [
                asyncio.run(_all(each, work, 8, COMPARED, **more))[1]
                for each, more in zip(both, ({}, {"extra_body": {"compare": True}}), strict=True)
            ]
            line["same_as_transformers"] = sum(a == b for a, b in zip(*compared, strict=True)) / COMPARED
            line["agrees"] = line["same_as_transformers"] >= SAME
        line["front"] = front(work, ours, min(count, 200))
        for number in clients:
            asked = max(count, 2 * number) if number > 1 else max(8, count // 4)
            seconds = []
            for address in both:
                asyncio.run(_all(address, work, number, WARM))
                seconds.append(asyncio.run(_all(address, work, number, asked))[0])
            firsts = sorted(asyncio.run(_first_canvases(ours, work, number, asked)))
            line["clients"][number] = {
                "requests": asked,
                "per_second": {"ours": asked / seconds[0], "transformers": asked / seconds[1]},
                "speedup": seconds[1] / seconds[0] if line["agrees"] else None,
                "first_canvas_ms": {
                    "p50": 1e3 * firsts[len(firsts) // 2],
                    "p99": 1e3 * firsts[-1 - len(firsts) // 100],
                },
            }
    return line


def told(line: dict[str, Any]) -> str:
    """Return the lines of a workload as a Markdown table, below the cost of its front."""
    found, ms = line["front"], line["front"]["ms"]
    head = (
        f"{line['workload']}: {'agrees' if line['agrees'] else 'DISAGREES'} "
        f"({line['errors'] or line.get('same_as_transformers')}); the front costs {found['front_ms']['http']:.1f} ms a "
        f"request ({found['front_ms']['openai']:.1f} with OpenAI's client): engine {ms['engine']:.1f}, "
        f"HTTP {ms['http']:.1f}, OpenAI {ms['openai']:.1f} ms\n\n"
    )
    rows = [
        "| clients | requests | ours, a second | transformers | speed-up | first canvas p50, p99 (ms) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for number, each in line["clients"].items():
        speed = "-" if each["speedup"] is None else f"{each['speedup']:.1f}"
        a, b, first = each["per_second"]["ours"], each["per_second"]["transformers"], each["first_canvas_ms"]
        rows.append(
            f"| {number} | {each['requests']} | {a:.1f} | {b:.2f} | {speed} | {first['p50']:.0f}, {first['p99']:.0f} |"
        )
    return head + "\n".join(rows) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """Print the lines; return 1 if one disagrees, or if a soak finds a fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="runs/quickstart/model", help="of quickstart, and of the soak")
    parser.add_argument("--prompts", type=Path, default=Path("data/sudoku4/test.jsonl"), help="of quickstart")
    parser.add_argument("--sizes", default="quickstart,15m")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--requests", type=int, default=256, help="of each line with more than one client")
    parser.add_argument("--soak", type=int, metavar="N", help="ask N requests that come and go, instead")
    parser.add_argument("--dtype", choices=list(serving_soak.SAME), default="float32", help="of the soak")
    parser.add_argument("--output", type=Path, help="JSON to write, with what is printed beside it as .md")
    given = parser.parse_args(words)
    quiet()
    with tempfile.TemporaryDirectory() as folder:
        lines, texts = [], []
        made = {
            "quickstart": lambda: quickstart(given.model, given.prompts),
            "15m": lambda: random_15m(Path(folder)),
        }
        if given.soak is not None:
            lines.append(serving_soak.soak(quickstart(given.model, given.prompts), given.soak, given.dtype))
            texts.append(serving_soak.told(lines[-1]))
        else:
            for name in given.sizes.split(","):
                lines.append(measure(made[name](), [int(each) for each in given.clients.split(",")], given.requests))
                texts.append(told(lines[-1]))
    record: dict[str, Any] = {"machine": machine.describe(CPU), "lines": lines}
    text = "\n".join([machine.place(record["machine"]) + "\n", *texts])
    print(text)
    if given.output is not None:
        machine.write(given.output, record, text)
    return int(not all(line["agrees"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
