"""A thin server over transformers' `generate`: one request at a time, as `transformers serve` answers them.

`transformers serve` itself takes checkpoints of this family only with the files of an image processor, which a model
of texts does not have. `python -m benchmarks.serving` starts this: `python -m benchmarks.serving_peer MODEL`.
"""

from __future__ import annotations

import argparse
import socket
from contextlib import nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from transformers import DiffusionGemmaForBlockDiffusion

from benchmarks.sampling_peer import Peer, addressed_draws
from blockdiff.checkpoint.generation import Generation
from blockdiff.checkpoint.tokenizer import load_tokenizer
from blockdiff.sampling.request import Request


def application(model: str) -> FastAPI:
    """Return the server. A request with `compare` gets the random numbers that we draw (to compare, not to time)."""
    tokenizer, generation = load_tokenizer(Path(model)), Generation.from_pretrained(model)
    theirs = DiffusionGemmaForBlockDiffusion.from_pretrained(model, dtype=torch.float32).eval()
    peer, turn, found = Peer(theirs, generation), Lock(), FastAPI()
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    length, vocab_size = theirs.config.canvas_length, theirs.config.get_text_config().vocab_size

    @found.get("/health")
    def health() -> dict[str, str]:
        return {"status": "alive"}

    @found.post("/v1/completions")
    def complete(body: dict[str, Any]) -> dict[str, Any]:
        tokens = bos + tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        request = Request(0, tokens=tokens, max_new_tokens=body.get("max_tokens"))
        with turn, addressed_draws([body["seed"]], length, vocab_size) if body.get("compare") else nullcontext():
            answer, _ = peer.answer([request], 1)[0]
        ends = [place for place, token in enumerate(answer) if token in generation.eos_ids]
        answer = answer[: ends[0]] if ends else answer[: body.get("max_tokens")]
        choice = {"index": 0, "text": tokenizer.decode(answer, skip_special_tokens=True), "finish_reason": "stop"}
        return {"id": "cmpl", "object": "text_completion", "created": 0, "model": model, "choices": [choice]}

    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_peer", description=__doc__.split("\n")[0])
    parser.add_argument("model")
    served = application(parser.parse_args().model)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(served, log_level="warning")).run(sockets=[listening])
