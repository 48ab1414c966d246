"""Strategies as text: what it means, and what is said of a mistake."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RequestError
from blockdiff.sampling.strategies import (
    NAMES,
    Ancestral,
    Composed,
    Confident,
    EntropyBound,
    NextToken,
    Quota,
    adjusted,
    parse_strategy,
    released,
    strategies_table,
)

pytestmark = pytest.mark.quick

SETTINGS = Generation(entropy_bound=0.3, t_min=0.1, t_max=0.9, stability=2, confidence=0.4)
NUMBERS = {"t_min": 0.1, "t_max": 0.9, "stability": 2, "confidence": 0.4}


def test_text_says_a_strategy_and_the_settings_what_it_does_not_say():
    filters, never = {"top_k": 3, "top_p": 0.9, "min_p": 0.1}, NUMBERS | {"t_min": 0.7, "t_max": 0.7, "confidence": 0}
    expected = {
        "entropy_bound": released(SETTINGS),
        "entropy_bound:bound=0.2": Composed(EntropyBound(0.2), **NUMBERS),
        "confident": Composed(Confident(0.9), **NUMBERS),
        " confident: threshold = 0.5 , top_k=3,top_p=0.9, min_p=0.1,": Composed(Confident(0.5), **NUMBERS, **filters),
        "quota:pace=cosine,t_min=0.7,t_max=0.7,confidence=0": Composed(Quota("cosine"), **never),
        "ddim": Ancestral(**NUMBERS),
        "ddim:confidence=inf": Ancestral(**NUMBERS | {"confidence": math.inf}),
        "ddim:stability=0": Ancestral(**NUMBERS | {"stability": 0}),
    }
    assert {text: parse_strategy(text, SETTINGS) for text in expected} == expected


@pytest.mark.parametrize(
    "text,words",
    [
        ("entropy_bond", "strategy 'entropy_bond' is not known; did you mean entropy_bound?"),
        ("", "known: entropy_bound, confident, quota, sequential, joint_threshold, ddim"),
        ("quota:pase=linear", "strategy quota has no key 'pase'; did you mean pace?"),
        ("quota:pace=linear,pace=cosine", "strategy quota: pace appears twice; give it once"),
        ("quota:threshold=0.3", "has no key 'threshold'"),
        ("quota:pace=quick", "pace takes one of linear, cosine, got 'pace=quick'"),
        ("confident:threshold=high", "threshold takes a number, got 'threshold=high'"),
        ("confident:threshold", "threshold takes a value, key=value, got 'threshold'"),
        ("confident:threshold=2", "strategy confident: threshold must be at least 0 and less than 1, got 2.0"),
        ("ddim:stability=1.5", "stability takes an integer, got 'stability=1.5'"),
        ("ddim:top_k=9999999999", "top_k takes an integer of at most 1,000,000,000"),
        ("ddim:t_min=2", "t_min must be at least 0 and at most t_max"),
        ("entropy_bound:top_p=0", "top_p must be a number more than 0 and at most 1"),
        ("entropy_bound:top_p=nan", "top_p must be a number more than 0"),
        ("entropy_bound:bound=nan", "bound must be more than 0"),
    ],
)
def test_a_mistake_in_the_text_is_one_line_that_names_what_is_near(text, words):
    with pytest.raises(RequestError) as caught:
        parse_strategy(text)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_the_table_names_everything_that_text_may_say():
    table = strategies_table()
    for name, named in NAMES.items():
        assert f"{name}: {named.meaning}" in table
        assert all(f"  {key}=" in table for key in named.keys)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (NextToken(), NextToken(temperature=0.5, top_p=0.9)),
        (
            released(SETTINGS),
            Composed(EntropyBound(0.3), **NUMBERS | {"t_min": 0.1 * 0.5 / 0.9, "t_max": 0.5}, top_p=0.9),
        ),
        (Ancestral(t_min=2.0, t_max=2.0), Ancestral(t_min=0.5, t_max=0.5, top_p=0.9)),
    ],
    ids=["next tokens", "canvases", "constant"],
)
def test_a_temperature_scales_all_steps_and_top_p_filters_them(strategy, expected):
    assert adjusted(strategy) == strategy
    nothing_drawn = strategy if isinstance(strategy, NextToken) else replace(strategy, greedy=True)
    assert adjusted(strategy, 0.0) == nothing_drawn
    assert adjusted(strategy, 0.5, top_p=0.9) == expected


@pytest.mark.parametrize(
    ("strategy", "temperature", "top_p", "reason"),
    [
        (Composed(), math.inf, None, "temperature .*inf"),
        (Composed(), None, 1.5, r"top_p .*1\.5"),
        (NextToken(), -1.0, None, "temperature .*-1"),
        (object(), 0.5, None, "strategy object .*temperature"),
    ],
)
def test_a_temperature_or_top_p_that_cannot_be_is_refused(strategy, temperature, top_p, reason):
    with pytest.raises(RequestError, match=reason):
        adjusted(strategy, temperature, top_p=top_p)
