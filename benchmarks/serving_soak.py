"""A soak of the server over HTTP with good, cancelled and bad requests (`python -m benchmarks.serving --soak N`).

Most requests wait for their answer, whole or as a stream. Some clients leave before it or after its first step, and
some send bodies that no server should accept. Every answer is compared with the answer to the same request sent again
to the idle server: in fp64 they must be equal, in fp32 near-ties may flip. At the end nothing may run, wait or hold a
page. The server's memory (RSS) may have grown by at most a tenth since a fifth of the requests were done; every kind of
bad body is sent before that, so that the memory for the largest of them does not count as growth. If the model refuses
the form of the requests, the soak ends.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from benchmarks.serving import Workload

CLIENTS = 32
DIFFERENT = 400  # requests; each is sent several times, with different others
SAME = {"float64": 1.0, "float32": 0.99}  # the share of answers that must be equal; near-ties may flip others
GROWTH = 1.10
FORM = "[1-4]{1,16}"  # one token is enough, so it fits canvases of any length
ENDS = ("whole", "whole", "whole", "whole", "stream", "stream", "left", "left under way", "bad")
BAD: Sequence[dict[str, Any]] = (
    {"content": b"{"},
    {"content": b"\xff\xfe"},
    {"json": []},
    {"json": {"prompt": "1", "surprise": 1}},
    {"json": {"prompt": {"a": 1}}},
    {"json": {"prompt": "1", "model": "another"}},
    {"json": {"prompt": "1", "n": 10_000}},
    {"json": {"prompt": "1", "regex": "("}},
    {"json": {"prompt": "1", "temperature": -1}},
    {"json": {"prompt": "1", "seed": "x"}},
    # harmful requests: very many items, very long texts, halves of characters, overflowing numbers
    {"json": {"prompt": [{}] * 20_000}},
    {"json": {"prompt": "1", "stop": ["a"] * 20_000}},
    {"json": {"prompt": "1", "strategy": "a" * 100_000}},
    {"json": {"prompt": "1" * 2_000_000}},
    {"json": {"prompt": "1", "regex": "[ab]*a[ab]{500}"}},
    {"json": {f"key{number}": 1 for number in range(20_000)}},
    {"content": rb'{"prompt": "1", "stop": ["\ud800"]}', "headers": {"content-type": "application/json"}},
    {"json": {"prompt": "1", "strategy": "entropy_bound:stability=99999999999999999999"}},
    {"json": {"prompt": "1", "repetition_penalty": 1e-300}},
)


def soak(work: Workload, count: int, dtype: str) -> dict[str, Any]:
    """Return the record of a soak; `agrees`: nothing was lost, mixed up or leaked."""
    from benchmarks.serving import our_server

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text("max_waiting: 1000\n", encoding="utf-8")
        with our_server(work.model, CLIENTS // 2, "--config", str(config), "--dtype", dtype) as running:
            found = asyncio.run(_asked(work, running.address, running.pid, count))
    answers, alone = found.pop("answers"), found.pop("alone")
    same = sum(text == alone[number] for number, text in answers)
    line = {
        "workload": work.name,
        "requests": count,
        "dtype": dtype,
        **found,
        "compared": len(answers),
        "same": same,
    }
    line["seconds"] = time.perf_counter() - began
    first, last = line["rss_mib"]
    line["agrees"] = (
        not line["faults"]
        and same >= SAME[dtype] * len(answers)
        and not any(line["left"].values())
        and last <= GROWTH * first
    )
    return line


def told(line: dict[str, Any]) -> str:
    """Return the record in words."""
    first, last = line["rss_mib"]
    return (
        f"soak of {line['requests']} requests in {line['dtype']}: "
        f"{'passes' if line['agrees'] else 'FAILS'}; {line['ends']}; {line['same']} of {line['compared']} answers "
        f"equal those alone; faults: {line['faults'] or 'none'}; left at the end: {line['left']}; RSS {first:.0f} MiB "
        f"after a fifth, {last:.0f} at the end; {line['seconds']:.0f} s\n"
    )


def _body(work: Workload, number: int) -> dict[str, Any]:
    """Return the body of request number `number`."""
    chance = random.Random(number)
    more: dict[str, Any] = {"max_tokens": chance.choice((1, 8, 17, 34))}
    if chance.random() < 0.3:
        more["steps"] = chance.choice((1, 4, 16))
    if chance.random() < 0.2:
        more["regex"] = FORM
    return work.body(number, **more)


async def _asked(work: Workload, address: str, pid: int, count: int) -> dict[str, Any]:
    """Send all requests; return answers and faults, what the server holds afterwards, and its memory."""
    chance, ends, faults, answers = random.Random(0), Counter[str](), Counter[str](), list[tuple[int, str]]()
    numbers, memory = iter(range(count)), list[float]()
    async with httpx.AsyncClient(base_url=address, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        for number in range(8):
            answer = await client.post("/v1/completions", json=_body(work, number) | {"regex": FORM})
            if answer.status_code == 400:
                raise SystemExit(f"{work.model} cannot be soaked: {answer.json()['error']['message']}")
        # first the largest bodies, so that their memory does not count as growth
        await asyncio.gather(*(client.post("/v1/completions", **bad) for bad in BAD for _ in range(2)))

        async def one() -> None:
            for place in numbers:
                number, end = chance.randrange(DIFFERENT), chance.choice(ENDS)
                ends[end] += 1
                if place == count // 5:
                    memory.append(_rss(pid))
                try:
                    if end == "bad":
                        answer = await client.post("/v1/completions", **chance.choice(BAD))
                        if not 400 <= answer.status_code < 500 or "error" not in answer.json():
                            faults[f"{answer.status_code} to a bad body"] += 1
                        continue
                    text = await _ended(client, _body(work, number), end, chance.random() / 5)
                except Exception as error:  # any error is a fault of the server
                    faults[f"{end}: {type(error).__name__}: {error}"[:120]] += 1
                    continue
                if text is not None:
                    answers.append((number, text))

        await asyncio.gather(*(one() for _ in range(CLIENTS)))
        await asyncio.sleep(2)
        said = (await client.get("/metrics")).text
        memory.append(_rss(pid))
        alone = {
            number: await _ended(client, _body(work, number), "whole", 0) for number in {each[0] for each in answers}
        }
    left = {name: float(value) for name, value in re.findall(r"^(blockdiff_(?:rows|unanswered\w*)) (\S+)$", said, re.M)}
    left |= {
        f"pages of {layers}": float(value)
        for layers, value in re.findall(r'^blockdiff_pages\{layers="(.*?)",state="used"\} (\S+)$', said, re.M)
    }
    record = {"ends": dict(ends), "faults": dict(faults), "left": left, "rss_mib": memory}
    return record | {"answers": answers, "alone": alone}


async def _ended(client: httpx.AsyncClient, body: dict[str, Any], end: str, seconds: float) -> str | None:
    """Return the text of a request that is read to its end; None if the client leaves earlier."""
    if end == "left":
        try:
            async with asyncio.timeout(seconds):
                await client.post("/v1/completions", json=body)
        except TimeoutError:
            pass
        return None
    if end == "whole":
        answer = await client.post("/v1/completions", json=body)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])
    is_left, text, is_ended = end == "left under way", "", False
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True, "stream_frames": is_left}) as got:
        got.raise_for_status()
        async for line in got.aiter_lines():
            if is_left and line:
                return None
            if line == "data: [DONE]":
                is_ended = True
            elif line.startswith("data: "):
                text += "".join(choice["text"] for choice in httpx.Response(200, text=line[6:]).json()["choices"])
    if not is_ended:
        raise RuntimeError("a stream ended without its last event")
    return text


def _rss(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
