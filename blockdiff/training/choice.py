"""A recipe's keys that choose an object: how `linear` or `{polynomial: {power: 3}}` is read and written.

An object of another class, given from Python, stays as it is; it is recorded by its class and its values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

PLAIN = (str, bool, int, float, Mapping, list, tuple, type(None))  # what YAML has


class Choice:
    """Stands in pydantic's `Annotated` and says which dataclasses a key chooses from.

    kinds: the dataclass behind each word. A word alone means its defaults, `{word: {field: value}}` names its fields,
    and `{word: value}` gives the only field of a kind where that has no default. The word "" is not written: its
    fields are the key's own. number: the word that a bare number stands for, as its first field. none and default: how
    None and the defaults of "" are written.
    """

    def __init__(
        self, kinds: Mapping[str, type], *, number: str | None = None, none: Any = MISSING, default: Any = MISSING
    ) -> None:
        self.kinds, self.number, self.none, self.default = kinds, number, none, default

    def full(self, value: Any) -> Any:
        """A YAML value as {word: fields} or None; raises ValueError that says what the key takes."""
        if self.none is not MISSING and (value is None or (value == self.none and type(value) is type(self.none))):
            return None
        if value is self.default:
            return {"": {}}
        if isinstance(value, Mapping) and "" in self.kinds:
            return value if value.keys() == {""} else {"": value}
        if isinstance(value, int | float) and not isinstance(value, bool) and self.number is not None:
            return {self.number: {fields(self.kinds[self.number])[0].name: value}}
        chosen = {value: None} if isinstance(value, str) else value
        word = next(iter(chosen)) if isinstance(chosen, Mapping) and len(chosen) == 1 else None
        if not word or word not in self.kinds:
            if isinstance(word, str) and "." in word:
                raise ValueError(f"{word} was given from Python; give it again from Python")
            raise ValueError(f"input should be {self._listed()}")
        inner, own = chosen[word], fields(self.kinds[word])
        is_bare = len(own) == 1 and own[0].default is MISSING
        if isinstance(inner, Mapping) or (inner is None and not is_bare):
            return {word: inner or {}}
        if is_bare and inner is not None:
            return {word: {own[0].name: inner}}
        raise ValueError(f"{word} takes {self._example(word) if own else 'no keys'}")

    def _example(self, word: str) -> str:
        """What stands in a recipe for the fields of a kind."""
        own = fields(self.kinds[word])
        if len(own) == 1 and own[0].default is MISSING:
            return f"a value, {{{word}: {own[0].name.upper()}}}"
        return "{" + ", ".join(f"{field.name}: {field.default}" for field in own) + "}"

    def _listed(self) -> str:
        words = [word for word in (self.none, self.default, *self.kinds) if word not in (MISSING, "")]
        listed = [repr(word) if isinstance(word, str) else json.dumps(word) for word in words]
        listed += ["a number"] if self.number is not None else []
        listed += [self._example("")] if "" in self.kinds else []
        return f"{', '.join(listed[:-1])} or {listed[-1]}"

    def short(self, part: Any) -> Any:
        """The short form that reads back as `part`."""
        if part is None:
            return self.none
        word = next((word for word, kind in self.kinds.items() if type(part) is kind), None)
        if word is None:
            return by_class(part)
        own = fields(part)
        values = {field.name: getattr(part, field.name) for field in own}
        is_default = [values[field.name] == field.default for field in own]
        if word == self.number and all(is_default[1:]):
            return values[own[0].name]
        if all(is_default):
            return word or self.default
        if len(own) == 1 and own[0].default is MISSING:
            return {word: values[own[0].name]}
        return {word: values} if word else values

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Reads YAML values in their short or full form and takes any other object as it is."""

        protocols = [each for each in (source, *get_args(source)) if getattr(each, "_is_protocol", False)]
        verbs = [name for protocol in protocols for name in vars(protocol) if not name.startswith("_")]

        def chosen(value: Any, read: Any) -> Any:
            if type(value) in self.kinds.values():
                return value
            if not isinstance(value, PLAIN):
                missing = [name for name in verbs if not callable(getattr(value, name, None))]
                if not verbs or missing or isinstance(value, type):
                    wanted = f"an object with the methods {', '.join(verbs)}" if verbs else self._listed()
                    raise ValueError(f"input should be {wanted}")
                return value
            full = self.full(value)
            return None if full is None else next(iter(read(full).values()))

        kinds = {
            word: core_schema.typed_dict_field(handler.generate_schema(kind), required=False)
            for word, kind in self.kinds.items()
        }
        writing = core_schema.plain_serializer_function_ser_schema(self.short)
        reading = core_schema.typed_dict_schema(kinds)
        return core_schema.no_info_wrap_validator_function(chosen, reading, serialization=writing)


def by_class(part: Any) -> Any:
    """An object that has no word in recipes, recorded: its class, and its dataclass fields or public attributes."""
    if isinstance(part, Mapping):
        return {str(key): by_class(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [by_class(value) for value in part]
    if isinstance(part, PLAIN):
        return part
    named = part if isinstance(part, type) or hasattr(part, "__qualname__") else type(part)
    name = f"{named.__module__}.{named.__qualname__}"
    if named is part:  # a function or a class
        return name
    if is_dataclass(part):
        values = {field.name: getattr(part, field.name) for field in fields(part)}
    elif hasattr(part, "__dict__"):
        values = {key: value for key, value in vars(part).items() if not key.startswith("_")}
    else:
        return {name: repr(part)}
    return {name: by_class(values)} if values else name
