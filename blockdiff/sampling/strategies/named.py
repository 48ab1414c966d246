"""Strategies as they are asked for: by the text `NAME:key=value,...`, and by a temperature and a top-p.

The command line, recipes and requests in files name a strategy by text. Its keys are the fields that a `Key` annotates:
those of the strategy's dataclass and of the rules in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import lru_cache, partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RequestError
from blockdiff.sampling.strategies.composed import Ancestral, Composed, Rules, released
from blockdiff.sampling.strategies.next_token import NextToken, Speculative, Verified
from blockdiff.sampling.strategies.rules import (
    Confident,
    ConstantTemperature,
    CosineTemperature,
    EntropyBound,
    LinearTemperature,
    Quota,
    Sticky,
    Temperature,
)
from blockdiff.sampling.strategy import Key, Strategy

MOST = 10**9  # an integer in the text of a strategy is no larger than this


@dataclass(frozen=True)
class TextKey:
    """A key of the text: the field that it sets, with its type and default, and the `Key` that annotates it."""

    field: str
    type: Any
    default: Any
    key: Key

    @property
    def words(self) -> tuple[str, ...]:
        """The words that are values; empty where numbers are."""
        if self.key.rules is not None:
            return tuple(self.key.rules)
        if self.type is bool:
            return "true", "false"
        return get_args(self.type) if get_origin(self.type) is Literal else ()

    @property
    def default_in_words(self) -> str:
        """The value of a text without the key, as the help says it."""
        if self.key.settings is not None:
            return "the model's"
        return "none" if self.default is None else str(self.unsaid(Generation())).lower()

    def unsaid(self, generation: Generation) -> Any:
        """The value of a text without the key."""
        if self.key.rules is not None:
            return self.words[0]
        return self.default if self.key.settings is None else getattr(generation, self.key.settings)

    def read(self, word: str) -> Any:
        """The value that a word says; ValueError says what the key takes."""
        if self.words:
            word = word.lower() if self.type is bool else word
            if word not in self.words:
                raise ValueError(f"one of {', '.join(self.words)}")
            return word == "true" if self.type is bool else word
        try:
            number = float(word) if self.type is float else int(word)
        except ValueError:
            raise ValueError("a number" if self.type is float else "an integer") from None
        if self.type is int and abs(number) > MOST:
            raise ValueError(f"an integer of at most {MOST:,}")
        return number


@dataclass(frozen=True)
class Named:
    """A name: what it is, the class of the strategy, and that of its first field where the text says that, too."""

    meaning: str
    strategy: type[Any]
    part: type[Any] | None = None

    @property
    def keys(self) -> dict[str, TextKey]:
        """The keys that its text may give."""
        own = {} if self.part is None else text_keys(self.part)
        sticky = {"sticky": STICKY} if hasattr(self.part, "accept") else {}
        return {**own, **sticky, **text_keys(self.strategy)}

    @property
    def has_rules(self) -> bool:
        """True where it has the keys that most strategies share."""
        return issubclass(self.strategy, Rules)


NAMES: Mapping[str, Named] = {
    "entropy_bound": Named(
        "keep the most certain samples within a bound of entropy (the released model's)", Composed, EntropyBound
    ),
    "confident": Named("keep samples likelier than a threshold", Composed, Confident),
    "quota": Named("keep the likeliest samples, more at every step", Composed, Quota),
    "ddim": Named("draw each next noise level from its posterior", Ancestral),
    "next_token": Named("denoise nothing: one token after the other, by next-token prediction", NextToken),
    "speculative": Named("the tokens of next_token, sooner: a drafter's blocks are verified", Speculative, NextToken),
    "verified": Named(
        "the tokens of next_token, sooner: canvases are drafts that next-token prediction checks", Verified, NextToken
    ),
}
STICKY = TextKey("", bool, False, Key("what is kept is kept for good"))  # of the names that keep samples


def text_keys(maker: Callable[..., Any]) -> dict[str, TextKey]:
    """The keys of a dataclass, or of a `partial` of one, and of the rules that can stand in it."""
    found: dict[str, TextKey] = {}
    for name, key in _own_keys(maker).items():
        found[name] = key
        for rule in (key.key.rules or {}).values():
            for each, its in text_keys(rule).items():
                found.setdefault(each, its)
    return found


@lru_cache(maxsize=64)
def _own_keys(maker: Callable[..., Any]) -> dict[str, TextKey]:
    """The keys of the fields that are still to be given."""
    made, given = (maker.func, maker.keywords) if isinstance(maker, partial) else (maker, dict[str, Any]())
    assert is_dataclass(made)
    hints = get_type_hints(made, include_extras=True)
    found = {}
    for each in fields(made):
        for key in getattr(hints[each.name], "__metadata__", ()):
            if each.name not in given:
                found[key.name or each.name] = TextKey(each.name, get_args(hints[each.name])[0], each.default, key)
    return found


def _made(maker: Callable[..., Any], values: Mapping[str, Any], *given: Any) -> Any:
    """The object whose fields have these values, and which is given its first ones."""
    own = {}
    for name, key in _own_keys(maker).items():
        chosen = key.key.rules and key.key.rules[values[name]]
        own[key.field] = _made(chosen, values) if chosen else values[name]
    return maker(*given, **own)


def parse_strategy(text: str, generation: Generation | None = None) -> Strategy:
    """The strategy that `NAME` or `NAME:key=value,...` says; what is not said is as the settings have it.

    Raises RequestError, one line that names the nearest known word, for an unknown name or key and for a bad value.
    """
    generation = generation or Generation()
    name, _, rest = text.strip().partition(":")
    if name not in NAMES:
        raise RequestError(f"strategy {name!r} is not known; {_nearest(name, NAMES)}")
    named = NAMES[name]
    keys = named.keys
    values = {key: its.unsaid(generation) for key, its in keys.items()}
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
        part = () if named.part is None else (_made(named.part, values),)
        if values.get("sticky"):
            part = (Sticky(*part),)
        strategy: Strategy = _made(named.strategy, values, *part)
    except ValueError as error:
        raise RequestError(f"strategy {name}: {error}") from None
    return replace(strategy, denoising=released(generation)) if isinstance(strategy, Verified) else strategy


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
    common, lines = text_keys(Rules), list[str]()
    for name, named in NAMES.items():
        own = {key: its for key, its in named.keys.items() if not named.has_rules or key not in common}
        lines += [f"{name}: {named.meaning}", *_lines(own)]
    without = " and ".join(name for name, named in NAMES.items() if not named.has_rules)
    return "\n".join([*lines, f"with any of them but {without}:", *_lines(common)])


def _lines(keys: Mapping[str, TextKey]) -> list[str]:
    return [f"  {name + '=' + key.default_in_words:<24} {key.key.meaning}" for name, key in keys.items()]


def _nearest(word: str, words: Mapping[str, object]) -> str:
    if near := get_close_matches(word, words, 1):
        return f"did you mean {near[0]}?"
    return f"known: {', '.join(words)}"


def adjusted(strategy: Strategy, temperature: float | None = None, **filters: float | None) -> Strategy:
    """The strategy with this temperature and these filters (top_k, top_p, min_p); None leaves what it has.

    In next-token sampling, and in that of verified canvases, all mean what they mean in transformers. Where canvases
    are denoised, `temperature` is that of the first step, and those of later steps keep their ratio to it; 0 leaves the
    temperatures as they are, for the canvas that is committed has the likeliest tokens at any temperature. Filters
    hold for what every step draws from.
    Raises RequestError for values that cannot be, and for a strategy that has none of them.
    """
    changes: dict[str, Any] = {name: value for name, value in filters.items() if value is not None}
    if temperature is None and not changes:
        return strategy
    if isinstance(strategy, Verified | Speculative):
        head = adjusted(strategy.head, temperature, **filters)
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
    raise RequestError(f"strategy {type(strategy).__name__} has no temperature and no filters that could be set")


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
