"""`POST /v1/completions`: raw texts, or tokens, to continue."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from blockdiff.sampling.request import Request
from blockdiff.serving.answering import ApiCall, Server, respond
from blockdiff.serving.answers import CompletionChoice, CompletionLogprobs
from blockdiff.serving.async_engine import Terms
from blockdiff.serving.bodies import read_body
from blockdiff.serving.chunks import ChunkFormat
from blockdiff.serving.deltas import AnswerStream, Delta
from blockdiff.serving.mapping import check_size, common_fields, seed_of
from blockdiff.serving.protocol import CompletionRequest
from blockdiff.serving.refusals import Refused

PATH = "/v1/completions"


def router(server: Server) -> APIRouter:
    """Return a router that serves `POST /v1/completions`."""
    routes = APIRouter()

    @routes.post(PATH)
    async def complete(http: HttpRequest) -> Response:
        body = await read_body(http, CompletionRequest)
        return await respond(server, http, api_call(body, server, server.terms(http, body)))

    return routes


@dataclass(frozen=True)
class CompletionFormat(ChunkFormat):
    """The form of completions: choices with a text each. echoes: each text begins with its prompt."""

    echoes: bool = False
    prefix: ClassVar = "cmpl-"
    object: ClassVar = "text_completion"
    chunk_object: ClassVar = "text_completion"

    def choice(self, stream: AnswerStream, delta: Delta) -> CompletionChoice:
        """Return a whole completion as a choice, from its last delta."""
        assert delta.result is not None
        return CompletionChoice(
            index=stream.index,
            text=self._echo(stream) + delta.result.text,
            finish_reason=delta.finish,
            steps=delta.result.steps,
            logprobs=_logprobs(stream, delta),
        )

    def delta(self, stream: AnswerStream, delta: Delta, is_first: bool) -> CompletionChoice | None:
        """Return a delta as a choice of a chunk; None if it has nothing new. The first one has the echo."""
        text = (self._echo(stream) if is_first else "") + delta.text
        if not text and delta.finish is None:
            return None
        steps = None if delta.result is None else delta.result.steps
        return CompletionChoice(
            index=stream.index,
            text=text,
            finish_reason=delta.finish,
            steps=steps,
            logprobs=_logprobs(stream, delta),
        )

    def _echo(self, stream: AnswerStream) -> str:
        prompt, tokenizer = stream.request.prompt, stream.settings.tokenizer
        if not self.echoes:
            return ""
        if prompt is None and tokenizer is not None:
            return str(tokenizer.decode(list(stream.request.tokens or ())))
        return prompt or ""


def api_call(body: CompletionRequest, server: Server, terms: Terms) -> ApiCall:
    """Map a body to its requests, `n` for each prompt.

    Raises RequestError for an empty list of prompts, for fields that exclude each other, and for more than a limit.
    """
    (_, settings), limits = server.engine.models[terms.adapter], server.limits
    prompt = body.prompt
    if isinstance(prompt, list) and not prompt:
        raise Refused("prompt: is an empty list; give a text, tokens, or a list of either", param="prompt")
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else [*prompt]
    check_size("n, for all prompts together", body.n * len(prompts), server.most_answers)
    fields = common_fields(body, settings, limits, body.max_tokens)
    fields |= dict(tools=(), scores=body.logprobs is not None, scores_prompt=body.echo and body.logprobs is not None)
    streams, id = [], uuid.uuid4().hex
    for prompt_index, each in enumerate(prompts):
        content = {"prompt": each} if isinstance(each, str) else {"tokens": each}
        for number in range(body.n):
            index = prompt_index * body.n + number
            request = Request(
                f"{id}-{index}", **content, **fields, seed=seed_of(body, index), top_logprobs=body.logprobs or 0
            )
            streams.append(AnswerStream(settings, request, index, None if request.form else body.max_tokens))
    return ApiCall(body, streams, CompletionFormat(body.echo), terms)


def _logprobs(stream: AnswerStream, delta: Delta) -> CompletionLogprobs | None:
    result = delta.result
    if result is None or result.logprobs is None or not stream.request.scores:
        return None
    tokens, logprobs = result.tokens, list[float | None](result.logprobs)
    top = list[list[tuple[int, float]] | None](result.top_logprobs or ())
    if (prompt := result.prompt_scores) is not None:
        best = [None, *prompt.top_logprobs] if prompt.top_logprobs else []
        # bos, which the server puts before a text, is not echoed
        start = int(stream.request.prompt is not None and prompt.tokens[:1] == [_bos(stream)])
        tokens, logprobs = prompt.tokens[start:] + tokens, [None, *prompt.logprobs][start:] + logprobs
        top = best[start:] + top
    ends = itertools.accumulate((len(stream.text_of(token)) for token in tokens), initial=0)
    return CompletionLogprobs(
        tokens=[stream.name_of(token) for token in tokens],
        token_logprobs=logprobs,
        top_logprobs=[None if each is None else _by_name(stream, each) for each in top] or None,
        text_offset=[*ends][:-1],
    )


def _bos(stream: AnswerStream) -> int | None:
    return getattr(stream.settings.tokenizer, "bos_token_id", None)


def _by_name(stream: AnswerStream, best: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Return log-probabilities by token name. If two tokens have one name, the less likely is `token_id:N` instead."""
    values: dict[str, float] = {}
    for token, value in best:
        name = stream.name_of(token)
        values[f"token_id:{token}" if name in values else name] = value
    return values
