"""Schemas without keywords that combine schemas: `$ref`, `allOf`, `anyOf`, `oneOf`, `not`, `if` and the dependent ones.

A plain schema has a type or an enum, and constraints on those values. `Rewriting.ways` converts any schema to plain
ones, such that each document satisfies one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.compile_limit import TooLarge, seconds_left
from blockdiff.sampling.constraints.schema_exclusion import apart
from blockdiff.sampling.constraints.schema_merging import COMBINING, EXCLUDED, both_of, simplified, unheld
from blockdiff.sampling.constraints.schema_values import holds

MOST_REFS = 5_000  # the most that are followed
MOST_WAYS = 256  # the most plain schemas for one schema
Way = tuple[dict[str, Any], tuple[str, ...]]  # a plain schema, and the $refs around it


class Rewriting:
    """Rewrites the schemas of one document. refs_within: the depth to which a recursive schema is expanded."""

    def __init__(self, document: Any, refs_within: int):
        self.document, self.refs_within = rooted(document), refs_within
        self.refs, self.last_ref = 0, ""

    def ways(self, schema: Any, place: str, within: tuple[str, ...], is_loose: bool = False) -> list[Way]:
        """Return plain schemas, each with the $refs around it, that together have the documents of the schema.

        place: the path of the schema, for messages; within: the $refs around it. The plain schemas may accept less
        than the schema. is_loose: they accept no less, and exclusions are ignored.
        """
        done, todo = list[Way](), [(schema, within, list[Way](), within)]
        while todo:
            seconds_left()
            value, refs, others, before = todo.pop(0)
            plain = simplified(value, place)
            if isinstance(plain, bool):
                continue
            keyword = next((each for each in COMBINING if each in plain), None)
            if keyword is None and others:
                (other, outer), *others = others
                todo.insert(0, (both_of(plain, other, place), outer, others, _with_most(before, refs)))
            elif keyword is None:
                done.append((plain, _with_most(before, refs)))
            elif keyword == "$ref":
                if (reference := self._referred(plain.pop("$ref"), place, refs)) is not None:
                    target, refs = reference
                    todo.insert(0, (both_of(plain, target, place), refs, others, before))
                elif is_loose:
                    raise unheld("$ref", place, "it refers to itself in a place where schemas must differ")
            elif keyword == "allOf":  # a $ref in one of its schemas is not around the next
                first, *rest = _listed(plain.pop(keyword), keyword, place)
                todo.insert(0, (both_of(plain, first, place), refs, [(each, refs) for each in rest] + others, before))
            else:
                inner = plain.pop(keyword)
                found_ways = self._ways_of[keyword](self, inner, plain, place)
                todo[:0] = [(each, refs, others, before) for each in found_ways]
            if len(done) + len(todo) > MOST_WAYS:
                raise unheld(keyword or "anyOf", place, f"it has more than {MOST_WAYS} combinations; name fewer")
        if is_loose:
            return [({**plain, EXCLUDED: []}, refs) for plain, refs in done]
        return [(part, refs) for plain, refs in done for part in self._without_excluded(plain, place)]

    def _without_excluded(self, plain: dict[str, Any], path: str) -> list[dict[str, Any]]:
        """Return plain schemas for a plain schema's documents minus those that its exclusions accept."""
        parts = [{key: value for key, value in plain.items() if key != EXCLUDED}]
        for schema, keyword in plain.get(EXCLUDED, ()):
            for other, _ in self.ways(schema, path, (), is_loose=True):
                differences = [self._apart(each, other, path) for each in parts]
                if None in differences:
                    advice = "its schemas must differ in a type, a constant or a required property"
                    raise unheld(keyword, path, f"{advice}{'; or write anyOf' if keyword == 'oneOf' else ''}")
                parts = [each for ways in differences for each in ways or ()]
        return parts

    def _apart(self, one: dict[str, Any], other: dict[str, Any], path: str) -> list[dict[str, Any]] | None:
        """Call `apart` with this rewriting's `holds` and differences of inner schemas; path: for errors."""

        def difference(included: Any, excluded: Any) -> list[dict[str, Any]] | None:
            parts = [plain for plain, _ in self.ways(included, path, ())]
            for plain, _ in self.ways(excluded, path, (), is_loose=True):
                differences = [self._apart(each, plain, path) for each in parts]
                if None in differences:
                    return None
                parts = [each for ways in differences for each in ways or ()]
            return parts

        return apart(one, other, lambda value, schema: holds(value, schema, path, self.look_up), difference)

    def look_up(self, name: Any, place: str) -> Any:
        """Return the schema that a $ref names; RequestError if it is not in the document."""
        if name != "#" and not str(name).startswith("#/"):
            raise RequestError(
                f"the JSON schema refers to {name!r:.80} at {place}; only # can be looked up, and what follows #/"
            )
        part = self.document
        for key in unquote(name[1:]).split("/")[1:]:  # a JSON pointer
            key = key.replace("~1", "/").replace("~0", "~")
            try:
                part = part[int(key) if isinstance(part, list) else key]
            except (KeyError, IndexError, TypeError, ValueError):
                raise RequestError(f"the JSON schema cannot be used: it has no {name!r} to refer to") from None
        return part

    def _referred(self, name: Any, path: str, within: tuple[str, ...]) -> tuple[Any, tuple[str, ...]] | None:
        """Return the schema of a $ref and the $refs around it; None if the document's recursion is too deep."""
        schema = self.look_up(name, path)
        self.refs, self.last_ref = self.refs + 1, name
        if self.refs > MOST_REFS:
            raise TooLarge(f"the JSON schema follows more than {MOST_REFS:,} $refs, last {name!r}; write fewer")
        if within.count(name) >= self.refs_within or (name in within and len(within) >= 4 * self.refs_within):
            return None
        return schema, (*within, name)

    def _any_of(self, schemas: Any, plain: dict[str, Any], path: str) -> list[Any]:
        schemas = _listed(schemas, "anyOf", path)
        return [both_of(plain, each, path) for each in schemas]

    def _one_of(self, schemas: Any, plain: dict[str, Any], path: str) -> list[Any]:
        schemas = _listed(schemas, "oneOf", path)
        ways = []
        for number, schema in enumerate(schemas):
            others = [(each, "oneOf") for other, each in enumerate(schemas) if other != number]
            ways.append(both_of(both_of(plain, schema, path), {EXCLUDED: others}, path))
        return ways

    def _if(self, schemas: Any, plain: dict[str, Any], path: str) -> list[Any]:
        condition, then, otherwise = schemas
        is_met = both_of(both_of(plain, condition, path), then, path)
        return [is_met, both_of(both_of(plain, otherwise, path), {EXCLUDED: [(condition, "if")]}, path)]

    def _dependent_required(self, names: Any, plain: dict[str, Any], path: str) -> list[Any]:
        if not isinstance(names, Mapping) or not all(isinstance(each, list) for each in names.values()):
            raise RequestError(f"the JSON schema's dependentRequired at {path} must be an object of lists")
        return self._dependent_schemas({name: {"required": each} for name, each in names.items()}, plain, path)

    def _dependent_schemas(self, schemas: Any, plain: dict[str, Any], path: str) -> list[Any]:
        if not isinstance(schemas, Mapping):
            raise RequestError(f"the JSON schema's dependentSchemas at {path} must be an object of schemas")
        if not schemas:
            return [plain]
        (name, schema), *rest = schemas.items()
        plain = plain | ({"dependentSchemas": dict(rest)} if rest else {})
        has_name = both_of(both_of(plain, {"type": "object", "required": [name]}, path), schema, path)
        if plain.get("type") == ["object"] and name in plain.get("required", ()):
            return [has_name]
        return [both_of(plain, {"properties": {name: False}}, path), has_name]

    _ways_of: Mapping[str, Callable[[Rewriting, Any, dict[str, Any], str], list[Any]]] = {
        "anyOf": _any_of,
        "oneOf": _one_of,
        "if": _if,
        "dependentRequired": _dependent_required,
        "dependentSchemas": _dependent_schemas,
    }


def rooted(document: Any, root: str = "#", where: str = "#") -> Any:
    """Return a document whose $refs all start at its top, including those in a part with its own $id."""
    if isinstance(document, list):
        return [rooted(each, root, f"{where}/{number}") for number, each in enumerate(document)]
    if not isinstance(document, Mapping):
        return document
    id_ = document.get("$id")
    if where != "#" and isinstance(id_, str) and id_[:1] not in ("", "#"):
        root = where
    copy = {}
    for key, value in document.items():
        if key == "$ref" and isinstance(value, str) and value[:1] == "#":
            copy[key] = root + value[1:]
        elif key in ("const", "enum", "default", "examples"):
            copy[key] = value
        else:
            copy[key] = rooted(value, root, f"{where}/{key.replace('~', '~0').replace('/', '~1')}")
    return copy


def _with_most(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """Merge two lists of $refs: each $ref occurs as often as in the list that has more of it."""
    return tuple((Counter(one) | Counter(other)).elements())


def _listed(schemas: Any, keyword: str, path: str) -> list[Any]:
    if not isinstance(schemas, list) or not schemas:
        raise RequestError(f"the JSON schema's {keyword} at {path} must be a list of schemas")
    return schemas
