"""A strategy with another temperature or another top-p: the two numbers that every client of a language model sends."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from blockdiff.errors import RequestError
from blockdiff.sampling.strategies.composed import Rules
from blockdiff.sampling.strategies.next_token import NextToken
from blockdiff.sampling.strategies.temperature import (
    ConstantTemperature,
    CosineTemperature,
    LinearTemperature,
    Temperature,
)
from blockdiff.sampling.strategies.verified import Verified
from blockdiff.sampling.strategy import Strategy


def adjusted(strategy: Strategy, temperature: float | None = None, top_p: float | None = None) -> Strategy:
    """The strategy with this temperature and this top-p; None leaves what it has.

    In next-token sampling, and in that of verified canvases, both mean what they mean in transformers. Where canvases
    are denoised, `temperature` is that of the first step, and those of later steps keep their ratio to it; 0 leaves the
    temperatures as they are, for the canvas that is committed has the likeliest tokens at any temperature. `top_p`
    filters what every step draws from.
    Raises RequestError for values that cannot be, and for a strategy that has neither.
    """
    changes: dict[str, Any] = {} if top_p is None else {"top_p": top_p}
    if temperature is None and not changes:
        return strategy
    if isinstance(strategy, Verified):
        head = adjusted(strategy.head, temperature, top_p)
        assert isinstance(head, NextToken)
        return replace(strategy, head=head)
    try:
        if isinstance(strategy, NextToken):
            return replace(
                strategy, **changes, temperature=strategy.temperature if temperature is None else temperature
            )
        if isinstance(strategy, Rules):
            if temperature is not None:
                changes["temperature"] = _beginning_at(strategy.temperature, temperature)
            return replace(strategy, **changes)
    except ValueError as error:
        raise RequestError(str(error)) from None
    raise RequestError(f"strategy {type(strategy).__name__} has no temperature and no top_p that could be set")


def _beginning_at(falling: Temperature, temperature: float) -> Temperature:
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if temperature == 0:
        return falling
    if isinstance(falling, ConstantTemperature):
        return ConstantTemperature(temperature)
    if isinstance(falling, LinearTemperature | CosineTemperature):
        return replace(falling, t_min=falling.t_min * temperature / falling.t_max, t_max=temperature)
    raise ValueError(f"the temperature of the strategy is {type(falling).__name__}, which no number replaces")
