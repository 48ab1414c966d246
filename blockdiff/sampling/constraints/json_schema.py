"""From a JSON schema to a regular expression of its documents; what an expression cannot hold is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.byte_automaton import of_regex

# Keywords that say nothing of which documents are valid, or where other schemas lie.
SILENT = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly"}
SILENT |= {"writeOnly", "$defs", "definitions"}
OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": set(),
    "integer": set(),
    "boolean": set(),
    "null": set(),
}
FORMATS = ("date", "date-time", "uuid")
HINTS = {
    "oneOf": "write anyOf",
    "allOf": "write the schemas as one",
    "minimum": "write a pattern or an enum",
    "maximum": "write a pattern or an enum",
}


def regex_of_schema(schema: str | Mapping[str, Any]) -> str:
    """A regular expression whose matches are documents of the schema, with one space or none between their parts.

    Not every document of it matches: properties come in the order of the schema, and others than the named ones not at
    all. RequestError for a schema that is no JSON, or says what the expression would not hold.
    """
    try:
        from outlines_core.json_schema import build_regex_from_schema
    except ImportError:
        raise RequestError("a JSON schema needs the package outlines-core; pip install outlines-core") from None
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not valid JSON ({error})") from None
    try:
        _check(value, "")
        return str(build_regex_from_schema(text))
    except RecursionError:
        raise RequestError("the JSON schema is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise RequestError(f"the JSON schema cannot be used: {' '.join(str(error).split())[:160]}") from None


def _check(schema: Any, where: str) -> None:
    """Raise RequestError for what outlines-core would leave out of the expression, or write into it wrongly."""
    place = where or "its top"
    if not isinstance(schema, Mapping):
        raise RequestError(f"the JSON schema has {json.dumps(schema)[:40]} at {place}; write an object with a type")
    for group in ("$defs", "definitions", "properties"):
        if not isinstance(schema.get(group, {}), Mapping):
            raise RequestError(f"the JSON schema's {group} at {place} must be an object")
    for group in ("$defs", "definitions"):
        for name, inner in schema.get(group, {}).items():
            _check(inner, f"{where}/{group}/{name}")
    said = set(schema) - SILENT
    if "$ref" in said:
        _allow(said, {"$ref"}, place)
        if not str(schema["$ref"]).startswith("#"):
            raise RequestError(f"the JSON schema refers to {schema['$ref']!r} at {place}; only # can be looked up")
    elif "anyOf" in said:
        _allow(said, {"anyOf"}, place)
        if not isinstance(schema["anyOf"], list) or not schema["anyOf"]:
            raise RequestError(f"the JSON schema's anyOf at {place} must be a list of schemas")
        for number, inner in enumerate(schema["anyOf"]):
            _check(inner, f"{where}/anyOf/{number}")
    elif said & {"enum", "const"}:
        keyword = "enum" if "enum" in said else "const"
        _allow(said, {keyword, "type"}, place)
        values = schema["enum"] if keyword == "enum" else [schema["const"]]
        if not isinstance(values, list) or not values:
            raise RequestError(f"the JSON schema's enum at {place} must be a list with at least one value")
        for value in values:
            if "type" in said and not any(_is_of(value, type) for type in _types(schema, place)):
                raise RequestError(f"the JSON schema's value {json.dumps(value)[:40]} at {place} is not of its type")
    else:
        _check_types(schema, said, where)


def _check_types(schema: Mapping[str, Any], said: set[str], where: str) -> None:
    place = where or "its top"
    if "type" not in said and "properties" not in said:
        _allow(said, {"type", *(keyword for keywords in OF_TYPE.values() for keyword in keywords)}, place)
        raise RequestError(f"the JSON schema says no type at {place}; add one")
    types = _types(schema, place)
    _allow(said, {"type", *(keyword for type in types for keyword in OF_TYPE[type])}, place)
    properties = schema.get("properties", {})
    for name, inner in properties.items():
        if json.dumps(name, ensure_ascii=False) != f'"{name}"':
            raise RequestError(f"the JSON schema's property {name!r} at {place} needs escapes; name it otherwise")
        _check(inner, f"{where}/properties/{name}")
    missing = [name for name in schema.get("required", ()) if name not in properties]
    if missing:
        raise RequestError(f"the JSON schema requires {missing[0]!r} at {place}, but properties does not have it")
    if not properties and "object" in types:
        if not isinstance(schema.get("additionalProperties"), Mapping):
            raise RequestError(f"the JSON schema's object at {place} has no properties; name them")
        _check(schema["additionalProperties"], f"{where}/additionalProperties")
    if "prefixItems" in said:
        _allow(said, {"type", "prefixItems"}, place)
        for number, inner in enumerate(schema["prefixItems"]):
            _check(inner, f"{where}/prefixItems/{number}")
    elif "array" in types:
        if "items" not in said:
            raise RequestError(f"the JSON schema's array at {place} has no items; say what it holds")
        _check(schema["items"], f"{where}/items")
    if "pattern" in said:
        _allow(said, {"type", "pattern"}, place)
        _check_pattern(str(schema["pattern"]), place)
    if "format" in said:
        _allow(said, {"type", "format"}, place)
        if schema["format"] not in FORMATS:
            said_format = repr(schema["format"])
            raise RequestError(f"the JSON schema's format {said_format} at {place} is none of {', '.join(FORMATS)}")


def _allow(said: set[str], allowed: set[str], place: str) -> None:
    """Raise RequestError for a keyword beside those that are written into the expression."""
    others = sorted(said - allowed)
    if others:
        hint = HINTS.get(others[0], "leave it out")
        raise RequestError(
            f"the JSON schema says {others[0]} at {place}, which a regular expression cannot hold there; {hint}"
        )


def _check_pattern(pattern: str, place: str) -> None:
    """Raise RequestError for a pattern whose matches are not what stands between the quotes of a JSON string."""
    breaking = of_regex('(?s).*["\\\\\\x00-\\x1f].*')
    matches = of_regex(pattern)
    try:
        matches.both(breaking)
    except RequestError:  # the two have no text in common
        return
    raise RequestError(
        f"the JSON schema's pattern {pattern!r:.60} at {place} matches quotes, backslashes or control characters, "
        "which would need escapes; write it without"
    )


def _types(schema: Mapping[str, Any], place: str) -> list[str]:
    said = schema.get("type", "object")
    types = said if isinstance(said, list) else [said]
    unknown = [type for type in types if type not in OF_TYPE]
    if unknown or not types:
        raise RequestError(f"the JSON schema's type {json.dumps(said)[:40]} at {place} is none of {', '.join(OF_TYPE)}")
    if "properties" in schema and "object" not in types:
        raise RequestError(f"the JSON schema has properties at {place}, but its type is not object")
    return types


def _is_of(value: Any, type: str) -> bool:
    if isinstance(value, bool) or value is None:
        return type == ("null" if value is None else "boolean")
    kinds = {"object": Mapping, "array": list, "string": str, "number": int | float, "integer": int}
    return isinstance(value, kinds.get(type, ()))
