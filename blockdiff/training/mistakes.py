"""What a recipe that cannot be read is answered: one line with the place, the key and what to write instead."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import TypeAdapter, ValidationError

from blockdiff.data.sources import Source
from blockdiff.errors import RecipeError
from blockdiff.training.one_of import OneOf
from blockdiff.training.sections import Columns, Recipe, Section

Key = tuple[str, ...]
Place = tuple[str, Path | None]  # where a key was said, and what its paths are relative to (None: looked up before)
Origins = dict[Key, Place]  # of the last layer that says a key

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
                KEYS |= {(name, key, word): [*own] for word, own in choice.fields.items()}
PATHS = [f"{name}.{key}" for name in KEYS[()] for key in KEYS.get((name,), ())]
PATHS += [name for name in KEYS[()] if (name,) not in KEYS]

# The keys of older recipes: what each is now a part of, the word that it goes with where none is chosen, and its field
# (None: the value is the word).
OLD = {
    ("objective", "power"): ("schedule", "polynomial", "power"),
    ("objective", "time_mean"): ("time", "logit_normal", "mean"),
    ("objective", "time_std"): ("time", "logit_normal", "std"),
    ("objective", "eps"): ("time", "stratified", "eps"),
    ("objective", "mask_token"): ("corruption", "mask", "token"),
    ("objective", "weight_max"): ("weight", "elbo", "limit"),
    ("objective", "ar_weight"): ("ar_loss", "", "weight"),
    ("objective", "ar_scope"): ("ar_loss", "", "scope"),
    ("data", "which"): ("canvases", "random", None),
    ("data", "shuffle_buffer"): ("streaming", "", "shuffle_buffer"),
    ("data", "too_long"): ("max_length", "truncate", None),
    ("optim", "decay_steps"): ("schedule", "wsd", "decay_steps"),
    ("optim", "final_lr_ratio"): ("schedule", "cosine", "final_ratio"),
}


def refuse_old(tree: Mapping[str, Any], origins: Origins) -> None:
    """Raise RecipeError for keys of older recipes, with what to write instead."""
    sections = {name: section for name, section in tree.items() if isinstance(section, dict)}
    found = [(name, key) for name, section in sections.items() for key in section if (name, key) in OLD]
    if not found:
        return
    new: dict[str, dict[str, Any]] = {}
    for name, key in found:
        _move(sections[name], name, key, new.setdefault(name, {}))
    for name, parts in new.items():
        parts |= {part: _short(CHOICES[name, part], chosen) for part, chosen in parts.items()}
    said = new if len(new) > 1 else new[found[0][0]]
    written = yaml.safe_dump(said, default_flow_style=True, sort_keys=False, width=math.inf).strip()[1:-1] or "nothing"
    keys = ", ".join(map(".".join, found)) + (": are" if len(found) > 1 else ": is")
    parts_of = ", ".join(dict.fromkeys(f"{name}.{OLD[name, key][0]}" for name, key in found))
    raise RecipeError(f"{origins[found[0]][0]}: {keys} now part of {parts_of}; write {written}")


def _move(section: Mapping[str, Any], name: str, key: str, parts: dict[str, Any]) -> None:
    """Put what an old key says into `parts`, as {word: fields} by new key; what had no effect there is left out."""
    part, usual, field = OLD[name, key]
    value = section[key]
    if part not in section and value is None:
        return
    if part not in parts:
        chosen: Any = {"canvases": 1, "max_length": None}.get(part, {usual: {}})
        parts[part] = spelt_out(CHOICES[name, part], section.get(part, chosen))
    if key == "ar_weight" and value == 0:
        parts[part] = None
    elif isinstance(parts[part], dict) and value is not None:
        ((word, fields),) = parts[part].items()
        if field is None:
            parts[part] = {value: fields} if fields else {word: fields}
        elif field in KEYS[name, part, word]:
            parts[part] = {word: {**fields, field: value}}


def spelt_out(choice: OneOf, value: Any) -> Any:
    """A value or one of the choice's objects as {word: fields}; what is wrong stays and is refused by pydantic."""
    try:
        return choice.full(choice.short(value) if type(value) in choice.kinds.values() else value)
    except ValueError:
        return value


def _short(choice: OneOf, full: Any) -> Any:
    try:
        return choice.none if full is None else choice.short(TypeAdapter(Annotated[Any, choice]).validate_python(full))
    except ValidationError:
        return full


def one_line(error: ValidationError, origins: Origins, path: str) -> str:
    """A mistake that pydantic found, in one line; keys that are not known come first."""
    first = min(error.errors(), key=lambda each: each["type"] not in UNKNOWN)
    kind, value, reason = first["type"], first["input"], first["msg"].removeprefix("Value error, ")
    key = tuple(word for word in first["loc"] if isinstance(word, str))
    said = next((key[:end] for end in range(len(key), 0, -1) if key[:end] in origins), None)
    origin = path if said is None or kind == "missing" else origins[said][0]
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
    is_told = kind == "value_error" and (isinstance(value, Mapping) or "got " in reason)
    return f"{origin}: {name}: {reason[:1].lower()}{reason[1:]}" + ("" if is_told else f" (got {value!r})")


def _nearest(key: Key) -> str:
    """What may be meant by a key that is not known: a near one beside it, else the same or a nearer word elsewhere."""
    *above, word = key
    beside = KEYS.get(tuple(above), [])
    if near := difflib.get_close_matches(word, [*beside, "extends"] if not above else beside, 1):
        return f"did you mean {'.'.join([*above, near[0]]) if len(above) < 2 else near[0]}?"
    words = [path.rpartition(".")[2] for path in PATHS]
    if near := difflib.get_close_matches(word, words, 1, cutoff=0.8):
        return f"did you mean {PATHS[words.index(near[0])]}?"
    return f"{'.'.join(filter(None, above)) or 'a recipe'} has {', '.join(beside) or 'no keys'}"
