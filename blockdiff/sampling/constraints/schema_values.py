"""Check one JSON value against a schema, for the values of an `enum` or a `const`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from blockdiff.sampling.constraints.ecma import is_in
from blockdiff.sampling.constraints.json_strings import FORMATS, strings
from blockdiff.sampling.constraints.schema_merging import EXCLUDED, is_equal, of_name, simplified, unheld

LookUp = Callable[[Any, str], Any]


def holds(value: Any, schema: Any, place: str, look_up: LookUp) -> bool:
    """True if a value satisfies a schema; RequestError for a keyword that is not supported here."""
    plain = simplified(schema, place)
    if isinstance(plain, bool):
        return plain

    def fits(each: Any, inner: Any) -> bool:
        return holds(each, inner, place, look_up)

    if "$ref" in plain and not fits(value, look_up(plain["$ref"], place)):
        return False
    if not all(fits(value, each) for each in plain.get("allOf", ())):
        return False
    if "anyOf" in plain and not any(fits(value, each) for each in plain["anyOf"]):
        return False
    if "oneOf" in plain and sum(fits(value, each) for each in plain["oneOf"]) != 1:
        return False
    if any(fits(value, each) for each, _ in plain.get(EXCLUDED, ())):
        return False
    if "if" in plain:
        condition, then, otherwise = plain["if"]
        if not fits(value, then if fits(value, condition) else otherwise):
            return False
    if "enum" in plain and not any(is_equal(value, each) for each in plain["enum"]):
        return False
    kinds = types_of(value)
    if "type" in plain and not kinds & {*plain["type"]}:
        return False
    judge = next((judge for kind, judge in _JUDGES.items() if kind in kinds), None)
    return judge is None or judge(value, plain, place, fits)


def types_of(value: Any) -> set[str]:
    """Return the JSON types of a value; a whole number is both "number" and "integer"."""
    if value is None or isinstance(value, bool):
        return {"null" if value is None else "boolean"}
    if isinstance(value, int | float):
        return {"number", "integer"} if value == int(value) else {"number"}
    return {"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"}


Fits = Callable[[Any, Any], bool]


def _is_counted(count: int, plain: Mapping[str, Any], unit: str) -> bool:
    return plain.get(f"min{unit}", 0) <= count <= plain.get(f"max{unit}", count)


def _string(value: str, plain: Mapping[str, Any], path: str, fits: Fits) -> bool:
    for name in plain.get("format", ()):
        text = json.dumps(value, ensure_ascii=False)[1:-1].encode()
        if name in FORMATS and not strings((), (name,), 0, None).accepts(text):
            raise unheld("format", path, "leave it out beside enum and const")
    patterns = plain.get("pattern", ())
    return _is_counted(len(value), plain, "Length") and all(is_in(value, pattern) for pattern in patterns)


def _number(value: int | float, plain: Mapping[str, Any], path: str, fits: Fits) -> bool:
    factor = plain.get("multipleOf")
    return (
        (factor is None or Fraction(str(value)) % Fraction(str(factor)) == 0)
        and plain.get("minimum", value) <= value <= plain.get("maximum", value)
        and ("exclusiveMinimum" not in plain or value > plain["exclusiveMinimum"])
        and ("exclusiveMaximum" not in plain or value < plain["exclusiveMaximum"])
    )


def _array(value: list[Any], plain: Mapping[str, Any], path: str, fits: Fits) -> bool:
    prefix = plain.get("prefixItems", [])
    if "contains" in plain or "unevaluatedItems" in plain:
        raise unheld("contains", path, "leave it out beside enum and const")
    if plain.get("uniqueItems") and any(
        is_equal(one, other) for index, one in enumerate(value) for other in value[index + 1 :]
    ):
        return False
    return _is_counted(len(value), plain, "Items") and all(
        fits(each, prefix[index] if index < len(prefix) else plain.get("items", True))
        for index, each in enumerate(value)
    )


def _object(value: Mapping[str, Any], plain: Mapping[str, Any], path: str, fits: Fits) -> bool:
    if "unevaluatedProperties" in plain or "dependentRequired" in plain or "dependentSchemas" in plain:
        raise unheld("unevaluatedProperties", path, "leave it out beside enum and const")
    return (
        _is_counted(len(value), plain, "Properties")
        and all(name in value for name in plain.get("required", ()))
        and all(fits(each, of_name(plain, name)) for name, each in value.items())
        and all(fits(name, plain.get("propertyNames", True)) for name in value)
    )


_JUDGES: dict[str, Callable[[Any, Mapping[str, Any], str, Fits], bool]] = {
    "string": _string,
    "number": _number,
    "array": _array,
    "object": _object,
}
