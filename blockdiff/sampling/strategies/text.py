"""Strategies as text, `NAME:key=value,...`: how the command line, recipes and requests in files name one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RequestError
from blockdiff.sampling.strategies.acceptance import Acceptance, Confident, EntropyBound, Quota, Sticky
from blockdiff.sampling.strategies.ancestral import Ancestral
from blockdiff.sampling.strategies.composed import Composed, released
from blockdiff.sampling.strategies.next_token import NextToken
from blockdiff.sampling.strategies.stopping import AllKept, Never, StableAndConfident, Stopping
from blockdiff.sampling.strategies.temperature import (
    ConstantTemperature,
    CosineTemperature,
    LinearTemperature,
    Temperature,
)
from blockdiff.sampling.strategies.verified import Verified
from blockdiff.sampling.strategy import Strategy

Value = Any


@dataclass(frozen=True)
class Key:
    """A value behind `key=`: its default, its range, and its purpose."""

    default: Value  # a name in capitals: that of the model's settings
    read: Callable[[str], Value]
    meaning: str


def _one_of(*words: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return read


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("an integer") from None


def _truth(text: str) -> bool:
    return _one_of("true", "false")(text.lower()) == "true"


COMMON: Mapping[str, Key] = {
    "temperature": Key("linear", _one_of("linear", "cosine", "constant"), "how it goes from t_max to t_min"),
    "t_min": Key("SETTINGS", _number, "what the temperature goes to"),
    "t_max": Key("SETTINGS", _number, "what it begins with; the constant temperature"),
    "stopping": Key(
        "both", _one_of("both", "stable", "confident", "all_kept", "never"), "what ends a canvas before its last step"
    ),
    "stability": Key("SETTINGS", _integer, "for how many steps the argmax is the same (both, stable)"),
    "confidence": Key("SETTINGS", _number, "what the mean entropy is below (both, confident)"),
    "top_k": Key(None, _integer, "draw from so many likeliest tokens"),
    "top_p": Key(1.0, _number, "draw from the likeliest tokens that have this probability together"),
    "min_p": Key(0.0, _number, "draw from tokens at least so likely, times the likeliest"),
    "guidance": Key(0.0, _number, "away from what the model says without the prompt"),
}
HEAD: dict[str, Key] = {
    "temperature": Key("SETTINGS", _number, "0 takes the likeliest token"),
    **{key: COMMON[key] for key in ("top_k", "top_p", "min_p")},
}
STICKY = Key(False, _truth, "what is kept is kept for good")


@dataclass(frozen=True)
class Named:
    """A name: its own keys, and what it is."""

    keys: Mapping[str, Key]
    meaning: str
    has_common: bool = True  # whether it has the keys of COMMON, too


NAMES: Mapping[str, Named] = {
    "entropy_bound": Named(
        {"bound": Key("SETTINGS", _number, "of the summed entropies"), "sticky": STICKY},
        "keep the most certain samples within a bound of entropy (the released model's)",
    ),
    "confident": Named(
        {"threshold": Key(0.9, _number, "a probability"), "sticky": STICKY}, "keep samples likelier than a threshold"
    ),
    "quota": Named(
        {"pace": Key("linear", _one_of("linear", "cosine"), "how the share of kept positions grows"), "sticky": STICKY},
        "keep the likeliest samples, more at every step",
    ),
    "ddim": Named(
        {
            "corrections": Key(0, _integer, "steps after each step that draw single positions again"),
            "positions": Key(1, _integer, "how many they draw again"),
        },
        "draw each next noise level from its posterior",
    ),
    "next_token": Named(
        HEAD
        | {"race": Key(False, _truth, "draw by a number for each token (the Gumbel trick) and not by one for all")},
        "denoise nothing: one token after the other, by next-token prediction",
        has_common=False,
    ),
    "verified": Named(
        {"steps": Key(1, _integer, "denoising steps of a draft, at most"), **HEAD},
        "the tokens of next_token, sooner: canvases are drafts that next-token prediction checks",
        has_common=False,
    ),
}


def parse_strategy(text: str, generation: Generation | None = None) -> Strategy:
    """The strategy that `NAME` or `NAME:key=value,...` says; what is not said is as the settings have it.

    Raises RequestError, one line that names the nearest known word, for an unknown name or key and for a bad value.
    """
    generation = generation or Generation()
    name, _, rest = text.strip().partition(":")
    if name not in NAMES:
        raise RequestError(f"strategy {name!r} is not known; {_nearest(name, NAMES)}")
    keys = {**NAMES[name].keys, **(COMMON if NAMES[name].has_common else {})}
    settings = {
        "bound": generation.entropy_bound,
        "temperature": generation.temperature,
        **{key: getattr(generation, key) for key in ("t_min", "t_max", "stability", "confidence")},
    }
    values = {key: settings[key] if its.default == "SETTINGS" else its.default for key, its in keys.items()}
    seen: set[str] = set()
    for entry in filter(None, (part.strip() for part in rest.split(","))):
        key, is_given, word = (part.strip() for part in entry.partition("="))
        if key not in keys:
            raise RequestError(f"strategy {name} has no key {key!r}; {_nearest(key, keys)}")
        if key in seen:
            raise RequestError(f"strategy {name}: {key} appears twice; give it once")
        seen.add(key)
        try:
            if not is_given:
                raise ValueError("a value, key=value")
            values[key] = keys[key].read(word)
        except ValueError as error:
            raise RequestError(f"strategy {name}: {key} takes {error}, got {entry!r}") from None
    try:
        return _made(name, values, generation)
    except ValueError as error:
        raise RequestError(f"strategy {name}: {error}") from None


def as_strategy(given: Strategy | str | None, generation: Generation, denoises: bool = True) -> Strategy:
    """A strategy given as such or as text; without one that of the kind of model, with the numbers of the settings.

    denoises: whether the model has canvases; then it is the released model's, else next-token sampling. Raises
    RequestError for what is none.
    """
    if given is None:
        return released(generation) if denoises else NextToken.of(generation)
    if isinstance(given, str):
        return parse_strategy(given, generation)
    if isinstance(given, type) or not all(callable(getattr(given, verb, None)) for verb in ("shape", "decide")):
        raise RequestError(f"strategy must be text or an object with shape() and decide(), got {given!r:.80}")
    try:
        hash(given)
    except TypeError as error:
        words = "make it and the rules in it frozen, @dataclass(frozen=True), for canvases of equal ones go together"
        raise RequestError(f"strategy {type(given).__name__} cannot be looked up ({error}); {words}") from None
    return given


def strategies_table() -> str:
    """Every name with its keys, their defaults and what they are for, as lines of text."""
    lines = []
    for name, named in NAMES.items():
        lines += [f"{name}: {named.meaning}", *_lines(named.keys)]
    return "\n".join([*lines, "with any of them but next_token and verified:", *_lines(COMMON)])


def _lines(keys: Mapping[str, Key]) -> list[str]:
    defaults = {
        key: {"SETTINGS": "the model's", None: "none"}.get(its.default, str(its.default).lower())
        for key, its in keys.items()
    }
    return [f"  {key + '=' + defaults[key]:<24} {its.meaning}" for key, its in keys.items()]


def _nearest(word: str, known: Mapping[str, object]) -> str:
    if near := get_close_matches(word, known, 1):
        return f"did you mean {near[0]}?"
    return f"known: {', '.join(known)}"


def _made(name: str, values: dict[str, Value], generation: Generation) -> Strategy:
    if name == "next_token":
        return NextToken(**values)
    if name == "verified":
        steps = values.pop("steps")
        return Verified(NextToken(**values), steps, released(generation))
    temperature, stopping, values = _temperature(values), _stopping(values), dict(values)
    rules = {key: values[key] for key in ("top_k", "top_p", "min_p", "guidance")}
    both = {"temperature": temperature, "stopping": stopping, **rules}
    if name == "ddim":
        return Ancestral(corrections=values["corrections"], positions=values["positions"], **both)
    acceptance: Acceptance
    if name == "entropy_bound":
        acceptance = EntropyBound(values["bound"])
    elif name == "confident":
        acceptance = Confident(values["threshold"])
    else:
        acceptance = Quota(values["pace"])
    return Composed(Sticky(acceptance) if values["sticky"] else acceptance, **both)


def _temperature(values: Mapping[str, Value]) -> Temperature:
    t_min, t_max = values["t_min"], values["t_max"]
    if values["temperature"] == "constant":
        return ConstantTemperature(t_max)
    return (CosineTemperature if values["temperature"] == "cosine" else LinearTemperature)(t_min, t_max)


def _stopping(values: Mapping[str, Value]) -> Stopping:
    if values["stopping"] == "never":
        return Never()
    if values["stopping"] == "all_kept":
        return AllKept()
    stability, confidence = values["stability"], values["confidence"]
    if values["stopping"] == "stable":
        return StableAndConfident(stability, math.inf)
    return StableAndConfident(0 if values["stopping"] == "confident" else stability, confidence)
