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

    They may accept less than the difference. `other` may accept more than must be excluded.
    """
    if "enum" in one:
        values = [value for value in one["enum"] if not holds(value, other)]
        return [one | {"enum": values}] if values else []
    kept, found = list[str](), list[Plain]()
    for type in written_types(one):
        if not _is_of(type, other):
            kept.append(type)
        elif type in ("boolean", "null"):
            values = [value for value in ((True, False) if type == "boolean" else (None,)) if not holds(value, other)]
            found += [{"enum": values}] if values else []
        else:
            ways = _BY_TYPE[type](one | {"type": [type]}, other, difference)
            if "enum" in other:
                ways = _without_values(one | {"type": [type]}, other["enum"])
            if not ways:
                return None
            found += ways
    return ([one | {"type": kept}] if kept else []) + found


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
    """Return schemas of `one` without the strings in `values`; [] if that is impossible.

    It is possible only for strings, if the empty one is the only string in `values`.
    """
    if one["type"] == ["string"] and all(value == "" for value in values if isinstance(value, str)):
        return _not_between(one, {"maxLength": 0}, "Length")
    return []


def _numbers(one: Plain, other: Plain, _: Difference) -> list[Plain]:
    if other.get("type") == ["integer"] and one["type"] != ["integer"]:
        return []
    found = []
    sides = {"minimum": "exclusiveMaximum", "exclusiveMinimum": "maximum"}
    sides |= {"maximum": "exclusiveMinimum", "exclusiveMaximum": "minimum"}
    for bound, opposite in sides.items():
        if bound in other:
            closest = min if "inimum" in bound else max
            found.append(one | {opposite: closest(other[bound], one.get(opposite, other[bound]))})
    return found


def _not_between(one: Plain, other: Plain, of: str) -> list[Plain]:
    """Return schemas for the parts of `one` below the minimum and above the maximum that `other` sets.

    of: "Length", "Items" or "Properties", which are counted. Parts that no count satisfies are left out.
    """
    found = []
    if other.get(f"min{of}", 0) > 0:
        found.append(one | {f"max{of}": min(other[f"min{of}"] - 1, one.get(f"max{of}", other[f"min{of}"]))})
    if f"max{of}" in other:
        found.append(one | {f"min{of}": max(other[f"max{of}"] + 1, one.get(f"min{of}", 0))})
    return [each for each in found if each.get(f"min{of}", 0) <= each.get(f"max{of}", each.get(f"min{of}", 0))]


def _strings(one: Plain, other: Plain, _: Difference) -> list[Plain]:
    return _not_between(one, other, "Length")


def _arrays(one: Plain, other: Plain, difference: Difference) -> list[Plain]:
    found = _not_between(one, other, "Items")
    if "items" in other and not {"prefixItems"} & (one.keys() | other.keys()):
        items = difference(one.get("items", True), other["items"])
        if items:
            found.append(one | {"items": {"anyOf": items}, "minItems": max(1, one.get("minItems", 0))})
    return found


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
        own = of_name(one, name)
        values = None if own is False else difference(own, other["properties"][name])
        if values:
            property_ = {
                "properties": {**named, name: {"anyOf": values}},
                "required": [*dict.fromkeys([*needed, name])],
            }
            (whole if values == [simplified(own, name)] else narrowed).append(one | property_)
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
