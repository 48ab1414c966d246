"""Merging of JSON schemas: removing annotations and older spellings, and combining two schemas into one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.ecma import is_in

BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
OBJECT = {"properties", "patternProperties", "additionalProperties", "unevaluatedProperties", "propertyNames"}
OBJECT |= {"required", "minProperties", "maxProperties"}
ARRAY = {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"}
OF_TYPE = {
    "object": OBJECT,
    "array": ARRAY | {"unevaluatedItems"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": BOUNDS | {"multipleOf"},
    "integer": BOUNDS | {"multipleOf"},
    "boolean": set(),
    "null": set(),
}
COMBINING = ("$ref", "anyOf", "oneOf", "if", "dependentRequired", "dependentSchemas", "allOf")
KNOWN = {"type", "enum", "not", *COMBINING, *(keyword for keywords in OF_TYPE.values() for keyword in keywords)}
KNOWN |= {"$dynamicRef", "$recursiveRef"}
EXCLUDED: Any = ("excluded",)  # a key that JSON cannot have, for (schema, keyword) pairs that no document may satisfy
LEAST = {"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties", "maxContains"}
GREATEST = {"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "minContains"}
BOTH = {"items", "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems"}  # schemas that both hold
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains"}
COUNTS |= {"maxContains"}
MOST_BOUND = 1e300


def unheld(keyword: str, place: str, advice: str = "leave it out") -> RequestError:
    """Return the error for a keyword that an automaton cannot follow."""
    return RequestError(f"the JSON schema says {keyword} at {place}, which cannot be held there; {advice}")


def simplified(schema: Any, place: str) -> dict[str, Any] | Literal[False]:
    """Return a schema without annotations and in its present spelling.

    False: nothing satisfies it; {}: everything does. Raises RequestError for a keyword with an invalid value.
    """
    if isinstance(schema, bool):
        return {} if schema else False
    if not isinstance(schema, Mapping):
        raise RequestError(f"the JSON schema has {json.dumps(schema)[:40]} at {place}; write an object with a type")
    plain = {key: value for key, value in schema.items() if key in KNOWN or key == EXCLUDED}
    if "const" in schema:
        same = [value for value in plain.get("enum", [schema["const"]]) if is_equal(value, schema["const"])]
        plain["enum"] = same
    if "not" in plain:
        plain[EXCLUDED] = [*plain.get(EXCLUDED, ()), (plain.pop("not"), "not")]
    if "type" in plain:
        plain["type"] = _types(plain["type"], place)
    if "enum" in plain and (not isinstance(plain["enum"], list) or ("const" not in schema and not plain["enum"])):
        raise RequestError(f"the JSON schema's enum at {place} must be a list with at least one value")
    if plain.get("type") == [] or plain.get("enum") == []:
        return False
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if isinstance(plain.get(exclusive), bool) and plain.pop(exclusive) and bound in plain:  # of draft 4
            plain[exclusive] = plain.pop(bound)
    for name in BOUNDS & plain.keys():
        value = plain[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_BOUND:
            raise RequestError(f"the JSON schema's {name} at {place} must be a number, got {json.dumps(value)[:40]}")
    for name in COUNTS & plain.keys():
        value = plain[name]
        if isinstance(value, float) and value.is_integer():
            plain[name] = value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            text = json.dumps(value)[:40]
            raise RequestError(f"the JSON schema's {name} at {place} must be a whole number from 0 on, got {text}")
    if isinstance(plain.get("items"), list):  # before 2020-12
        plain["prefixItems"] = plain.pop("items")
        if "additionalItems" in schema:
            plain["items"] = schema["additionalItems"]
    for name in ("pattern", "format"):
        if name in plain and not isinstance(plain[name], tuple):
            if not isinstance(plain[name], str):
                raise RequestError(f"the JSON schema's {name} at {place} must be a text, got {plain[name]!r:.40}")
            plain[name] = (plain[name],)
    for name, kind in (("properties", Mapping), ("patternProperties", Mapping), ("required", list | tuple)):
        if name in plain and not isinstance(plain[name], kind):
            raise RequestError(
                f"the JSON schema's {name} at {place} must be {'a list' if name == 'required' else 'an object'}"
            )
    if not all(isinstance(each, str) for each in plain.get("required", ())):
        raise RequestError(f"the JSON schema requires {plain['required']!r:.40} at {place}, which must be names")
    if not isinstance(plain.get("prefixItems", []), list):
        raise RequestError(f"the JSON schema's prefixItems at {place} must be a list of schemas")
    if "if" in plain and not isinstance(plain["if"], tuple):
        plain["if"] = (plain["if"], schema.get("then", True), schema.get("else", True))
    discriminator = schema.get("discriminator")  # of OpenAPI
    if isinstance(discriminator, Mapping) and isinstance(discriminator.get("propertyName"), str):
        plain["required"] = [*dict.fromkeys([*plain.get("required", ()), discriminator["propertyName"]])]
    if isinstance(schema.get("dependencies"), Mapping):  # before 2019-09
        for name, each in schema["dependencies"].items():
            each = {"required": each} if isinstance(each, list) else each
            plain["dependentSchemas"] = {**plain.get("dependentSchemas", {}), name: each}
    for name in ("$dynamicRef", "$recursiveRef"):
        if name in plain:
            raise unheld(name, place, "write $ref")
    return plain


def both_of(one: Any, other: Any, place: str) -> Any:
    """Return the schema of values that satisfy both schemas; False if there are clearly none.

    If both have a combining keyword (`COMBINING`) with different values, that of `other` is put into an allOf, which
    `Rewriting.ways` merges later. Raises RequestError for invalid keywords, and for different values of multipleOf that
    are not both integers.
    """
    first, second = simplified(one, place), simplified(other, place)
    if first is False or second is False:
        return False
    if not first or not second or first == second:
        return first or second
    merged = first | second
    for keyword in first.keys() & second.keys():
        x, y = first[keyword], second[keyword]
        if keyword in LEAST:
            merged[keyword] = min(x, y)
        elif keyword in GREATEST:
            merged[keyword] = max(x, y)
        elif keyword == "type":
            common = _with_integer(x) & _with_integer(y)
            common -= {"integer"} if "number" in common else set()
            merged[keyword] = [type for type in OF_TYPE if type in common]
        elif keyword == "enum":
            merged[keyword] = [value for value in x if any(is_equal(value, each) for each in y)]
        elif keyword in ("allOf", EXCLUDED):
            merged[keyword] = [*x, *y]
        elif keyword in ("required", "pattern", "format"):
            merged[keyword] = [*x, *(each for each in y if each not in x)]
            merged[keyword] = merged[keyword] if keyword == "required" else tuple(merged[keyword])
        elif keyword == "uniqueItems":
            merged[keyword] = x or y
        elif keyword == "multipleOf" and x != y:
            if not isinstance(x, int) or not isinstance(y, int):
                raise unheld("multipleOf", place)
            merged[keyword] = math.lcm(x, y)
        elif keyword in BOTH:
            merged[keyword] = _put_off(x, y)
        elif keyword in COMBINING and x != y:
            again = dict(zip(("if", "then", "else"), y, strict=True)) if keyword == "if" else {keyword: y}
            merged[keyword], merged["allOf"] = x, [*merged.get("allOf", []), again]
    if OBJECT & first.keys() and OBJECT & second.keys():
        merged |= _objects(first, second)
    if "prefixItems" in merged:
        lengths = [len(each.get("prefixItems", [])) for each in (first, second)]
        merged["prefixItems"] = [_put_off(_item(first, index), _item(second, index)) for index in range(max(lengths))]
    if merged.get("type") == [] or merged.get("enum") == []:
        return False
    return merged


def _put_off(one: Any, other: Any) -> Any:
    """Return a schema of the values that satisfy both, as an allOf that `Rewriting.ways` merges later.

    No allOf is needed if the schemas are equal, or if one allows everything or nothing.
    """
    if one is False or other is False:
        return False
    if one in (True, {}) or one == other:
        return other
    return one if other in (True, {}) else {"allOf": [one, other]}


def _item(schema: Mapping[str, Any], index: int) -> Any:
    items = schema.get("prefixItems", [])
    return items[index] if index < len(items) else schema.get("items", True)


def _objects(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the property keywords of two object schemas."""
    merged = dict[str, Any]()
    names = dict.fromkeys([*first.get("properties", {}), *second.get("properties", {})])
    if names:
        merged["properties"] = {name: _put_off(of_name(first, name), of_name(second, name)) for name in names}
    one, other = (each.get("additionalProperties", True) for each in (first, second))
    if "additionalProperties" in first or "additionalProperties" in second:
        merged["additionalProperties"] = _put_off(one, other)
    one, other = (each.get("patternProperties", {}) for each in (first, second))
    patterns = dict.fromkeys([*one, *other])
    if patterns:
        merged["patternProperties"] = {
            pattern: _put_off(
                one.get(pattern, first.get("additionalProperties", True)),
                other.get(pattern, second.get("additionalProperties", True)),
            )
            for pattern in patterns
        }
    return merged


def of_name(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of the property `name`: its own and its patterns', else the one of additional properties."""
    schemas = [schema["properties"][name]] if name in schema.get("properties", {}) else []
    schemas += [each for pattern, each in schema.get("patternProperties", {}).items() if is_in(name, pattern)]
    if not schemas:
        return schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
    whole = schemas[0]
    for each in schemas[1:]:
        whole = _put_off(whole, each)
    return whole


def is_equal(one: Any, other: Any) -> bool:
    """True if two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(is_equal(value, other[key]) for key, value in one.items())
    return bool(one == other)


def written_types(plain: Mapping[str, Any]) -> list[str]:
    """Return the types of a plain schema: its `type`, else the types of its keywords, else all types."""
    if "type" in plain:
        return list(plain["type"])
    types = [type for type in OF_TYPE if type != "integer" and OF_TYPE[type] & plain.keys()]
    return types or [type for type in OF_TYPE if type != "integer"]


def _with_integer(types: list[str]) -> set[str]:
    return {*types, "integer"} if "number" in types else {*types}


def _types(value: Any, path: str) -> list[str]:
    types = value if isinstance(value, list) else [value]
    unknown = [type for type in types if type not in [*OF_TYPE]]
    if unknown or (value != [] and not types):
        raise RequestError(f"the JSON schema's type {json.dumps(value)[:40]} at {path} is none of {', '.join(OF_TYPE)}")
    return list(types)
