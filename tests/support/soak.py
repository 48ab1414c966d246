"""A soak of the engine: random requests that come, go and are cancelled, in too little memory, against the oracle."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blockdiff.checkpoint.generation import Generation
from blockdiff.models.model import BlockDiffusionModel
from blockdiff.sampling.engine import Engine
from blockdiff.sampling.prepare import prepare_sequences, sampling_settings
from blockdiff.sampling.request import Request, Result
from tests.oracles.lockstep import generate_in_lockstep

STRATEGIES = (None, None, "quota", "confident:threshold=0.1", "entropy_bound:top_k=20")
HEADS = 3  # beginnings that prompts share


@dataclass(frozen=True)
class Soak:
    """The outcome of a soak. wrong: ids whose answers differ from the oracle's; leaked: pages in use at the end."""

    requests: int
    answered: int
    cancelled: int
    wrong: list[str | int]
    leaked: int
    preemptions: int
    reused_tokens: int
    forwards: int
    needed: int
    seconds: float


def soak(model: BlockDiffusionModel, count: int, seed: int = 0, **options: Any) -> Soak:
    """Ask an engine for random requests that come and go at random, and compare what it answers.

    options: of the engine, beside its rows, pages and capacity, which are small here.
    """
    chance, started = random.Random(seed), time.perf_counter()
    L, vocabulary = model.canvas_length, model.vocab_size
    few = Generation(
        max_steps=5, max_new_tokens=3 * L, stability=0, confidence=0.8, entropy_bound=1.0, eos_ids=tuple(range(1, 8))
    )
    settings = sampling_settings(model, None, few)
    options = {"max_rows": 6, "page_tokens": 8, "chunk_tokens": 24, "capacity": 28 * L, **options}
    engine = Engine(model, settings=settings, max_waiting=40, **options)
    heads = [[chance.randrange(10, vocabulary) for _ in range(chance.randrange(8, 60))] for _ in range(HEADS)]
    requests = {id: _request(id, chance, heads, vocabulary, L) for id in range(count)}
    waiting, asked_for, results = list(requests.values()), list[str | int](), dict[str | int, Result]()
    while waiting or engine.unfinished:
        while waiting and engine.unfinished < 12 and chance.random() < 0.7:
            asked_for.append(engine.submit(waiting.pop(), watch=chance.random() < 0.2))
        if chance.random() < 0.03 and engine.unfinished:
            engine.cancel(chance.choice([id for id in asked_for if id not in results]))
        engine.step()
        results |= {event.id: event for event in engine.events() if isinstance(event, Result)}
    engine.pages.check()
    cancelled = {id for id, result in results.items() if result.finish_reason == "cancelled"}
    wrong, needed = list[str | int](), 0
    for id, request in requests.items():
        if request.best_of == 1 and id not in cancelled:
            asked = prepare_sequences(request, settings)
            generate_in_lockstep(model, settings, asked)
            answer = results[id]
            needed += sum(answer.steps)
            is_equal = (answer.tokens, answer.steps) == (asked[0].tokens, asked[0].steps) and answer.error is None
            is_scored = answer.logprobs is not None and len(answer.logprobs) == len(answer.tokens)
            if not is_equal or is_scored != request.scores:
                wrong.append(id)
    return Soak(
        count,
        len(results) - len(cancelled),
        len(cancelled),
        wrong,
        sum(engine.pages.statistics.pages.values()),
        engine._scheduler.preemptions,
        engine.pages.statistics.reused_tokens,
        engine.denoised_canvases,
        needed,
        time.perf_counter() - started,
    )


def _request(
    id: int, chance: random.Random, heads: Sequence[Sequence[int]], vocabulary: int, canvas_length: int
) -> Request:
    """A request of a random prompt, length and options."""
    own_strategy = chance.choice(STRATEGIES)  # none of those that filter can be with what holds the response
    is_held = own_strategy is None and chance.random() < 0.2
    own = [chance.randrange(10, vocabulary) for _ in range(chance.randrange(1, 50))]
    return Request(
        id,
        tokens=[*(chance.choice(heads) if chance.random() < 0.6 else []), *own],
        seed=chance.randrange(2**63) if chance.random() < 0.5 else None,
        max_new_tokens=chance.choice([None, 1, canvas_length, 2 * canvas_length, 4 * canvas_length]),
        max_steps=chance.choice([None, 1, 2, 4]),
        strategy=own_strategy,
        banned=tuple(chance.sample(range(10, vocabulary), 3)) if is_held else (),
        repetition_penalty=1.2 if is_held else 1.0,
        scores=chance.random() < 0.1,
        best_of=2 if chance.random() < 0.03 else 1,
    )
