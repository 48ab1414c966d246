"""Seeded JSON schemas of five kinds, as they are found in the field.

Each kind has the keywords, depths and numbers of properties that are described for it (jsonschemabench, arXiv
2501.10868): configuration files on GitHub, types of Kubernetes, tools of MCP servers, functions of BFCL, events of
Snowplow. No schema is anyone's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
WORDS = [
    "name",
    "id",
    "type",
    "version",
    "status",
    "config",
    "path",
    "host",
    "port",
    "user",
    "group",
    "label",
    "items",
    "count",
    "size",
    "mode",
    "level",
    "region",
    "zone",
    "role",
    "target",
    "source",
    "action",
    "event",
    "value",
    "key",
    "token",
    "url",
    "image",
    "tag",
    "rule",
    "policy",
    "limit",
    "window",
    "method",
    "data",
    "owner",
    "state",
    "code",
    "title",
    "content",
    "format",
    "language",
    "currency",
    "amount",
    "price",
    "date",
    "start",
    "end",
    "duration",
    "timeout",
    "retries",
    "enabled",
    "color",
]


def schema_of_kind(kind: str, seed: int) -> Schema:
    """A schema of a kind."""
    return KINDS[kind](random.Random(f"{kind} {seed}"))


def _names(generator: random.Random, count: int) -> list[str]:
    names = dict.fromkeys(generator.choice(WORDS) for _ in range(count))
    while len(names) < count:
        names["_".join(generator.sample(WORDS, 2))] = None
    return [*names][:count]


def _noted(generator: random.Random, schema: Schema, share: float = 0.6) -> Schema:
    """A schema with a description, and rarely with another note."""
    if generator.random() < share:
        schema = {"description": " ".join(generator.choices(WORDS, k=6)), **schema}
    if generator.random() < 0.06:
        notes = {"x-order": 3, "$comment": "a", "markdownDescription": "`a`", "deprecated": True, "tsType": "string"}
        name = generator.choice([*notes])
        schema[name] = notes[name]
    return schema


def _enum(generator: random.Random) -> list[str]:
    return generator.sample(WORDS, generator.randint(2, 6))


def _object(generator: random.Random, properties: Schema, share_required: float, closed: float) -> Schema:
    schema: Schema = {"type": "object", "properties": properties}
    required = [name for name in properties if generator.random() < share_required]
    if required:
        schema["required"] = required
    if generator.random() < closed:
        schema["additionalProperties"] = False
    return schema


# -- configuration files ------------------------------------------------------------------------------------------


def _github(generator: random.Random) -> Schema:
    draft = generator.choice(["06", "07", "07"])
    names = _names(generator, generator.randint(1, 4))
    definitions = {name: _github_value(generator, generator.choice([0, 1, 1]), []) for name in names}
    count = min(40, 2 + int(generator.expovariate(0.12)))
    properties = {
        name: _github_value(generator, generator.choice([0, 0, 1, 2, 3]), names) for name in _names(generator, count)
    }
    schema = _object(generator, properties, generator.choice([0, 0.2, 0.5]), 0.4)
    schema = {"$schema": f"http://json-schema.org/draft-{draft}/schema#", **schema}
    if generator.random() < 0.5:
        schema["definitions"] = definitions
    else:
        schema["properties"] = {name: _without_refs(each) for name, each in properties.items()}
    draw = generator.random()
    pair = [*properties][:2]
    if draw < 0.05 and len(pair) == 2:
        schema[generator.choice(["anyOf", "oneOf"])] = [{"required": [name]} for name in pair]
    elif draw < 0.08 and len(pair) == 2:
        schema["dependencies"] = {pair[0]: [pair[1]]}
    elif draw < 0.11 and len(pair) == 2:
        schema["if"] = {"properties": {pair[0]: {"const": "a"}}}
        schema["then"] = {"required": [pair[1]]}
    elif draw < 0.16:
        schema["patternProperties"] = {"^x-": {}}
    elif draw < 0.19 and "definitions" in schema:
        schema = {"$schema": schema.pop("$schema"), "definitions": schema.pop("definitions"), "allOf": [schema, {}]}
        schema["allOf"][1] = {"properties": {"extra": {"type": "string"}}}
    return schema


def _without_refs(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_refs(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {"type": "string"} if "$ref" in schema else {key: _without_refs(each) for key, each in schema.items()}


def _github_value(generator: random.Random, depth: int, refs: list[str]) -> Schema:
    return _noted(generator, _github_bare(generator, depth, refs))


def _github_bare(generator: random.Random, depth: int, refs: list[str]) -> Schema:
    def inner() -> Schema:
        return _github_value(generator, depth - 1, refs)

    if refs and generator.random() < 0.12:
        return {"$ref": f"#/definitions/{generator.choice(refs)}"}
    kinds = ["string", "string", "string", "string", "enum", "boolean", "boolean", "integer", "number", "any"]
    if depth > 0:
        kinds += [
            "object",
            "object",
            "object",
            "object",
            "array",
            "array",
            "array",
            "map",
            "oneOf",
            "anyOf",
            "allOf",
            "tuple",
            "pattern",
            "not",
        ]
    kind = generator.choice(kinds)
    if kind == "string":
        return _github_string(generator)
    if kind == "enum":
        values: list[Any] = [*_enum(generator), *([None] if generator.random() < 0.1 else [])]
        return {"enum": values} | ({"type": "string"} if None not in values and generator.random() < 0.7 else {})
    if kind == "boolean":
        return {"type": "boolean", "default": generator.choice([True, False])}
    if kind in ("integer", "number"):
        return {"type": kind, **_github_bounds(generator)}
    if kind == "any":
        return generator.choice([{}, {"type": "object"}, {"type": "array"}, {"type": ["string", "number", "null"]}])
    if kind == "object":
        properties = {name: inner() for name in _names(generator, generator.randint(1, 6))}
        return _object(generator, properties, generator.choice([0, 0, 0.4]), 0.3)
    if kind == "array":
        sizes = generator.choice([{}, {}, {}, {"minItems": 1}, {"minItems": 1, "maxItems": 10}])
        unique = {"uniqueItems": True} if generator.random() < 0.2 else {}
        return {"type": "array", "items": inner(), **sizes, **unique}
    if kind == "map":
        return {"type": "object", "additionalProperties": generator.choice([True, {"type": "string"}, inner()])}
    if kind == "oneOf":
        return {"oneOf": _github_ways(generator, inner)}
    if kind == "anyOf":
        return {"anyOf": [*_github_ways(generator, inner), {"type": "null"}]}
    if kind == "allOf":
        added = {"properties": {"extra": {"type": "string"}}, "required": ["extra"]}
        return {"allOf": [{"type": "object", "properties": {"base": inner()}}, added]}
    if kind == "tuple":
        return {"type": "array", "items": [{"type": "number"}, {"type": "number"}], "minItems": 2}
    if kind == "pattern":
        return {
            "type": "object",
            "patternProperties": {generator.choice(["^[a-z][a-z0-9_]*$", ".*", "^[A-Za-z0-9_-]+$"]): inner()},
            "additionalProperties": False,
        }
    return {"type": "object", "properties": {"a": inner()}, "not": {"required": ["b"]}}


def _github_ways(generator: random.Random, inner: Callable[[], Schema]) -> list[Schema]:
    draw = generator.random()
    if draw < 0.5:
        return [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
    if draw < 0.7:
        return [{"type": "boolean"}, {"type": "object", "properties": {"value": inner()}}]
    if draw < 0.9:
        words = _enum(generator)[:3]
        return [
            {"type": "object", "properties": {"kind": {"enum": [word]}, "value": inner()}, "required": ["kind"]}
            for word in words
        ]
    return [{"type": "object", "properties": {"one": inner()}}, {"type": "object", "properties": {"two": inner()}}]


def _github_string(generator: random.Random) -> Schema:
    draw = generator.random()
    if draw < 0.55:
        return {"type": "string"}
    if draw < 0.7:
        return {
            "type": "string",
            "format": generator.choice(["uri", "uri", "uri", "date-time", "email", "regex", "uuid"]),
        }
    if draw < 0.85:
        patterns = ["^[a-z]+$", "^[a-zA-Z0-9_-]+$", r"^\d+\.\d+\.\d+$", ".+", r"^\S+$", "^#[0-9a-fA-F]{6}$", "^/"]
        patterns += [r"^[^/]+\.md$", r"^(?!\.)[a-z.]+$", r"^v?\d+(\.\d+)*(-[a-z]+)?$"]
        return {"type": "string", "pattern": generator.choice(patterns)}
    return {"type": "string", "minLength": 1} | ({"maxLength": generator.choice([20, 64, 100])} if draw > 0.92 else {})


def _github_bounds(generator: random.Random) -> Schema:
    choices: list[Schema] = [{}, {}, {}, {"minimum": 0}, {"minimum": 1, "maximum": 65535}, {"minimum": 0, "maximum": 1}]
    choices += [{"exclusiveMinimum": 0}, {"multipleOf": 1}, {"minimum": 0.1, "maximum": 2.5}]
    return generator.choice(choices)


# -- types of Kubernetes ------------------------------------------------------------------------------------------


def _kubernetes(generator: random.Random) -> Schema:
    def text(**more: Any) -> Schema:
        return _noted(generator, {"type": generator.choice(["string", ["string", "null"]]), **more}, 0.9)

    metadata = {"name": text(), "namespace": text(), "labels": _labels(), "annotations": _labels()}
    if generator.random() < 0.7:
        metadata |= {"uid": text(), "creationTimestamp": text(format="date-time"), "generateName": text()}
        owner = {"kind": text(), "name": text(), "controller": {"type": ["boolean", "null"]}}
        metadata["ownerReferences"] = {"type": ["array", "null"], "items": _object(generator, owner, 0.5, 0)}
    properties = {
        "apiVersion": text(),
        "kind": {"type": ["string", "null"], "enum": [generator.choice(WORDS).title()]},
        "metadata": {"type": ["object", "null"], "properties": metadata},
        "spec": _kubernetes_object(generator, generator.choice([1, 2, 2, 3])),
    }
    if generator.random() < 0.4:
        properties["status"] = _kubernetes_object(generator, 1)
    schema: Schema = {"type": "object", "properties": properties}
    if generator.random() < 0.3:
        schema["x-kubernetes-group-version-kind"] = []
    return schema | ({"required": ["spec"]} if generator.random() < 0.3 else {})


def _labels() -> Schema:
    return {"type": ["object", "null"], "additionalProperties": {"type": ["string", "null"]}}


def _kubernetes_object(generator: random.Random, depth: int) -> Schema:
    properties = dict[str, Any]()
    for name in _names(generator, min(14, 2 + int(generator.expovariate(0.25)))):
        draw = generator.random()
        if depth > 0 and draw < 0.18:
            properties[name] = _kubernetes_object(generator, depth - 1)
        elif depth > 0 and draw < 0.35:
            properties[name] = {"type": ["array", "null"], "items": _kubernetes_object(generator, depth - 1)}
        elif draw < 0.45:
            properties[name] = {"type": ["array", "null"], "items": {"type": ["string", "null"]}}
        elif draw < 0.52:
            properties[name] = _labels()
        elif draw < 0.6:
            properties[name] = {
                "oneOf": [{"type": ["string", "null"]}, {"type": ["integer"]}],
                "format": "int-or-string",
            }
        elif draw < 0.72:
            properties[name] = {"type": ["integer", "null"], "format": generator.choice(["int32", "int64"])}
        elif draw < 0.8:
            properties[name] = {"type": ["boolean", "null"]}
        else:
            format_ = {"format": generator.choice(["date-time", "byte"])} if generator.random() < 0.1 else {}
            properties[name] = {"type": ["string", "null"], **format_}
        properties[name] = _noted(generator, properties[name], 0.95)
    return _object(generator, properties, generator.choice([0, 0, 0.3]), 0)


# -- tools ----------------------------------------------------------------------------------------------------------


def _mcp(generator: random.Random) -> Schema:
    properties = {name: _argument(generator, 2) for name in _names(generator, generator.randint(1, 10))}
    schema = _object(generator, properties, 0.4, 0.5)
    if any("$ref" in str(each) for each in properties.values()):
        schema["$defs"] = {"Filter": _object(generator, {"field": {"type": "string"}, "value": {}}, 0.5, 0.5)}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def _argument(generator: random.Random, depth: int) -> Schema:
    def inner() -> Schema:
        return _argument(generator, depth - 1)

    kinds = [
        "string",
        "string",
        "string",
        "string",
        "number",
        "integer",
        "boolean",
        "enum",
        "bounded",
        "nullable",
        "any",
    ]
    kinds += ["object", "array", "array", "map", "ref", "union"] if depth > 0 else []
    kind = generator.choice(kinds)
    schema: Schema = {"type": kind if kind in ("string", "number", "integer", "boolean") else "string"}
    if kind == "enum":
        schema = {"type": "string", "enum": _enum(generator)}
    elif kind == "bounded":
        schema = generator.choice(
            [
                {"type": "integer", "minimum": 1, "maximum": 100, "default": 10},
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
                {"type": "string", "minLength": 1},
                {"type": "string", "maxLength": generator.choice([100, 255, 2000])},
                {"type": "string", "format": generator.choice(["uri", "date", "email", "date-time"])},
                {"type": "string", "pattern": generator.choice([r"^\d{4}-\d{2}-\d{2}$", "^[a-z0-9-]+$"])},
            ]
        )
    elif kind == "nullable":
        schema = {"anyOf": [_argument(generator, 0), {"type": "null"}], "default": None, "title": "T"}
    elif kind == "any":
        schema = generator.choice([{}, {"type": "object"}, {"type": "array", "items": {}}])
    elif kind == "object":
        properties = {name: inner() for name in _names(generator, generator.randint(1, 4))}
        schema = _object(generator, properties, 0.5, 0.5)
    elif kind == "array":
        schema = {"type": "array", "items": inner()}
    elif kind == "map":
        schema = {"type": "object", "additionalProperties": generator.choice([{}, True, {"type": "string"}])}
    elif kind == "ref":
        schema = {"$ref": "#/$defs/Filter"}
    elif kind == "union":
        key = generator.choice(["anyOf", "oneOf"])
        schema = {key: [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    return _noted(generator, schema, 0.8)


def _bfcl(generator: random.Random) -> Schema:
    properties = dict[str, Any]()
    for name in _names(generator, generator.randint(1, 7)):
        draw = generator.random()
        if draw < 0.45:
            schema: Schema = {"type": "string"}
        elif draw < 0.65:
            schema = {"type": generator.choice(["integer", "number", "boolean"])}
        elif draw < 0.75:
            schema = {"type": "string", "enum": _enum(generator), "default": "name"}
        elif draw < 0.9:
            items = generator.choice([{"type": "string"}, {"type": "integer"}, {"type": "number"}])
            schema = {"type": "array", "items": items}
        elif draw < 0.96:
            inner = {each: {"type": "string"} for each in _names(generator, generator.randint(1, 4))}
            schema = {"type": "object", "properties": inner}
        else:
            schema = generator.choice([{"type": "object"}, {"type": "array"}, {"type": "array", "items": {}}])
        properties[name] = _noted(generator, schema, 1.0)
    return _object(generator, properties, 0.6, 0)


# -- events -----------------------------------------------------------------------------------------------------------


def _snowplow(generator: random.Random) -> Schema:
    properties = dict[str, Any]()
    for name in _names(generator, min(30, 1 + int(generator.expovariate(0.13)))):
        draw = generator.random()
        if draw < 0.5:
            schema: Schema = {
                "type": "string",
                "maxLength": generator.choice([16, 36, 64, 128, 255, 255, 255, 1024, 4096]),
            }
            if generator.random() < 0.15:
                schema = {"type": "string", "format": generator.choice(["uri", "date-time", "uuid", "ipv4", "email"])}
        elif draw < 0.62:
            schema = {"enum": _enum(generator)} | ({"type": "string"} if generator.random() < 0.8 else {})
        elif draw < 0.8:
            most = generator.choice([255, 65535, 2147483647, 9223372036854775807])
            schema = {"type": "integer", "minimum": generator.choice([0, 0, -most]), "maximum": most}
        elif draw < 0.86:
            schema = {"type": "number", "minimum": -90, "maximum": 90.5} if draw < 0.83 else {"type": "number"}
        elif draw < 0.92:
            schema = {"type": "boolean"}
        elif draw < 0.96:
            items = {"type": "string", "maxLength": 64} if draw < 0.94 else {"type": "object"}
            schema = {"type": "array", "items": items, **generator.choice([{}, {"minItems": 1}, {"uniqueItems": True}])}
        else:
            schema = _object(generator, {each: {"type": "string"} for each in _names(generator, 3)}, 0.5, 0.7)
        if "type" in schema and schema["type"] not in ("object", "array") and generator.random() < 0.4:
            schema["type"] = [schema["type"], "null"]
            if "enum" in schema:
                schema["enum"] = [*schema["enum"], None]
        properties[name] = _noted(generator, schema, 0.8)
    own = {"self": {"vendor": "org.example", "name": "event", "format": "jsonschema", "version": "1-0-0"}}
    schema = {
        "$schema": "http://iglucentral.com/schemas/com.snowplowanalytics.self-desc/schema/jsonschema/1-0-0#",
        **own,
    }
    schema |= _object(generator, properties, 0.3, 0.9)
    return schema | ({"minProperties": 1} if generator.random() < 0.05 else {})


KINDS = {"github": _github, "kubernetes": _kubernetes, "mcp": _mcp, "bfcl": _bfcl, "snowplow": _snowplow}
