"""A strategy with another temperature or another top-p: the two numbers that every client of a language model sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from blockdiff.errors import RequestError
from blockdiff.sampling.strategies.composed import Rules
from blockdiff.sampling.strategies.next_token import NextToken
from blockdiff.sampling.strategies.temperature import ConstantTemperature, CosineTemperature, LinearTemperature
from blockdiff.sampling.strategy import Strategy


def adjusted(strategy: Strategy, temperature: float | None = None, top_p: float | None = None) -> Strategy:
    """The strategy with this temperature and this top-p; None leaves what it has.

    In next-token sampling both mean what they mean in transformers. Where canvases are denoised, `temperature` is that
    of the first step, and those of later steps keep their ratio to it; `top_p` filters what every step draws from.
    Raises RequestError for values that cannot be, and for a strategy that has neither.
    """
    changes: dict[str, Any] = {} if top_p is None else {"top_p": top_p}
    if temperature is None and not changes:
        return strategy
    if not isinstance(strategy, NextToken | Rules):
        raise RequestError(f"strategy {type(strategy).__name__} has no temperature and no top_p that could be set")
    try:
        if temperature is not None:
            is_number = isinstance(strategy, NextToken)
            changes["temperature"] = temperature if is_number else _beginning_at(strategy, temperature)
        return replace(strategy, **changes)
    except ValueError as error:
        raise RequestError(str(error)) from None


def _beginning_at(strategy: Rules, temperature: float) -> LinearTemperature | CosineTemperature | ConstantTemperature:
    falling = strategy.temperature
    if not temperature > 0:
        raise ValueError(
            f"temperature must be more than 0 where canvases are denoised, got {temperature}; "
            "a strategy with top_k=1 takes the likeliest tokens"
        )
    if isinstance(falling, ConstantTemperature):
        return ConstantTemperature(temperature)
    if isinstance(falling, LinearTemperature | CosineTemperature):
        return replace(falling, t_min=falling.t_min * temperature / falling.t_max, t_max=temperature)
    raise ValueError(f"the temperature of the strategy is {type(falling).__name__}, which no number replaces")
