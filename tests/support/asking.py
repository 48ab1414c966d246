"""Servers in this process, asked by OpenAI's client: of a random model, or of one that answers what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import torch

from blockdiff.checkpoint.generation import Generation
from blockdiff.data.template import packaged_template
from blockdiff.data.tokenizer import byte_level_bpe
from blockdiff.sampling import Sampler
from blockdiff.serving import AsyncEngine, app
from tests.support.scripted import ScriptedModel, ScriptedPages

EOS = 1


class Asking:
    """A server and ways to ask it: `openai`, its current client, and `http`, for what that would not send."""

    def __init__(self, asgi: Any, key: str = "none"):
        transport = httpx.ASGITransport(asgi, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000")
        self.openai = openai.AsyncOpenAI(
            api_key=key, base_url="http://127.0.0.1:8000/v1", http_client=self.http, max_retries=0
        )
        self.server = asgi.state.server

    async def refusal(self, path: str = "/v1/chat/completions", **body: Any) -> tuple[int, dict[str, Any]]:
        """The status and the error of a body that is refused."""
        found = await self.http.post(path, json=body)
        return found.status_code, found.json()["error"]


def served(
    model: Sampler | AsyncEngine, use: Callable[[Asking], Awaitable[Any]], key: str = "none", **options: Any
) -> Any:
    """The outcome of `use`, asking a server of a model in this process."""

    async def run() -> Any:
        asgi = app(model, **options)
        async with asgi.router.lifespan_context(asgi):
            return await asyncio.wait_for(use(Asking(asgi, key)), 120)

    return asyncio.run(run())


def chat_tokenizer() -> Any:
    """Bytes, and the tokens and the chat template of the Gemma 4 turn format."""
    tokenizer = byte_level_bpe(["hello there"], 300)
    tokenizer.chat_template = packaged_template()
    return tokenizer


def answering(text: str, canvas_length: int = 16, canvases: int = 8) -> AsyncEngine:
    """An engine whose model answers a text, in which control tokens count, to whatever it is asked."""
    tokenizer = chat_tokenizer()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    tokens += [EOS] * (canvas_length * canvases - len(tokens))
    size = len(tokenizer)

    def script(last: int, canvas: int, step: int) -> torch.Tensor:
        wanted = torch.tensor(tokens[canvas * canvas_length :][:canvas_length])
        return 30.0 * torch.nn.functional.one_hot(wanted, size).float()

    model = ScriptedModel(script, canvas_length, size)
    generation = Generation(max_steps=3, max_new_tokens=canvas_length * canvases, eos_ids=(EOS,))
    return AsyncEngine(Sampler(model, tokenizer, generation), pages=ScriptedPages(model))
