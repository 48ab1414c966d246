"""`python -m benchmarks.replica_kills`: a replica on Ray Serve is killed under load: what becomes of the requests?

Two replicas of a tiny random model answer OpenAI's client, which never asks twice. Half of the requests stream. Once
streams of both replicas have begun, one replica is killed, and the command exits with 1 where a request is lost: it
ended without an answer, and it had not begun to stream or was not told. Then Ray has to bring the second one back.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import ray
import torch
from ray import serve

from benchmarks import machine
from blockdiff import checkpoint
from blockdiff.checkpoint.generation import Generation
from blockdiff.data.template import packaged_template
from blockdiff.data.tokenizer import byte_level_bpe
from blockdiff.serving.ray import Front, Replica, Settings

MIB = 2**20
APP = "blockdiff"
LOST = ("lost before it began", "ended without a word")


def main(words: list[str] | None = None) -> int:
    """Start replicas, send requests, kill one, and count; return 1 if a request is lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replica_kills", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--port", type=int, default=8099)
    given = parser.parse_args(words)
    ray.init(num_cpus=2, object_store_memory=128 * MIB, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            _save_model(Path(folder))
            settings = Settings.model_validate({"model": folder, "name": APP, "max_rows": 16})
            light = {"num_cpus": 0.1}
            front: Any = Front  # Ray's decorators make deployments of classes
            replica: Any = Replica
            replicas = replica.options(num_replicas=2, ray_actor_options=light).bind(settings)
            serve.start(http_options={"host": "127.0.0.1", "port": given.port})
            serve.run(front.options(ray_actor_options=light).bind(settings, replicas), name=APP)
            outcomes, seconds = asyncio.run(_under_load(given.port, given.requests, given.tokens))
    finally:
        serve.shutdown()
        ray.shutdown()
    print(machine.place(machine.describe(torch.device("cpu"))))
    print(
        f"ray {ray.__version__}; {given.requests} requests, one of two replicas killed: {dict(outcomes)}; "
        f"both run again after {seconds:.1f} s"
    )
    return int(any(outcomes[name] for name in LOST) or not outcomes["told"])


def _save_model(folder: Path) -> None:
    tokenizer = byte_level_bpe(["hello there"], 300)
    tokenizer.chat_template = packaged_template()
    model = checkpoint.init("tiny", tokenizer=tokenizer, device="cpu")
    endless = Generation(eos_ids=(model.vocab_size + 1,), max_steps=16)  # only the requested length ends an answer
    checkpoint.save(model, folder, tokenizer=tokenizer, generation=endless)


async def _under_load(port: int, count: int, tokens: int) -> tuple[Counter[str], float]:
    """Return the endings of the requests, counted, and the seconds until there were two replicas again."""
    client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300)
    begun = asyncio.Semaphore(0)
    asked = [asyncio.create_task(_ask(client, number, tokens, begun)) for number in range(count)]
    for _ in range(count // 4):
        await begun.acquire()
    victim = _replicas()[0]
    ray.kill(ray.get_actor(victim, namespace="serve"))
    began = time.monotonic()
    outcomes = Counter(await asyncio.gather(*asked))
    while len(names := _replicas()) < 2 or victim in names or not _is_running():
        await asyncio.sleep(0.1)
    return outcomes, time.monotonic() - began


async def _ask(client: openai.AsyncOpenAI, number: int, tokens: int, begun: asyncio.Semaphore) -> str:
    """Send one request and return how it ended."""
    said = dict(model="blockdiff", messages=[{"role": "user", "content": f"{number}"}], seed=number, max_tokens=tokens)
    chunks, finish = 0, None
    try:
        if number % 2:
            answer = await client.chat.completions.create(**said)  # type: ignore[call-overload]
            return "whole" if answer.choices[0].finish_reason else "lost before it began"
        async for chunk in await client.chat.completions.create(stream=True, **said):  # type: ignore[call-overload]
            begun.release() if not chunks else None
            chunks += 1
            finish = chunk.choices[0].finish_reason or finish
    except openai.APIError:
        return "told" if chunks else "lost before it began"
    return "whole stream" if finish else "ended without a word"


def _replicas() -> list[str]:
    names = (each["name"] for each in ray.util.list_named_actors(all_namespaces=True))
    return sorted(name for name in names if name.startswith(f"SERVE_REPLICA::{APP}#Replica#"))


def _is_running() -> bool:
    return serve.status().applications[APP].deployments["Replica"].replica_states == {"RUNNING": 2}


if __name__ == "__main__":
    sys.exit(main())
