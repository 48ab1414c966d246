"""Strategies by name: the text `NAME:key=value,...`, and overrides of temperature and filters.

The command line, recipes and requests in files name a strategy by text. Its keys are the fields of the strategy's
dataclass, and of its acceptance rule if the name determines one, that are annotated with a `Key`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

from blockdiff.checkpoint.generation import Generation
from blockdiff.errors import RequestError
from blockdiff.sampling.strategies.acceptance import Confident, EntropyBound, Quota, Sequential
from blockdiff.sampling.strategies.denoising import Ancestral, Composed, Denoising, JointThreshold, released
from blockdiff.sampling.strategies.next_token import NextToken, Speculative, Verified
from blockdiff.sampling.strategy import Key, Strategy

MOST = 10**9  # the largest integer in the text of a strategy


@dataclass(frozen=True)
class TextKey:
    """A key of the text form: the type and default of its field, and the `Key` that annotates the field."""

    type: Any
    default: Any
    key: Key

    @property
    def default_in_words(self) -> str:
        """The default value, as the help shows it."""
        if self.key.settings is not None:
            return "the model's"
        return "none" if self.default is None else str(self.default).lower()

    def unsaid(self, generation: Generation) -> Any:
        """Return the default value, from the field or from the generation settings."""
        return self.default if self.key.settings is None else getattr(generation, self.key.settings)

    def read(self, word: str) -> Any:
        """Parse a value; ValueError names the values that the key accepts."""
        if self.type is bool or get_origin(self.type) is Literal:
            if word not in (words := get_args(self.type) or ("true", "false")):
                raise ValueError(f"one of {', '.join(words)}")
            return word == "true" if self.type is bool else word
        try:
            number = float(word) if self.type is float else int(word)
        except ValueError:
            raise ValueError("a number" if self.type is float else "an integer") from None
        if self.type is not float and abs(number) > MOST:
            raise ValueError(f"an integer of at most {MOST:,}")
        return number


@dataclass(frozen=True)
class Named:
    """A named strategy: its description, its class, and the class of its first field if the name determines one."""

    meaning: str
    strategy: type[Any]
    part: type[Any] | None = None

    @property
    def keys(self) -> dict[str, TextKey]:
        """The keys that the text form accepts."""
        return {**({} if self.part is None else text_keys(self.part)), **text_keys(self.strategy)}


NAMES: Mapping[str, Named] = {
    "entropy_bound": Named(
        "keep the most certain samples within a bound of entropy (the released model's)", Composed, EntropyBound
    ),
    "confident": Named("keep samples likelier than a threshold", Composed, Confident),
    "quota": Named("keep the likeliest samples, more at every step", Composed, Quota),
    "sequential": Named("keep the first samples, more at every step", Composed, Sequential),
    "joint_threshold": Named("fill masks as confident does, and edit visible tokens", JointThreshold),
    "ddim": Named("draw each next noise level from its posterior", Ancestral),
    "next_token": Named("denoise nothing: one token after the other, by next-token prediction", NextToken),
    "speculative": Named(
        "the tokens of next_token, sooner: blocks of a drafter, or of the model's own, are verified",
        Speculative,
        NextToken,
    ),
    "verified": Named(
        "the tokens of next_token, sooner: canvases are drafts that next-token prediction checks", Verified, NextToken
    ),
}


def text_keys(made: type[Any]) -> dict[str, TextKey]:
    """Return the keys of a dataclass's annotated fields, by name."""
    hints, keys = get_type_hints(made, include_extras=True), {}
    for each in fields(made):
        for key in getattr(hints[each.name], "__metadata__", ()):
            keys[each.name] = TextKey(get_args(hints[each.name])[0], each.default, key)
    return keys


def parse_strategy(text: str, generation: Generation | None = None) -> Strategy:
    """Parse `NAME` or `NAME:key=value,...` as a strategy; missing keys get their values from `generation`.

    Raises RequestError, one line that names the nearest known word, for an unknown name or key and for a bad value.
    """
    generation = generation or Generation()
    name, _, rest = text.strip().partition(":")
    if name not in NAMES:
        raise RequestError(f"strategy {name!r} is not known; {_nearest(name, NAMES)}")
    keys, values = NAMES[name].keys, dict[str, Any]()
    for entry in filter(None, (part.strip() for part in rest.split(","))):
        key, is_given, word = (part.strip() for part in entry.partition("="))
        if key not in keys:
            raise RequestError(f"strategy {name} has no key {key!r}; {_nearest(key, keys)}")
        if key in values:
            raise RequestError(f"strategy {name}: {key} appears twice; give it once")
        try:
            if not is_given:
                raise ValueError("a value, key=value")
            values[key] = keys[key].read(word)
        except ValueError as error:
            raise RequestError(f"strategy {name}: {key} takes {error}, got {entry!r}") from None
    values = {key: text_key.unsaid(generation) for key, text_key in keys.items()} | values

    def made(kind: type[Any], *first: Any) -> Any:
        return kind(*first, **{key: values[key] for key in text_keys(kind)})

    strategy, part = NAMES[name].strategy, NAMES[name].part
    try:
        instance: Strategy = made(strategy) if part is None else made(strategy, made(part))
    except ValueError as error:
        raise RequestError(f"strategy {name}: {error}") from None
    return replace(instance, denoising=released(generation)) if isinstance(instance, Verified) else instance


def as_strategy(given: Strategy | str | None, generation: Generation, denoises: bool = True) -> Strategy:
    """Return a strategy that is given as an object or text, or the default for None, with the settings' numbers.

    denoises: whether the model denoises canvases; the default is then the released model's strategy, else next-token
    sampling. Raises RequestError if `given` is no strategy.
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
    """Return every name with its keys, their defaults and meanings, as lines of text."""
    lines = list[str]()
    for name, named in NAMES.items():
        keys = text_keys(named.part or named.strategy)
        if issubclass(named.strategy, Denoising):
            keys = {key: text_key for key, text_key in keys.items() if key not in text_keys(Denoising)}
            lines += [f"{name}: {named.meaning}", *_lines(keys)]
        elif named.part:
            lines += [f"{name}: {named.meaning}", *_lines(text_keys(named.strategy)), "  and the keys of next_token"]
        else:
            lines += [f"{name}: {named.meaning}", *_lines(keys)]
    *others, last = (name for name, named in NAMES.items() if not issubclass(named.strategy, Denoising))
    return "\n".join([*lines, f"with any but {', '.join(others)} and {last}:", *_lines(text_keys(Denoising))])


def _lines(keys: Mapping[str, TextKey]) -> list[str]:
    return [f"  {name + '=' + key.default_in_words:<24} {key.key.meaning}" for name, key in keys.items()]


def _nearest(word: str, words: Mapping[str, object]) -> str:
    if near := get_close_matches(word, words, 1):
        return f"did you mean {near[0]}?"
    return f"known: {', '.join(words)}"


def adjusted(strategy: Strategy, temperature: float | None = None, **filters: float | None) -> Strategy:
    """Return the strategy with this temperature and these filters (top_k, top_p, min_p); None keeps a value.

    In next-token sampling, and for verified canvases, they mean the same as in transformers. If canvases are denoised,
    `temperature` is that of the first step, and later temperatures keep their ratio to it; with 0 nothing is drawn, and
    entropies are still computed at the strategy's temperatures. Filters apply to the draws of every step. Raises
    RequestError for invalid values, and for a strategy that has no such settings.
    """
    changes: dict[str, Any] = {name: value for name, value in filters.items() if value is not None}
    if temperature is None and not changes:
        return strategy
    method = getattr(strategy, "adjusted", None)
    if method is None:
        raise RequestError(f"strategy {type(strategy).__name__} has no temperature and no filters that could be set")
    try:
        result: Strategy = method(temperature, changes)
    except ValueError as error:
        raise RequestError(str(error)) from None
    return result
