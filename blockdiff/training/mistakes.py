"""What a recipe that cannot be read is answered: one line with the place, the key and what to write instead."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from textwrap import shorten
from typing import Any

from pydantic import ValidationError

from blockdiff.data.sources import Source
from blockdiff.errors import RecipeError
from blockdiff.training.one_of import OneOf
from blockdiff.training.other_toolkits import OTHER_TOOLKITS
from blockdiff.training.sections import Columns, Recipe, Section

Key = tuple[str, ...]
Place = tuple[str, Path | None]  # where a key stands, and what its paths are relative to (None: they are absolute)
Origins = dict[Key, Place]  # of the last layer that has a key

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")  # pydantic's names
SOURCES = (("data", "train"), ("data", "heldout"), ("evaluation", "prompts"))
# The keys below each key, and the keys that choose an object.
KEYS: dict[Key, list[str]] = {(): [*Recipe.model_fields], ("data", "columns"): [*Columns.model_fields]}
KEYS |= {key: [field.name for field in fields(Source)] for key in SOURCES}
CHOICES: dict[Key, OneOf] = {}
for name, section in Recipe.model_fields.items():
    if isinstance(section.annotation, type) and issubclass(section.annotation, Section):
        KEYS[name,] = [*section.annotation.model_fields]
        for key, field in section.annotation.model_fields.items():
            for choice in (each for each in field.metadata if isinstance(each, OneOf)):
                CHOICES[name, key] = choice
                KEYS |= {(name, key, word): [*names] for word, names in choice.fields.items()}
PATHS = [f"{name}.{key}" for name in KEYS[()] for key in KEYS.get((name,), ())]
PATHS += [name for name in KEYS[()] if (name,) not in KEYS]

# The keys of older recipes, and how each value is written now.
OLD = {
    ("objective", "power"): "objective.schedule: {polynomial: {power: VALUE}}",
    ("objective", "time_mean"): "objective.time: {logit_normal: {mean: VALUE}}",
    ("objective", "time_std"): "objective.time: {logit_normal: {std: VALUE}}",
    ("objective", "eps"): "objective.time: {stratified: {eps: VALUE}}",
    ("objective", "mask_token"): "objective.corruption: {mask: {token: VALUE}}",
    ("objective", "weight_max"): "objective.weight: {elbo: {limit: VALUE}}",
    ("objective", "ar_weight"): "objective.ar_loss: VALUE",
    ("objective", "ar_scope"): "objective.ar_loss: {scope: VALUE}",
    ("data", "which"): "data.canvases: {VALUE: N}",
    ("data", "shuffle_buffer"): "data.streaming: {shuffle_buffer: VALUE}",
    ("data", "too_long"): "data.max_length: {VALUE: N}",
    ("optim", "decay_steps"): "optim.schedule: {wsd: {decay_steps: VALUE}}",
    ("optim", "final_lr_ratio"): "optim.schedule: {cosine: {final_ratio: VALUE}}",
}


def refuse_old(tree: Mapping[str, Any], origins: Origins) -> None:
    """Raise RecipeError for keys of older recipes, with what to write instead of each."""
    sections = {name: section for name, section in tree.items() if isinstance(section, dict)}
    found = [(name, key) for name, section in sections.items() for key in section if (name, key) in OLD]
    if found:
        keys = ", ".join(map(".".join, found)) + (": are keys" if len(found) > 1 else ": is a key")
        new = ", ".join(OLD[name, key].replace("VALUE", str(tree[name][key])) for name, key in found)
        raise RecipeError(f"{origins[found[0]][0]}: {keys} of older recipes; write {new}; leave out what had no effect")


def spelt_out(choice: OneOf, value: Any) -> Any:
    """A value or one of the choice's objects as {word: fields}; what is wrong stays and is refused by pydantic."""
    try:
        return choice.full(choice.short(value) if type(value) in choice.kinds.values() else value)
    except ValueError:
        return value


def one_line(error: ValidationError, origins: Origins, path: str) -> str:
    """A mistake that pydantic found, in one line; keys that are not known come first."""
    first = min(error.errors(), key=lambda each: each["type"] not in UNKNOWN)
    kind, value, reason = first["type"], first["input"], first["msg"].removeprefix("Value error, ")
    key = tuple(word for word in first["loc"] if isinstance(word, str))
    known = next((key[:end] for end in range(len(key), 0, -1) if key[:end] in origins), None)
    origin = path if known is None or kind == "missing" else origins[known][0]
    name = ".".join(filter(None, key))
    number = next((word for word in first["loc"] if isinstance(word, int)), None)
    if number is not None and key[:2] in SOURCES:
        name = f"{'.'.join(key[:2])}: source {number + 1}" + "".join(f": {word}" for word in key[2:])
    if kind in UNKNOWN:
        return f"{origin}: unknown key {name}; {_nearest(key)}"
    if kind == "missing":
        return f"{origin}: {name}: missing; every recipe has to say it"
    if kind in ("model_type", "dataclass_type", "dict_type"):
        reason = f"a mapping with the keys {', '.join(KEYS.get(key, ()))}"
    elif kind == "too_short":
        reason = "name at least one source"
    has_value = kind == "value_error" and (isinstance(value, Mapping) or "got " in reason)
    got = "" if has_value else f" (got {shorten(repr(value), 100)})"
    return f"{origin}: {name}: {reason[:1].lower()}{reason[1:]}{got}"


def _nearest(key: Key) -> str:
    """What may be meant by a key that is not known.

    It is a word of another toolkit, or near a key beside it, or else near one elsewhere.
    """
    *above, word = key
    if word.lower() in OTHER_TOOLKITS:
        meant, _, remark = OTHER_TOOLKITS[word.lower()].partition(": ")
        if meant in PATHS or (meant,) in KEYS:
            return f"did you mean {meant}{f' ({remark})' if remark else ''}?"
        return meant
    words = [path.rpartition(".")[2] for path in PATHS]
    if word in words:
        return f"did you mean {PATHS[words.index(word)]}?"
    beside = KEYS.get(tuple(above), [])
    if near := difflib.get_close_matches(word, [*beside, "extends"] if not above else beside, 1):
        return f"did you mean {'.'.join([*above, near[0]]) if len(above) < 2 else near[0]}?"
    if near := difflib.get_close_matches(word, words, 1, cutoff=0.8):
        return f"did you mean {PATHS[words.index(near[0])]}?"
    return f"{'.'.join(filter(None, above)) or 'a recipe'} has {', '.join(beside) or 'no keys'}"
