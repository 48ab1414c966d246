"""The difference of two plain schemas, as plain schemas: for `oneOf`, `not` and the `else` of an `if`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from blockdiff.sampling.constraints.ecma import is_in
from blockdiff.sampling.constraints.schema_merging import OF_TYPE, of_name, simplified, written_types

Plain = dict[str, Any]
# Plain schemas for documents that satisfy the first schema and not the second; None if no such schemas are known
Difference = Callable[[Any, Any], "list[Plain] | None"]
Holds = Callable[[Any, Any], bool]


def apart(one: Plain, other: Plain, holds: Holds, difference: Difference) -> list[Plain] | None:
    """Return plain schemas for documents that satisfy `one` and not `other`; None if no such schemas are known.

    The returned schemas may accept less than the difference. `other` may accept more than the schema to exclude, which
    only makes the result smaller. holds(value, schema): whether a value satisfies a schema. difference(a, b): the same
    as `apart` for inner schemas, which need not be plain.
    """
    if "enum" in one:
        values = [value for value in one["enum"] if not holds(value, other)]
        return [one | {"enum": values}] if values else []
    types, schemas = list[str](), list[Plain]()
    for type in written_types(one):
        if not _is_of(type, other):
            types.append(type)
        elif type in ("boolean", "null"):
            values = [value for value in ((True, False) if type == "boolean" else (None,)) if not holds(value, other)]
            schemas += [{"enum": values}] if values else []
        else:
            ways = _BY_TYPE[type](one | {"type": [type]}, other, difference)
            if "enum" in other:
                ways = _without_values(one | {"type": [type]}, other["enum"])
            if not ways:
                return None
            schemas += ways
    return ([one | {"type": types}] if types else []) + schemas


def _is_of(type: str, other: Plain) -> bool:
    """True if the other schema allows values of a type."""
    if "enum" in other:
        kinds = {"string": str, "number": int | float, "integer": int | float, "object": Mapping, "array": list}
        kind = kinds.get(type, bool if type == "boolean" else None.__class__)
        is_number = type in ("number", "integer")
        return any(isinstance(each, kind) and not (is_number and isinstance(each, bool)) for each in other["enum"])
    types = other.get("type", [*OF_TYPE])
    return type in types or (type in ("number", "integer") and bool({"number", "integer"} & {*types}))


def _without_values(one: Plain, values: list[Any]) -> list[Plain]:
    """Return schemas for the documents of `one` that are not in `values`; [] if that is impossible.

    It is possible only if `one` has only strings, and `values` has no string but the empty one.
    """
    if one["type"] == ["string"] and all(value == "" for value in values if isinstance(value, str)):
        return _not_between(one, {"maxLength": 0}, "Length")
    return []


def _numbers(one: Plain, other: Plain, _: Difference) -> list[Plain]:
    if other.get("type") == ["integer"] and one["type"] != ["integer"]:
        return []
    schemas = []
    sides = {"minimum": "exclusiveMaximum", "exclusiveMinimum": "maximum"}
    sides |= {"maximum": "exclusiveMinimum", "exclusiveMaximum": "minimum"}
    for bound, opposite in sides.items():
        if bound in other:
            closest = min if "inimum" in bound else max
            schemas.append(one | {opposite: closest(other[bound], one.get(opposite, other[bound]))})
    return schemas


def _not_between(one: Plain, other: Plain, unit: str) -> list[Plain]:
    """Return schemas for the parts of `one` below the minimum and above the maximum that `other` sets.

    unit: "Length", "Items" or "Properties", which are counted. Parts that no count satisfies are left out.
    """
    schemas = []
    if other.get(f"min{unit}", 0) > 0:
        schemas.append(one | {f"max{unit}": min(other[f"min{unit}"] - 1, one.get(f"max{unit}", other[f"min{unit}"]))})
    if f"max{unit}" in other:
        schemas.append(one | {f"min{unit}": max(other[f"max{unit}"] + 1, one.get(f"min{unit}", 0))})
    return [each for each in schemas if each.get(f"min{unit}", 0) <= each.get(f"max{unit}", each.get(f"min{unit}", 0))]


def _strings(one: Plain, other: Plain, _: Difference) -> list[Plain]:
    return _not_between(one, other, "Length")


def _arrays(one: Plain, other: Plain, difference: Difference) -> list[Plain]:
    schemas = _not_between(one, other, "Items")
    if "items" in other and not {"prefixItems"} & (one.keys() | other.keys()):
        items = difference(one.get("items", True), other["items"])
        if items:
            schemas.append(one | {"items": {"anyOf": items}, "minItems": max(1, one.get("minItems", 0))})
    return schemas


def _objects(one: Plain, other: Plain, difference: Difference) -> list[Plain]:
    named, needed = one.get("properties", {}), [*one.get("required", ())]
    is_free = not named and not needed  # any property may be written
    narrowed, whole = list[Plain](), list[Plain]()
    for name in other.get("required", ()):
        if name not in named and name not in needed and not is_free:
            return [one]  # none of whose documents has the property
        if name not in needed:
            narrowed.append(one | {"properties": {**named, name: False}})
    for name in [*other.get("properties", {})]:
        if name not in named and name not in needed:
            continue
        schema = of_name(one, name)
        values = None if schema is False else difference(schema, other["properties"][name])
        if values:
            property_ = {
                "properties": {**named, name: {"anyOf": values}},
                "required": [*dict.fromkeys([*needed, name])],
            }
            (whole if values == [simplified(schema, name)] else narrowed).append(one | property_)
    if other.get("additionalProperties") is False:
        patterns = other.get("patternProperties", {})
        for name in [*needed, *named]:
            if name not in other.get("properties", {}) and not any(is_in(name, pattern) for pattern in patterns):
                if name in needed:
                    return [one]
                if named[name] is not False:
                    narrowed.append(one | {"required": [*needed, name]})
    return whole[:1] or narrowed


# By type: plain schemas for values that satisfy `one` and not `other`; [] if no such schemas are known
_BY_TYPE: dict[str, Callable[[Plain, Plain, Difference], list[Plain]]] = {
    "object": _objects,
    "array": _arrays,
    "string": _strings,
    "number": _numbers,
    "integer": _numbers,
}
