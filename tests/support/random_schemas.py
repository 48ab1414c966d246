"""Random JSON schemas with formats, patterns and recursion, their texts, and jsonschema to judge them."""

from __future__ import annotations

import datetime
import json
import random
from typing import Any

import jsonschema

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.json_schema import schema_automaton
from blockdiff.sampling.constraints.json_strings import FORMATS
from tests.support.schema_kinds import schema_of_kind


def random_documents(schema: Any, generator: random.Random, tries: int) -> set[str]:
    """Texts that the automaton of a schema accepts, by random ways that soon end strings, arrays and objects."""
    automaton, texts = schema_automaton(schema), set()
    for _ in range(tries):
        state, text = 0, bytearray()
        while not (bool(automaton.is_accepting_S[state]) and generator.random() < 0.5):
            ways = (automaton.next_SB[state] < automaton.states).nonzero().squeeze(-1).tolist()
            if not ways or len(text) > 400:
                break
            byte = generator.choice([way for way in ways if way < 128] or ways)
            if generator.random() < 0.5:  # not in a string for ever
                byte = next((way for way in ways if way in b'"}],'), byte)
            text.append(byte)
            state = int(automaton.next_SB[state, byte])
        if bool(automaton.is_accepting_S[state]):
            texts.add(text.decode())
    return texts


def random_schema(generator: random.Random, depth: int = 2) -> Any:
    """A schema of at most so many levels."""
    kinds = ["format", "format", "pattern", "pattern", "integer", "enum", *["object", "array", "anyOf"] * (depth > 0)]
    kind = generator.choice(kinds)
    if kind == "format":
        return {"type": "string", "format": generator.choice(list(FORMATS))}
    if kind == "pattern":
        patterns = [r"\d+|\w", "^(yes|no)$", "yes|no", r"[\w.-]+@\d{2}", r"a\s?b|[^\W_]{3}", "|x", r"v\d(\.\d)*"]
        return {"type": generator.choice(["string", ["string", "null"]]), "pattern": generator.choice(patterns)}
    if kind == "integer":
        return {"type": "integer", "minimum": generator.randint(-20, 20)}
    if kind == "enum":
        return {"enum": generator.sample(["a|b", 'q"', 7, None, True, "é", 1.5], 2)}
    inner = [random_schema(generator, depth - 1) for _ in range(generator.randint(1, 3))]
    if kind == "anyOf":
        return {"anyOf": inner}
    if kind == "array":
        return {"type": "array", "items": inner[0], "maxItems": 2}
    properties = dict(zip("abc", inner, strict=False))
    return {"type": "object", "properties": properties, "required": generator.sample(sorted(properties), 1)}


def recursive_schema(generator: random.Random) -> dict[str, Any]:
    """A schema that may stand inside itself: as a property that may be left out, or in a list."""
    inner = generator.choice([{"$ref": "#"}, {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}])
    properties = {"value": random_schema(generator, 1), "next": inner}
    return {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}


def judge(schema: Any) -> jsonschema.protocols.Validator:
    """The validator of a schema, of its own draft, that checks formats, with a time zone in times."""
    checker = jsonschema.FormatChecker()
    for name, kind in (("time", datetime.time), ("date-time", datetime.datetime)):  # which jsonschema does not check
        checker.checks(name, ValueError)(
            lambda text, read=kind.fromisoformat: not isinstance(text, str) or read(text).tzinfo is not None
        )
    validator = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    validator.check_schema(schema)
    return validator(schema, format_checker=checker)


def invalid_texts(kind: str, seed: int, tries: int = 40) -> tuple[int, list[str]]:
    """The number of judged texts of the schema of a seed, and the texts that are invalid.

    Every third schema of the kind "random" is recursive; other kinds are those of `schema_kinds`.
    """
    generator = random.Random(seed)
    if kind != "random":
        schema = schema_of_kind(kind, seed)
    else:
        schema = recursive_schema(generator) if seed % 3 == 2 else random_schema(generator)
    try:
        texts = random_documents(schema, generator, tries)
    except RequestError:  # refused by name
        return 0, []
    validator = judge(schema)
    return len(texts), [text for text in texts if not validator.is_valid(json.loads(text))]
