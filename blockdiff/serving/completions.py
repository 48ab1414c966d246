"""`POST /v1/completions`: raw texts, or tokens, to continue."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool

from blockdiff.sampling.request import Request
from blockdiff.serving.answering import ApiCall, Server, respond
from blockdiff.serving.answers import CompletionChoice, CompletionLogprobs
from blockdiff.serving.bodies import read_body
from blockdiff.serving.deltas import AnswerStream, Delta
from blockdiff.serving.mapping import FORMS, check_size, common_fields, seed_of
from blockdiff.serving.protocol import CompletionRequest
from blockdiff.serving.refusals import Refused

PATH = "/v1/completions"


def router(server: Server) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post(PATH)
    async def complete(http: HttpRequest) -> Response:
        body = await read_body(http, CompletionRequest)
        server.check_model(body.model)
        return await respond(server, http, await run_in_threadpool(api_call, body, server))

    return routes


class CompletionFormat:
    """The form of completions."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def choice(self, stream: AnswerStream, delta: Delta) -> CompletionChoice:
        """A whole completion."""
        assert delta.result is not None
        return CompletionChoice(
            index=stream.index,
            text=delta.result.text,
            finish_reason=delta.finish,
            steps=delta.result.steps,
            logprobs=_logprobs(stream, delta),
        )

    def delta(self, stream: AnswerStream, delta: Delta, is_first: bool) -> CompletionChoice | None:
        """The delta of a completion, where it says something."""
        if not delta.text and delta.finish is None:
            return None
        steps = None if delta.result is None else delta.result.steps
        return CompletionChoice(
            index=stream.index,
            text=delta.text,
            finish_reason=delta.finish,
            steps=steps,
            logprobs=_logprobs(stream, delta),
        )


def api_call(body: CompletionRequest, server: Server) -> ApiCall:
    """The requests of a body: `n` for each prompt."""
    settings, limits = server.engine.settings, server.limits
    prompt = body.prompt
    if isinstance(prompt, list) and not prompt:
        raise Refused("prompt: is an empty list; give a text, tokens, or a list of either", param="prompt")
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else [*prompt]
    check_size("n, for all prompts together", body.n * len(prompts), limits.answers)
    fields = common_fields(body, settings, limits, body.max_tokens)
    fields["scores"] = body.logprobs is not None
    has_form = any(getattr(body, name) is not None for name in FORMS)
    streams, id = [], uuid.uuid4().hex
    for place, each in enumerate(prompts):
        given = {"prompt": each} if isinstance(each, str) else {"tokens": each}
        for number in range(body.n):
            index = place * body.n + number
            request = Request(
                f"{id}-{index}", **given, **fields, seed=seed_of(body, index), top_logprobs=body.logprobs or 0
            )
            streams.append(AnswerStream(settings, request, index, None if has_form else body.max_tokens))
    return ApiCall(body, streams, CompletionFormat(), PATH)


def _logprobs(stream: AnswerStream, delta: Delta) -> CompletionLogprobs | None:
    result = delta.result
    if result is None or result.logprobs is None or not stream.request.scores:
        return None
    ends = itertools.accumulate((len(stream.text_of(token)) for token in result.tokens), initial=0)
    return CompletionLogprobs(
        tokens=[stream.name_of(token) for token in result.tokens],
        token_logprobs=result.logprobs,
        top_logprobs=[_by_name(stream, each) for each in result.top_logprobs or ()] or None,
        text_offset=[*ends][:-1],
    )


def _by_name(stream: AnswerStream, best: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Log-probabilities by the names of tokens; of two with one name the less likely is called by its id."""
    found: dict[str, float] = {}
    for token, value in best:
        name = stream.name_of(token)
        found[f"token_id:{token}" if name in found else name] = value
    return found
