"""Mapping of the fields that chats and completions share to fields of `Request`, within the limits of a server."""

from __future__ import annotations

import json
from typing import Any

from blockdiff.errors import RequestError
from blockdiff.request_options import SERVED
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.sampling.strategies import adjusted, as_strategy
from blockdiff.sampling.strategy import Strategy
from blockdiff.seeding import child_seed
from blockdiff.serving.limits import Limits
from blockdiff.serving.protocol import GenerationBody, SampledBody

FILTERS = {"top_k": (0, -1), "top_p": (1,), "min_p": (0,)}  # filters of a step's draws, and the values without effect


def common_fields(
    body: GenerationBody, settings: SamplingSettings, limits: Limits, max_tokens: int | None
) -> dict[str, Any]:
    """Return the fields of `Request` that are equal for all answers to a body.

    max_tokens: as requested (None: the settings decide, up to the limit). Raises RequestError for more than a limit,
    and if both `n` and `best_of` are above 1.
    """
    check_size("best_of", body.best_of, limits.most_answers)
    check_size("steps", body.steps or 1, limits.steps)
    if max_tokens is not None and limits.max_tokens is not None:
        check_size("max_tokens", max_tokens, limits.max_tokens)
    options = {name: getattr(body, served) for name, served in SERVED.items()}
    for name, value in options.items():
        check_size(f"the characters of {name}", _characters(value), limits.form_characters)
    if body.n > 1 and body.best_of > 1:
        raise RequestError("n and best_of: best_of draws several answers and gives one of them; give one of the two")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()} | dict(
        stop=body.stops,
        max_new_tokens=max_tokens or (limits.max_tokens and min(limits.max_tokens, settings.generation.max_new_tokens)),
        strategy=strategy_of(body, settings),
    )


def strategy_of(body: SampledBody, settings: SamplingSettings) -> Strategy | None:
    """Return the strategy of a body; None for the server's strategy, unchanged.

    With temperature 0 nothing is drawn, and `seed_of` makes the noise repeatable. Temperature 0 leaves a strategy
    without temperature as it is.
    """
    strategy = None if body.strategy is None else as_strategy(body.strategy, settings.generation)
    has_temperature = hasattr(strategy or settings.strategy, "adjusted")
    temperature = body.temperature if body.temperature or has_temperature else None
    filters = {name: getattr(body, name) for name, off in FILTERS.items() if getattr(body, name) not in (None, *off)}
    if temperature is None and not filters:
        return strategy
    return adjusted(strategy or settings.strategy, temperature, **filters)


def seed_of(body: SampledBody, number: int) -> int | None:
    """Return the seed of answer `number`: the first has the body's seed, the others have seeds derived from it.

    Without a seed it is 0 at temperature 0, else None: the engine chooses one.
    """
    seed = 0 if body.seed is None and body.temperature == 0 else body.seed
    return seed if seed is None or number == 0 else child_seed(seed, number)


def check_size(name: str, value: int, most: int) -> None:
    """Raise RequestError, which calls the value `name`, if `value` is more than `most`."""
    if value > most:
        raise RequestError(f"{name}: {value} is more than the {most} that this server takes; ask for less")


def _characters(value: Any) -> int:
    if not isinstance(value, str | list | dict):
        return 0
    return len(value if isinstance(value, str) else json.dumps(value))
