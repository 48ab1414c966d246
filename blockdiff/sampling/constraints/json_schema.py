"""From a JSON schema to a regular expression of its documents; what an expression cannot hold is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from blockdiff.errors import NoText, RequestError
from blockdiff.sampling.constraints.number_range import NumberRange
from blockdiff.sampling.constraints.outlines import seconds_left
from blockdiff.sampling.constraints.regex import from_ecma, regex_automaton, without_ends

# Keywords that say nothing of which documents are valid, or where other schemas lie.
SILENT = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly"}
SILENT |= {"writeOnly", "$defs", "definitions"}
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
REFS_WITHIN = 4  # a schema that refers to itself is written out so deep
MOST_REFS = 5_000  # that are followed
MOST = 1e300  # a bound is no larger than this
MOST_WRITTEN = 1 << 20  # characters of an expression
OF_TYPE = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": BOUNDS,
    "integer": BOUNDS,
    "boolean": set(),
    "null": set(),
}
# A day of the years 0001 to 9999, those of February by the years that leap
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_LONG, _SHORT = "(?:0[13578]|1[02])", "(?:0[469]|11)"  # months, of 31 and of 30 days
_DATE = f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:{_LONG}|{_SHORT})-(?:29|30)|{_LONG}-31)|{_LEAP_YEAR}-02-29)"
_HOUR, _MINUTE = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = rf"{_HOUR}:{_MINUTE}:{_MINUTE}(?:\.[0-9]+)?(?:Z|[+-]{_HOUR}:{_MINUTE})"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_OCTET = "(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
FORMATS = {
    "date": _DATE,  # RFC 3339, as are the next two; no leap seconds
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})+",  # lengths are not counted
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
}
_CHARACTER = r'([^"\\\x00-\x1F\x7F-\x9F]|\\["\\/bfnrt])'  # of a JSON string
_INTEGER = "(-)?(0|[1-9][0-9]*)"
HINTS = {
    "oneOf": "write anyOf",
    "allOf": "write the schemas as one",
}


def schema_regex(schema: str | Mapping[str, Any]) -> str:
    """A regular expression whose matches are documents of the schema, with one space or none between their parts.

    Not every document of it matches: properties come in the order of the schema, and others than the named ones not at
    all. RequestError for a schema that is no JSON, or says what the expression would not hold.
    """
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not valid JSON ({error})") from None
    writer = _Writer(value)
    try:
        written = writer.write(value, "", ())
    except RecursionError:
        raise RequestError("the JSON schema is nested too deeply") from None
    if written is None:
        raise RequestError(
            f"the JSON schema refers to itself without end ($ref {writer.last_ref!r}); "
            "leave that property out of required, or give it an anyOf with another way"
        )
    return written


class _Writer:
    """Writes the schemas within a document as expressions: None for one that no finite document satisfies.

    where: the place of a schema, for messages; within: the $refs around it.
    """

    def __init__(self, root: Any):
        self.root, self.refs, self.last_ref = root, 0, ""

    def write(self, schema: Any, where: str, within: tuple[str, ...]) -> str | None:
        """The expression of a schema."""
        seconds_left()
        place = where or "its top"
        if not isinstance(schema, Mapping):
            raise RequestError(f"the JSON schema has {json.dumps(schema)[:40]} at {place}; write an object with a type")
        said = set(schema) - SILENT
        if "$ref" in said:
            _allow(said, {"$ref"}, place)
            return self._referred(schema["$ref"], place, within)
        if "anyOf" in said:
            _allow(said, {"anyOf"}, place)
            if not isinstance(schema["anyOf"], list) or not schema["anyOf"]:
                raise RequestError(f"the JSON schema's anyOf at {place} must be a list of schemas")
            return _one_of(self.write(each, f"{where}/anyOf/{n}", within) for n, each in enumerate(schema["anyOf"]))
        if said & {"enum", "const"}:
            return _values(schema, said, place)
        if "type" not in said and "properties" not in said:
            _allow(said, {"type", *(keyword for keywords in OF_TYPE.values() for keyword in keywords)}, place)
            raise RequestError(f"the JSON schema says no type at {place}; add one")
        types = _types(schema, place)
        _allow(said, {"type", *(keyword for type in types for keyword in OF_TYPE[type])}, place)
        return _one_of(self._of_type(type, schema, where, within) for type in types)

    def _referred(self, name: Any, place: str, within: tuple[str, ...]) -> str | None:
        """The expression of the schema that a $ref names."""
        if name != "#" and not str(name).startswith("#/"):
            raise RequestError(
                f"the JSON schema refers to {name!r} at {place}; only # can be looked up, and what follows #/"
            )
        self.refs, self.last_ref = self.refs + 1, name
        if self.refs > MOST_REFS:
            raise RequestError(f"the JSON schema follows more than {MOST_REFS:,} $refs, last {name!r}; write fewer")
        if name in within and len(within) >= REFS_WITHIN:
            return None
        found = self.root
        for key in unquote(name[1:]).split("/")[1:]:  # a JSON pointer
            key = key.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key) if isinstance(found, list) else key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise RequestError(f"the JSON schema cannot be used: it has no {name!r} to refer to") from None
        return self.write(found, name[1:], (*within, name))

    def _of_type(self, type: str, schema: Mapping[str, Any], where: str, within: tuple[str, ...]) -> str | None:
        """The expression of the documents of one type."""
        place = where or "its top"
        if type == "object":
            return self._object(schema, where, within)
        if type == "array":
            return self._array(schema, where, within)
        if type == "string":
            return _string(schema, place)
        if type == "null":
            return "null"
        if type == "boolean":
            return "(true|false)"
        if BOUNDS & set(schema):
            return _range(schema, type, place)
        return _INTEGER if type == "integer" else rf"({_INTEGER})(\.[0-9]+)?([eE][+-][0-9]+)?"

    def _object(self, schema: Mapping[str, Any], where: str, within: tuple[str, ...]) -> str | None:
        place, properties, required = where or "its top", schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
            keyword, kind = ("required", "a list") if isinstance(properties, Mapping) else ("properties", "an object")
            raise RequestError(f"the JSON schema's {keyword} at {place} must be {kind}")
        if missing := [name for name in required if name not in [*properties]]:
            raise RequestError(f"the JSON schema requires {missing[0]!r} at {place}, but properties does not have it")
        if not properties:
            if not isinstance(schema.get("additionalProperties"), Mapping):
                raise RequestError(f"the JSON schema's object at {place} has no properties; name them")
            value = self.write(schema["additionalProperties"], f"{where}/additionalProperties", within)
            entry = rf'"{_CHARACTER}*"[ ]?:[ ]?{value}'
            return r"\{[ ]?\}" if value is None else rf"\{{[ ]?({entry}([ ]?,[ ]?{entry})*)?[ ]?\}}"
        entries = list[tuple[str, bool]]()  # with True for those that are required
        for name, inner in properties.items():
            if json.dumps(name, ensure_ascii=False) != f'"{name}"':
                raise RequestError(f"the JSON schema's property {name!r} at {place} needs escapes; name it otherwise")
            value = self.write(inner, f"{where}/properties/{name}", within)
            if value is not None:
                entries.append((rf"[ ]?{_literal(name)}[ ]?:[ ]?{value}", name in required))
            elif name in required:
                return None
        return rf"\{{{_in_order(entries)}[ ]?\}}"

    def _array(self, schema: Mapping[str, Any], where: str, within: tuple[str, ...]) -> str | None:
        place = where or "its top"
        if "prefixItems" in schema:
            _allow(set(schema) - SILENT, {"type", "prefixItems"}, place)
            inner = schema["prefixItems"]
            if not isinstance(inner, list):
                raise RequestError(f"the JSON schema's prefixItems at {place} must be a list of schemas")
            items = [self.write(each, f"{where}/prefixItems/{n}", within) for n, each in enumerate(inner)]
            return None if None in items else rf"\[[ ]?{'[ ]?,[ ]?'.join(map(str, items))}[ ]?\]"
        if "items" not in schema:
            raise RequestError(f"the JSON schema's array at {place} has no items; say what it holds")
        least, most = _counts(schema, "Items", place)
        item = self.write(schema["items"], f"{where}/items", within)
        if item is None or most == 0:
            return None if least else r"\[[ ]?\]"
        others = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return rf"\[[ ]?(({item})(,[ ]?({item})){others}){'' if least else '?'}[ ]?\]"


def _values(schema: Mapping[str, Any], said: set[str], place: str) -> str | None:
    """The expression of the values of an enum, or of a const."""
    keyword = "enum" if "enum" in said else "const"
    _allow(said, {keyword, "type"}, place)
    values = schema["enum"] if keyword == "enum" else [schema["const"]]
    if not isinstance(values, list) or not values:
        raise RequestError(f"the JSON schema's enum at {place} must be a list with at least one value")
    for value in values:
        if "type" in said and not any(_holds(value, type) for type in _types(schema, place)):
            raise RequestError(f"the JSON schema's value {json.dumps(value)[:40]} at {place} is not of its type")
    return _one_of(map(_literal, values))


def _in_order(entries: list[tuple[str, bool]]) -> str:
    """The expression of properties in their order with commas between; those that are not required may be left out."""
    # One property is certainly there, the first required one, or else any: those before it have their comma after them,
    # and those after it before them.
    required = [n for n, (_, is_required) in enumerate(entries) if is_required]
    certain = required[:1] or range(len(entries))
    if len(certain) * sum(len(entry) for entry, _ in entries) > MOST_WRITTEN:
        raise _too_long()
    ways = []
    for first in certain:
        after = entries[first + 1 :] if required else []
        parts = [f"({entry}[ ]?,)?" for entry, _ in entries[:first]] + [entries[first][0]]
        ways.append("".join(parts + [f"[ ]?,{each}" if is_in else f"([ ]?,{each})?" for each, is_in in after]))
    return ways[0] if required else f"({'|'.join(ways)})?"


def _one_of(ways: Iterable[str | None]) -> str | None:
    """An expression of what any of some expressions matches; None where there is none."""
    found = [way for way in ways if way is not None]
    if sum(map(len, found)) > MOST_WRITTEN:
        raise _too_long()
    return f"({'|'.join(found)})" if len(found) > 1 else found[0] if found else None


def _too_long() -> RequestError:
    return RequestError(
        f"the JSON schema's expression has more than {MOST_WRITTEN:,} characters; name fewer properties, or require one"
    )


def _literal(value: Any) -> str:
    """The expression of one value."""
    if isinstance(value, Mapping):
        entries = [f"[ ]?{_literal(key)}[ ]?:[ ]?{_literal(inner)}" for key, inner in value.items()]
        return rf"\{{{'[ ]?,'.join(entries)}[ ]?\}}"
    if isinstance(value, list):
        return rf"\[[ ]?{'[ ]?,[ ]?'.join(map(_literal, value))}[ ]?\]"
    return re.escape(json.dumps(value, ensure_ascii=False))


def _counts(schema: Mapping[str, Any], of: str, place: str) -> tuple[int, int | None]:
    """The values of minX and maxX (None: no end)."""
    for name in (f"min{of}", f"max{of}"):
        value = schema.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            given = json.dumps(value)[:40]
            raise RequestError(f"the JSON schema's {name} at {place} must be a whole number from 0 on, got {given}")
    least, most = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    if most is not None and most < least:
        raise RequestError(f"the JSON schema's max{of} {most} at {place} is less than its min{of} {least}")
    return least, most


def _string(schema: Mapping[str, Any], place: str) -> str:
    """The expression of strings: of a pattern, of a format, or of some length."""
    for keyword in ("pattern", "format"):
        if keyword in schema:
            _allow(set(schema) & OF_TYPE["string"], {keyword}, place)
    if "pattern" in schema:
        pattern = schema["pattern"]
        if not isinstance(pattern, str):
            raise RequestError(f"the JSON schema's pattern at {place} must be a text")
        if _needs_escapes(pattern):
            raise RequestError(
                f"the JSON schema's pattern {pattern!r:.60} at {place} matches quotes, backslashes or control "
                "characters, which would need escapes; write it without"
            )
        return f'"(?:{without_ends(from_ecma(pattern))})"'
    if "format" in schema:
        name = schema["format"]
        if not isinstance(name, str) or name not in FORMATS:
            raise RequestError(f"the JSON schema's format {name!r} at {place} is none of {', '.join(FORMATS)}")
        return f'"(?:{FORMATS[name]})"'
    least, most = _counts(schema, "Length", place)
    is_any = least == 0 and most is None
    return f'"{_CHARACTER}{"*" if is_any else f"{{{least},{most if most is not None else str()}}}"}"'


@lru_cache(maxsize=256)
def _needs_escapes(pattern: str) -> bool:
    """True for a pattern whose matches are not all what stands between the quotes of a JSON string.

    Raises RequestError for one that is too large to be checked.
    """
    breaking = regex_automaton('(?s).*["\\\\\\x00-\\x1f].*')
    matches = regex_automaton(from_ecma(pattern))
    try:
        matches.both(breaking)
    except NoText:
        return False
    return True


def _range(schema: Mapping[str, Any], type: str, place: str) -> str:
    """An expression of the numbers within the bounds of a schema."""
    for name in sorted(BOUNDS & set(schema)):
        value = schema[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST:
            raise RequestError(f"the JSON schema's {name} at {place} must be a number, got {json.dumps(value)[:40]}")
        if type == "number" and value != int(value):
            raise RequestError(
                f"the JSON schema's {name} {value} at {place} must be a whole number, except for integers"
            )
    least, most = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
    over, under = schema.get("exclusiveMinimum", -math.inf), schema.get("exclusiveMaximum", math.inf)
    is_over, is_under = over >= least and over > -math.inf, under <= most and under < math.inf
    least, most = max(least, over), min(most, under)
    if type == "integer":
        is_over, is_under = is_over and least == math.floor(least), is_under and most == math.ceil(most)
        least = least if math.isinf(least) else math.ceil(least)
        most = most if math.isinf(most) else math.floor(most)
    numbers = NumberRange(least, most, is_over, is_under)
    found = numbers.integers() if type == "integer" else numbers.numbers()
    if found is None:
        raise RequestError(f"the JSON schema leaves no {type} between its bounds at {place}; widen them")
    return f"(?:{found})"


def _allow(said: set[str], allowed: set[str], place: str) -> None:
    """Raise RequestError for a keyword beside those that are written into the expression."""
    others = sorted(said - allowed)
    if others:
        hint = HINTS.get(others[0], "leave it out")
        raise RequestError(
            f"the JSON schema says {others[0]} at {place}, which a regular expression cannot hold there; {hint}"
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


def _holds(value: Any, type: str) -> bool:
    if isinstance(value, bool) or value is None:
        return type == ("null" if value is None else "boolean")
    kinds = {"object": Mapping, "array": list, "string": str, "number": int | float, "integer": int}
    return isinstance(value, kinds.get(type, ()))
