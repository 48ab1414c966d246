"""Counts for Prometheus, and the line of the log about each request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from blockdiff.sampling.engine import Engine, Load
from blockdiff.sampling.request import Result
from blockdiff.serving.async_engine import AsyncEngine

LOG = logging.getLogger("blockdiff.serving")
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SCRAPE_SECONDS = 2.0


class Metrics:
    """The Prometheus metrics of one server."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("blockdiff_requests", "Requests by outcome", ["outcome"], registry=registry)
        self.refused = Counter(
            "blockdiff_refused", "Requests without an answer by reason", ["reason"], registry=registry
        )
        self.seconds = Histogram(
            "blockdiff_request_seconds",
            "Seconds from a request to the end of its answer",
            buckets=SECONDS,
            registry=registry,
        )
        self.first_canvas = Histogram(
            "blockdiff_first_canvas_seconds",
            "Seconds from a request to its first canvas",
            buckets=SECONDS,
            registry=registry,
        )
        self.steps = Histogram("blockdiff_canvas_steps", "Denoising steps a canvas", buckets=STEPS, registry=registry)
        self.forwards = Counter("blockdiff_forwards", "Model calls, for each answer", ["kind"], registry=registry)
        self.drafted = Counter(
            "blockdiff_drafted_tokens", "Tokens of a drafter by place and fate", ["place", "fate"], registry=registry
        )
        self.canvases = Counter("blockdiff_canvases", "Committed canvases", registry=registry)
        self.tokens = Counter("blockdiff_tokens", "Tokens: prompt, cached, completion", ["kind"], registry=registry)
        self.waiting = Gauge("blockdiff_waiting_requests", "Requests that wait for a row", registry=registry)
        self.unanswered = Gauge("blockdiff_unanswered_requests", "Requests that wait or run", registry=registry)
        self.rows = Gauge("blockdiff_rows", "Rows that are denoised", registry=registry)
        self.pages = Gauge("blockdiff_pages", "Pages: used, shared, cached", ["layers", "state"], registry=registry)

    async def text(self, engine: AsyncEngine) -> bytes:
        """Return all metrics in Prometheus's text form.

        If the engine does not answer within SCRAPE_SECONDS, its gauges keep their last values.
        """
        self.unanswered.set(engine.unanswered)
        if engine.thread.is_working:
            try:
                async with asyncio.timeout(SCRAPE_SECONDS):
                    self._set([await engine.thread.call(_load, name) for name in engine.models])
            except TimeoutError:
                LOG.warning("the engine does not answer; /metrics shows its last counts")
        return generate_latest(self.registry)

    def _set(self, loads: list[Load]) -> None:
        self.waiting.set(sum(load.waiting for load in loads))
        self.rows.set(sum(load.rows for load in loads))
        for state in ("pages", "shared", "cached"):
            counts = [getattr(load, state) for load in loads]
            for layers in counts[0]:
                self.pages.labels(layers, "used" if state == "pages" else state).set(
                    sum(each[layers] for each in counts)
                )

    def answered(self, result: Result) -> None:
        """Count the tokens, canvases, steps and model calls of an answer."""
        self.tokens.labels("completion").inc(len(result.tokens))
        self.canvases.inc(len(result.steps))
        for steps in result.steps:
            self.steps.observe(steps)
        for kind, calls in result.forwards.by_kind.items():
            self.forwards.labels(kind).inc(calls)
        for position, (drafted, stood) in enumerate(result.places, 1):
            self.drafted.labels(position, "accepted").inc(stood)
            self.drafted.labels(position, "rejected").inc(drafted - stood)


def _load(engine: Engine) -> Load:
    return engine.load


@dataclass
class CallMetrics:
    """The costs of an HTTP request so far. `close` counts the request and logs its line, if it was one to the model.

    began: arrival by `time.monotonic`; first: seconds from it to the first canvas; outcome: how the request ended
    (None: it asked the model nothing); reason: the code of its error, if it had one.
    """

    metrics: Metrics
    path: str
    id: str
    began: float = field(default_factory=time.monotonic)
    first: float | None = None
    results: list[Result] = field(default_factory=list)
    answers: int = 1  # to each prompt
    outcome: str | None = None
    reason: str | None = None

    def canvas(self) -> None:
        """Record that a canvas was committed; the first one gives the time to the first canvas."""
        if self.first is None:
            self.first = time.monotonic() - self.began
            self.metrics.first_canvas.observe(self.first)

    def failed(self, status: int, body: Mapping[str, Any]) -> None:
        """Record that the request ended with an error, with this status and body."""
        self.reason = body["error"]["code"]
        self.outcome = "full" if status == 429 else "error" if status >= 500 else "refused"

    def close(self) -> None:
        """Count the request and log its line; nothing if `outcome` is None."""
        if self.outcome is None:
            return
        seconds, results = time.monotonic() - self.began, self.results
        self.metrics.requests.labels(self.outcome).inc()
        if self.reason is not None:
            self.metrics.refused.labels(self.reason).inc()
            LOG.info("%s %s %s: %s, %.3f s", self.id, self.path, self.outcome, self.reason, seconds)
            return
        self.metrics.seconds.observe(seconds)
        for result in results:
            self.metrics.answered(result)
        of_prompts = results[:: self.answers]
        prompt, cached = sum(each.prompt_tokens for each in of_prompts), sum(each.cached_tokens for each in of_prompts)
        self.metrics.tokens.labels("prompt").inc(prompt)
        self.metrics.tokens.labels("cached").inc(cached)
        tokens, forwards = sum(len(each.tokens) for each in results), sum(each.forwards.total for each in results)
        canvases = sum(len(each.steps) for each in results)
        LOG.info(
            "%s %s %s: prompt %d tokens (%d cached), answered %d tokens in %d canvases and %d forwards, %.3f s",
            *(self.id, self.path, self.outcome, prompt, cached, tokens, canvases, forwards, seconds),
        )
