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
    found = {key: value for key, value in schema.items() if key in KNOWN or key == EXCLUDED}
    if "const" in schema:
        same = [value for value in found.get("enum", [schema["const"]]) if is_equal(value, schema["const"])]
        found["enum"] = same
    if "not" in found:
        found[EXCLUDED] = [*found.get(EXCLUDED, ()), (found.pop("not"), "not")]
    if "type" in found:
        found["type"] = _types(found["type"], place)
    if "enum" in found and (not isinstance(found["enum"], list) or ("const" not in schema and not found["enum"])):
        raise RequestError(f"the JSON schema's enum at {place} must be a list with at least one value")
    if found.get("type") == [] or found.get("enum") == []:
        return False
    for bound in ("minimum", "maximum"):
        exclusive = f"exclusive{bound.capitalize()}"
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and bound in found:  # of draft 4
            found[exclusive] = found.pop(bound)
    for name in BOUNDS & found.keys():
        value = found[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST_BOUND:
            raise RequestError(f"the JSON schema's {name} at {place} must be a number, got {json.dumps(value)[:40]}")
    for name in COUNTS & found.keys():
        value = found[name]
        if isinstance(value, float) and value.is_integer():
            found[name] = value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            given = json.dumps(value)[:40]
            raise RequestError(f"the JSON schema's {name} at {place} must be a whole number from 0 on, got {given}")
    if isinstance(found.get("items"), list):  # before 2020-12
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in schema:
            found["items"] = schema["additionalItems"]
    for name in ("pattern", "format"):
        if name in found and not isinstance(found[name], tuple):
            if not isinstance(found[name], str):
                raise RequestError(f"the JSON schema's {name} at {place} must be a text, got {found[name]!r:.40}")
            found[name] = (found[name],)
    for name, kind in (("properties", Mapping), ("patternProperties", Mapping), ("required", list | tuple)):
        if name in found and not isinstance(found[name], kind):
            raise RequestError(
                f"the JSON schema's {name} at {place} must be {'a list' if name == 'required' else 'an object'}"
            )
    if not all(isinstance(each, str) for each in found.get("required", ())):
        raise RequestError(f"the JSON schema requires {found['required']!r:.40} at {place}, which must be names")
    if not isinstance(found.get("prefixItems", []), list):
        raise RequestError(f"the JSON schema's prefixItems at {place} must be a list of schemas")
    if "if" in found and not isinstance(found["if"], tuple):
        found["if"] = (found["if"], schema.get("then", True), schema.get("else", True))
    discriminator = schema.get("discriminator")  # of OpenAPI
    if isinstance(discriminator, Mapping) and isinstance(discriminator.get("propertyName"), str):
        found["required"] = [*dict.fromkeys([*found.get("required", ()), discriminator["propertyName"]])]
    if isinstance(schema.get("dependencies"), Mapping):  # before 2019-09
        for name, each in schema["dependencies"].items():
            each = {"required": each} if isinstance(each, list) else each
            found["dependentSchemas"] = {**found.get("dependentSchemas", {}), name: each}
    for name in ("$dynamicRef", "$recursiveRef"):
        if name in found:
            raise unheld(name, place, "write $ref")
    return found


def both_of(one: Any, other: Any, place: str) -> Any:
    """Return the schema of values that satisfy both schemas; combining keywords are deferred to an allOf."""
    first, second = simplified(one, place), simplified(other, place)
    if first is False or second is False:
        return False
    if not first or not second or first == second:
        return first or second
    found = first | second
    for keyword in first.keys() & second.keys():
        x, y = first[keyword], second[keyword]
        if keyword in LEAST:
            found[keyword] = min(x, y)
        elif keyword in GREATEST:
            found[keyword] = max(x, y)
        elif keyword == "type":
            common = _with_integer(x) & _with_integer(y)
            common -= {"integer"} if "number" in common else set()
            found[keyword] = [type for type in OF_TYPE if type in common]
        elif keyword == "enum":
            found[keyword] = [value for value in x if any(is_equal(value, each) for each in y)]
        elif keyword in ("allOf", EXCLUDED):
            found[keyword] = [*x, *y]
        elif keyword in ("required", "pattern", "format"):
            found[keyword] = [*x, *(each for each in y if each not in x)]
            found[keyword] = found[keyword] if keyword == "required" else tuple(found[keyword])
        elif keyword == "uniqueItems":
            found[keyword] = x or y
        elif keyword == "multipleOf" and x != y:
            if not isinstance(x, int) or not isinstance(y, int):
                raise unheld("multipleOf", place)
            found[keyword] = math.lcm(x, y)
        elif keyword in BOTH:
            found[keyword] = _put_off(x, y)
        elif keyword in COMBINING and x != y:
            again = dict(zip(("if", "then", "else"), y, strict=True)) if keyword == "if" else {keyword: y}
            found[keyword], found["allOf"] = x, [*found.get("allOf", []), again]
    if OBJECT & first.keys() and OBJECT & second.keys():
        found |= _objects(first, second)
    if "prefixItems" in found:
        lengths = [len(each.get("prefixItems", [])) for each in (first, second)]
        found["prefixItems"] = [_put_off(_item(first, at), _item(second, at)) for at in range(max(lengths))]
    if found.get("type") == [] or found.get("enum") == []:
        return False
    return found


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
    found = dict[str, Any]()
    names = dict.fromkeys([*first.get("properties", {}), *second.get("properties", {})])
    if names:
        found["properties"] = {name: _put_off(of_name(first, name), of_name(second, name)) for name in names}
    one, other = (each.get("additionalProperties", True) for each in (first, second))
    if "additionalProperties" in first or "additionalProperties" in second:
        found["additionalProperties"] = _put_off(one, other)
    one, other = (each.get("patternProperties", {}) for each in (first, second))
    patterns = dict.fromkeys([*one, *other])
    if patterns:
        found["patternProperties"] = {
            pattern: _put_off(
                one.get(pattern, first.get("additionalProperties", True)),
                other.get(pattern, second.get("additionalProperties", True)),
            )
            for pattern in patterns
        }
    return found


def of_name(schema: Mapping[str, Any], name: str) -> Any:
    """Return the schema of the property `name`: its own and its patterns', else the one of additional properties."""
    found = [schema["properties"][name]] if name in schema.get("properties", {}) else []
    found += [each for pattern, each in schema.get("patternProperties", {}).items() if is_in(name, pattern)]
    if not found:
        return schema.get("additionalProperties", schema.get("unevaluatedProperties", True))
    whole = found[0]
    for each in found[1:]:
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


def _types(said: Any, place: str) -> list[str]:
    types = said if isinstance(said, list) else [said]
    unknown = [type for type in types if type not in [*OF_TYPE]]
    if unknown or (said != [] and not types):
        raise RequestError(f"the JSON schema's type {json.dumps(said)[:40]} at {place} is none of {', '.join(OF_TYPE)}")
    return list(types)
