"""`POST /v1/completions`: raw texts, or tokens, to continue."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool

from blockdiff.sampling.request import Request
from blockdiff.serving.answering import Job, Server, respond
from blockdiff.serving.answers import CompletionChoice, CompletionLogprobs
from blockdiff.serving.bodies import read_body
from blockdiff.serving.mapping import FORMS, check_size, common_fields, seed_of
from blockdiff.serving.protocol import CompletionRequest
from blockdiff.serving.reading import News, Reader

PATH = "/v1/completions"


def router(server: Server) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.post(PATH)
    async def complete(http: HttpRequest) -> Response:
        body = await read_body(http, CompletionRequest)
        server.check_model(body.model)
        return await respond(server, http, await run_in_threadpool(job_of, body, server))

    return routes


class Completions:
    """The writing of completions."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def choice(self, reader: Reader, news: News) -> CompletionChoice:
        """A whole completion."""
        assert news.result is not None
        return CompletionChoice(
            index=reader.index,
            text=news.result.text,
            finish_reason=news.finish,
            steps=news.result.steps,
            logprobs=_logprobs(reader, news),
        )

    def delta(self, reader: Reader, news: News, is_first: bool) -> CompletionChoice | None:
        """The news of a completion."""
        if not news.text and news.finish is None:
            return None
        steps = None if news.result is None else news.result.steps
        return CompletionChoice(
            index=reader.index, text=news.text, finish_reason=news.finish, steps=steps, logprobs=_logprobs(reader, news)
        )


def job_of(body: CompletionRequest, server: Server) -> Job:
    """The requests of a body: `n` for each prompt."""
    settings, limits = server.engine.settings, server.limits
    prompt = body.prompt
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else [*prompt]
    check_size("n, for all prompts together", body.n * len(prompts), limits.answers)
    fields = common_fields(body, settings, limits, body.max_tokens)
    fields["scores"] = body.logprobs is not None
    has_form = any(getattr(body, name) is not None for name in FORMS)
    readers, id = [], uuid.uuid4().hex
    for place, each in enumerate(prompts):
        given = {"prompt": each} if isinstance(each, str) else {"tokens": each}
        for number in range(body.n):
            index = place * body.n + number
            request = Request(
                f"{id}-{index}", **given, **fields, seed=seed_of(body, index), top_logprobs=body.logprobs or 0
            )
            readers.append(Reader(settings, request, index, None if has_form else body.max_tokens))
    return Job(body, readers, Completions(), PATH)


def _logprobs(reader: Reader, news: News) -> CompletionLogprobs | None:
    result = news.result
    if result is None or result.logprobs is None or not reader.request.scores:
        return None
    texts = [reader.text_of(token) for token in result.tokens]
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    top = [{reader.text_of(token): value for token, value in each} for each in result.top_logprobs or ()]
    return CompletionLogprobs(
        tokens=texts, token_logprobs=result.logprobs, top_logprobs=top or None, text_offset=offsets[: len(texts)]
    )
