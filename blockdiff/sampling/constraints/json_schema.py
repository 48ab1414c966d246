"""From a JSON schema to a regular expression of its documents; what an expression cannot hold is refused by name.

The numbers between two bounds and the strings of a pattern or format are expressions of their own, which
outlines-core does not make.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.outlines import call_outlines
from blockdiff.sampling.constraints.regex import from_ecma, regex_automaton, without_ends

# Keywords that say nothing of which documents are valid, or where other schemas lie.
SILENT = {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly"}
SILENT |= {"writeOnly", "$defs", "definitions"}
BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
MARKED = BOUNDS | {"pattern", "format"}  # whose expressions are made here
REFS_WITHIN = 4  # a schema that refers to itself is written out so deep
MOST_REFS = 5_000  # that are followed
MOST = 1e300  # a bound is no larger than this
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
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not valid JSON ({error})") from None
    try:
        _check(value, "")
        followed: list[str] = []
        value = _unrolled(value, value, (), followed)
        if value is None:
            raise RequestError(
                f"the JSON schema refers to itself without end ($ref {followed[-1]!r}); "
                "leave that property out of required, or give it an anyOf with another way"
            )
        # outlines-core knows no bounds, writes patterns without a group and formats loosely: it gets a number in
        # their place, which it leaves as it is
        mark = 10**9
        while str(mark) in text:
            mark += 1
        expressions: list[str] = []
        answer, _ = call_outlines(schema=json.dumps(_with_marks(value, "", mark * 10**6, expressions)))
    except RecursionError:
        raise RequestError("the JSON schema is nested too deeply") from None
    if "error" in answer:
        raise RequestError(f"the JSON schema cannot be used: {answer['error'][:160]}")
    return re.sub(rf"{mark}(\d{{6}})", lambda found: expressions[int(found[1])], answer["regex"])


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
        if schema["$ref"] != "#" and not str(schema["$ref"]).startswith("#/"):
            raise RequestError(
                f"the JSON schema refers to {schema['$ref']!r} at {place}; only # can be looked up, and what follows #/"
            )
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
            if "type" in said and not any(_holds(value, type) for type in _types(schema, place)):
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
        if not isinstance(schema["pattern"], str):
            raise RequestError(f"the JSON schema's pattern at {place} must be a text")
        _check_pattern(schema["pattern"], place)
    if "format" in said:
        _allow(said, {"type", "format"}, place)
        if not isinstance(schema["format"], str) or schema["format"] not in FORMATS:
            said_format = repr(schema["format"])
            raise RequestError(f"the JSON schema's format {said_format} at {place} is none of {', '.join(FORMATS)}")


def _unrolled(schema: Any, root: Any, within: tuple[str, ...], followed: list[str]) -> dict[str, Any] | None:
    """The schema with what its $refs say in their place; None where no document of it is finite so deep.

    within: the $refs around it. followed: every $ref that was followed, which gets longer.
    """
    if "$ref" in schema:
        name = schema["$ref"]
        is_new = name not in followed
        followed.append(name)
        if len(followed) > MOST_REFS:
            raise RequestError(f"the JSON schema follows more than {MOST_REFS:,} $refs, last {name!r}; write fewer")
        if name in within and len(within) >= REFS_WITHIN:
            return None
        found = _at(root, name)
        if is_new:
            _check(found, name[1:])
        return _unrolled(found, root, (*within, name), followed)
    schema = {key: value for key, value in schema.items() if key not in ("$defs", "definitions")}
    if {"enum", "const"} & set(schema):
        return schema
    impossible = None  # a type that has no finite document
    if "anyOf" in schema:
        ways = [_unrolled(inner, root, within, followed) for inner in schema["anyOf"]]
        schema["anyOf"] = [way for way in ways if way is not None]
        return schema if schema["anyOf"] else None
    if schema.get("properties"):
        inner = {name: _unrolled(each, root, within, followed) for name, each in schema["properties"].items()}
        schema["properties"] = {name: each for name, each in inner.items() if each is not None}
        if not set(schema.get("required", ())) <= set(schema["properties"]):
            impossible = "object"
    elif isinstance(schema.get("additionalProperties"), Mapping):
        schema["additionalProperties"] = _unrolled(schema["additionalProperties"], root, within, followed)
        if schema["additionalProperties"] is None:  # the empty one is left
            del schema["additionalProperties"]
            schema["properties"] = {}
    if "prefixItems" in schema:
        schema["prefixItems"] = [_unrolled(each, root, within, followed) for each in schema["prefixItems"]]
        if None in schema["prefixItems"]:
            impossible = "array"
    elif "items" in schema:
        schema["items"] = _unrolled(schema["items"], root, within, followed)
        if schema["items"] is None:
            schema |= {"items": {"type": "null"}, "maxItems": 0}
            if schema.get("minItems", 0) != 0:
                impossible = "array"
    if impossible is None:
        return schema
    types = [type for type in _types(schema, "its top") if type != impossible]
    return {key: schema[key] for key in schema if key not in OF_TYPE[impossible]} | {"type": types} if types else None


def _at(root: Any, name: str) -> Any:
    """The part of a document that a JSON pointer after # names."""
    found = root
    for key in unquote(name[1:]).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key) if isinstance(found, list) else key]
        except (KeyError, IndexError, TypeError, ValueError):
            raise RequestError(f"the JSON schema cannot be used: it has no {name!r} to refer to") from None
    return found


def _with_marks(schema: Any, where: str, mark: int, expressions: list[str]) -> Any:
    """The schema with the constant `mark` + n where `expressions`, which get longer, say what stands there."""
    if isinstance(schema, list):
        return [_with_marks(inner, f"{where}/{n}", mark, expressions) for n, inner in enumerate(schema)]
    if not isinstance(schema, Mapping):
        return schema
    schema = dict(schema)
    for name in ("$defs", "definitions", "properties"):
        for key, inner in schema.get(name, {}).items():
            schema[name] = {**schema[name], key: _with_marks(inner, f"{where}/{name}/{key}", mark, expressions)}
    for name in ("anyOf", "prefixItems", "items", "additionalProperties"):
        if name in schema:
            schema[name] = _with_marks(schema[name], f"{where}/{name}", mark, expressions)
    if not MARKED & set(schema):
        return schema
    ways: list[dict[str, Any]] = []
    for type in _types(schema, where or "its top"):
        own = OF_TYPE[type] & set(schema)
        if not MARKED & own:
            ways.append({"type": type, **{name: schema[name] for name in own}})
            continue
        expressions.append(_string(schema) if type == "string" else _range(schema, type, where or "its top"))
        ways.append({"const": mark + len(expressions) - 1})
    groups = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {**groups, "anyOf": ways}


def _string(schema: Mapping[str, Any]) -> str:
    """An expression of the strings of a pattern or a format."""
    inner = without_ends(from_ecma(schema["pattern"])) if "pattern" in schema else FORMATS[schema["format"]]
    return f'"(?:{inner})"'


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


def _check_pattern(pattern: str, place: str) -> None:
    """Raise RequestError for a pattern whose matches are not what stands between the quotes of a JSON string."""
    breaking = regex_automaton('(?s).*["\\\\\\x00-\\x1f].*')
    matches = regex_automaton(from_ecma(pattern))
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


def _holds(value: Any, type: str) -> bool:
    if isinstance(value, bool) or value is None:
        return type == ("null" if value is None else "boolean")
    kinds = {"object": Mapping, "array": list, "string": str, "number": int | float, "integer": int}
    return isinstance(value, kinds.get(type, ()))


@dataclass(frozen=True)
class NumberRange:
    """The numbers from `least` to `most`; `over` leaves out the least one and `under` the most.

    Bounds are whole numbers, or infinite where there is none.
    """

    least: float = -math.inf
    most: float = math.inf
    over: bool = False
    under: bool = False

    def integers(self) -> str | None:
        """An expression of the integers; None where there is none."""
        least, most = self.least + self.over, self.most - self.under
        below = _upto(-most, -least, 1) and f"-(?:{_upto(-most, -least, 1)})"
        return _any(below, _upto(least, most, 0))

    def numbers(self) -> str | None:
        """An expression of the numbers without exponents; None where there is none."""
        below = NumberRange(-self.most, -self.least, self.under, self.over)._from_zero()
        return _any(below and f"-(?:{below})", self._from_zero())

    def _from_zero(self) -> str | None:
        """Those of at least 0, without a sign."""
        is_over = self.over and self.least >= 0
        least = max(self.least, 0)
        if self.most < least:
            return None
        whole = _upto(least + is_over, self.most - 1, 0)  # with any digits after the point
        first = rf"{int(least)}\.[0-9]*[1-9][0-9]*" if is_over and least < self.most else None
        is_last = math.isfinite(self.most) and not self.under and not (is_over and self.most == least)
        last = rf"{int(self.most)}(?:\.0+)?" if is_last else None
        return _any(whole and rf"(?:{whole})(?:\.[0-9]+)?", first, last)


def _any(*ways: str | None) -> str | None:
    return "|".join(way for way in ways if way) or None


def _upto(least: float, most: float, smallest: int) -> str | None:
    """The integers of at least `smallest`, 0 or 1, between two bounds; None where there is none."""
    low = int(max(least, smallest))
    if low > most:
        return None
    ways, length = [], len(str(low))
    if math.isinf(most):
        ways.append(rf"[1-9][0-9]{{{length},}}")
        most = 10**length - 1
    high = int(most)
    while low <= high:  # as many digits as the lowest has, then one more
        end = min(high, 10 ** len(str(low)) - 1)
        ways.append(_alike_long(str(low), str(end)))
        low = end + 1
    return "|".join(ways)


def _alike_long(low: str, high: str) -> str:
    """The numbers of as many digits between two."""
    if not low:
        return ""
    rest = len(low) - 1
    any_rest = f"[0-9]{{{rest}}}" if rest else ""
    if low[0] == high[0]:
        return low[0] + _group(_alike_long(low[1:], high[1:]))
    ways, first, last = [], int(low[0]), int(high[0])
    if int(low[1:] or 0):
        ways.append(low[0] + _group(_alike_long(low[1:], "9" * rest)))
        first += 1
    if high[1:] != "9" * rest:
        ways.append(high[0] + _group(_alike_long("0" * rest, high[1:])))
        last -= 1
    if first <= last:
        ways.append(f"[{first}-{last}]{any_rest}")
    return "|".join(ways)


def _group(regex: str) -> str:
    return f"(?:{regex})" if "|" in regex else regex
