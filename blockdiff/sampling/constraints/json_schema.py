"""From a JSON schema to the automaton of its documents; refuses by name each keyword that it cannot express."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from blockdiff.errors import NoText, RequestError
from blockdiff.sampling.constraints.byte_automaton import MOST_STATES, ByteAutomaton
from blockdiff.sampling.constraints.compile_limit import TooLarge, TooSlow
from blockdiff.sampling.constraints.json_nfa import JsonNfa, Write
from blockdiff.sampling.constraints.json_strings import strings
from blockdiff.sampling.constraints.number_range import Numbers
from blockdiff.sampling.constraints.schema_merging import is_equal, of_name, unheld, written_types
from blockdiff.sampling.constraints.schema_rewriting import Rewriting
from blockdiff.sampling.constraints.schema_values import holds, types_of
from blockdiff.sampling.constraints.token_automaton import MOST_STATES as MOST_TOKEN_STATES
from blockdiff.sampling.constraints.unique_items import distinct_texts


@dataclass(frozen=True)
class Bounds:
    """Limits on the documents of an automaton, so that it stays small.

    refs: the depth to which a schema that refers to itself is expanded; free: the levels of arrays and objects in a
    value of any kind; items: the most items of an array with a maxItems; characters: the most characters of a string
    with a maxLength; in_blocks: characters of such a string may count as several (`strings`); beginnings: the number of
    parts by which the strings of an array with uniqueItems are told apart (`distinct_texts`).
    """

    refs: int = 4
    free: int = 2
    items: int = 1_000
    characters: int = 4_000
    in_blocks: bool = False
    beginnings: int = 62


# Tried in turn: the first with which the automaton is small enough
BOUNDS = (
    Bounds(),
    Bounds(3, 2, 64, 1_000, True, 31),
    Bounds(2, 1, 16, 250, True, 12),
    Bounds(1, 1, 4, 100, True, 6),
    Bounds(1, 0, 2, 50, True, 3),
)


def schema_automaton(schema: str | Mapping[str, Any]) -> ByteAutomaton:
    """Make the automaton of a schema's documents, with an optional space between their parts.

    It does not accept every valid document: properties are in the schema's order, and if any are named, no others
    occur. Raises RequestError for a schema that is not JSON, or has keywords that an automaton cannot follow.
    """
    try:
        text = json.dumps(json.loads(schema) if isinstance(schema, str) else schema, allow_nan=False)
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not valid JSON ({error})") from None
    return _compiled(text)


@lru_cache(maxsize=32)
def _compiled(schema: str) -> ByteAutomaton:
    """Make the automaton of a schema, given as JSON, with the first of `BOUNDS` that needs few enough states."""
    for bounds in BOUNDS:
        most = MOST_STATES if bounds is BOUNDS[-1] else MOST_TOKEN_STATES - 1
        try:
            return _Writer(json.loads(schema), bounds).automaton(most)
        except TooLarge:
            if bounds is BOUNDS[-1]:
                raise
        except RecursionError:
            raise RequestError("the JSON schema is nested too deeply") from None
    raise AssertionError


class _Writer:
    """Writes the schemas of a document into an automaton.

    where: the path of a schema, for messages; within: the $refs around it. Methods append after state `start` and
    return the state at the end, or None if no finite document satisfies the schema.
    """

    def __init__(self, document: Any, bounds: Bounds):
        self.rewriting, self.bounds, self.nfa = Rewriting(document, bounds.refs), bounds, JsonNfa(bounds.items)
        self.reason = ""  # why there is no document

    def automaton(self, most: int) -> ByteAutomaton:
        """Make the automaton of the document's schema; RequestError for more than `most` states or no document."""
        end = self.write(0, self.rewriting.document, "", ())
        if end is not None:
            return self.nfa.automaton(end, most)
        if self.reason or not self.rewriting.last_ref:
            raise RequestError(f"no document satisfies the JSON schema{self.reason and ': '}{self.reason}")
        raise RequestError(
            f"the JSON schema refers to itself without end ($ref {self.rewriting.last_ref!r}); "
            "leave that property out of required, or give it an anyOf with another way"
        )

    def write(self, start: int, schema: Any, where: str, within: tuple[str, ...]) -> int | None:
        """Add the documents of a schema. A callable in place of a schema is called with `start`."""
        if callable(schema):
            return schema(start)
        if schema is True or schema == {}:
            return self._free(start, self.bounds.free)
        ends = [
            self._plain(start, plain, where, refs)
            for plain, refs in self.rewriting.ways(schema, where or "its top", within)
        ]
        return self.nfa.joined(ends)

    def _plain(self, start: int, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> int | None:
        path = where or "its top"
        if "enum" in plain:
            rest = {key: value for key, value in plain.items() if key != "enum"}
            values = [each for each in plain["enum"] if holds(each, rest, path, self.rewriting.look_up)]
            if not values:
                self.reason = f"no value of the enum at {path} satisfies its other keywords"
            return self.nfa.joined([self.nfa.value(start, each) for each in values])
        if not plain:
            return self._free(start, self.bounds.free)
        return self.nfa.joined([self._of_type(start, type, plain, where, within) for type in written_types(plain)])

    def _of_type(self, start: int, type: str, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> int | None:
        path = where or "its top"
        if type == "object":
            return self._object(start, plain, where, within)
        if type == "array":
            return self._array(start, plain, where, within)
        if type == "string":
            return self._string(start, plain, path)
        if type == "null":
            return self.nfa.text(start, "null")
        if type == "boolean":
            return self.nfa.joined([self.nfa.text(start, "true"), self.nfa.text(start, "false")])
        automaton = self._numbers(plain, type == "integer", path)
        return None if automaton is None else self.nfa.language(start, automaton)

    def _free(self, start: int, depth: int) -> int | None:
        """Add any value with at most `depth` levels of arrays and objects."""
        ends = [self._of_type(start, type, {}, "", ()) for type in ("string", "number", "boolean", "null")]
        if depth > 0:
            ends.append(self.nfa.repeated(start, "[]", lambda state: self._free(state, depth - 1)))
            ends.append(self.nfa.entries(start, [(self.nfa.any_string, lambda state: self._free(state, depth - 1))]))
        return self.nfa.joined(ends)

    # -- objects ----------------------------------------------------------------------------------------------------

    def _object(self, start: int, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> int | None:
        path, required = where or "its top", plain.get("required", ())
        least, most = self._counts(plain, "Properties", path)
        names = dict.fromkeys([*plain.get("properties", {}), *required])
        is_free = plain.get("additionalProperties", "properties" not in plain) is not False
        if not names and (is_free or plain.get("patternProperties")):
            return self._free_object(start, plain, where, within)
        entries = list[tuple[Write, bool]]()
        for name in names:
            schema = of_name(plain, name)
            can_stand = schema is not False and holds(
                name, plain.get("propertyNames", True), path, self.rewriting.look_up
            )
            if can_stand:
                entries.append((self._entry(name, schema, f"{where}/properties/{name}", within), name in required))
            elif name in required:
                self.reason = self.reason or f"{path} requires {name!r}, which cannot be there"
                return None
        if least > len(entries) or (most is not None and most < len({*required})):
            self.reason = f"minProperties or maxProperties at {path} leave no object"
        return self.nfa.in_order(start, "{}", entries, least, most)

    def _entry(self, name: str, schema: Any, where: str, within: tuple[str, ...]) -> Write:
        """Return a function that adds the property `name` with its value."""

        def write(start: int) -> int | None:
            state = self.nfa.space(self.nfa.text(start, json.dumps(name, ensure_ascii=False)))
            return self.write(self.nfa.space(self.nfa.text(state, ":")), schema, where, within)

        return write

    def _free_object(self, start: int, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> int | None:
        """Add an object of a schema that names no properties."""
        path = where or "its top"
        least, most = self._counts(plain, "Properties", path)
        if least > 1:
            raise unheld("minProperties", path, "name the properties, for others may have one name twice")
        other = plain.get("additionalProperties", plain.get("unevaluatedProperties", True))
        schemas: dict[str | None, Any] = dict(plain.get("patternProperties", {})) or {None: other}
        if any(schema != next(iter(schemas.values())) for schema in schemas.values()):
            self._check_exclusive([each for each in schemas if each is not None], path)
        ways = list[tuple[Write, Write]]()
        for pattern, schema in schemas.items():
            if schema is not False:
                keys = self.nfa.any_string if pattern is None else self._key(pattern, path)
                if "propertyNames" in plain:
                    keys = self._named_keys(plain["propertyNames"], pattern, where, within)
                ways.append((keys, self._inner(schema, f"{where}/additionalProperties", within)))
        return self.nfa.entries(start, ways, least, most)

    def _inner(self, schema: Any, where: str, within: tuple[str, ...]) -> Write:
        """Return a function that adds a value of the schema inside an array or object.

        If the schema allows any value, this has at most `bounds.free` - 1 levels of arrays and objects.
        """
        if schema is True or schema == {}:
            return lambda state: self._free(state, max(0, self.bounds.free - 1))
        return lambda state: self.write(state, schema, where, within)

    def _key(self, pattern: str, path: str) -> Write:
        """Return a function that adds a property name that matches the pattern, or returns None if none does."""
        automaton = self._strings((pattern,), (), 0, None, path, is_open=True)
        if automaton is None:
            return lambda start: None
        return lambda start: self._text(start, '"', automaton)

    def _named_keys(self, schema: Any, pattern: str | None, where: str, within: tuple[str, ...]) -> Write:
        """Return a function that adds a property name to the automaton.

        The name satisfies a propertyNames schema and matches the pattern (None: any).
        """
        names = {"allOf": [schema, {"type": "string"} | ({"pattern": pattern} if pattern else {})]}
        return lambda start: self.write(start, names, f"{where}/propertyNames", within)

    def _check_exclusive(self, patterns: Sequence[str], path: str) -> None:
        """Raise RequestError if one name may match two of the patterns."""
        for pattern in patterns:
            automaton = self._strings((pattern,), (), 0, None, path, is_open=True)
            for other in patterns:
                anywhere = self._strings((other,), (), 0, None, path, is_anywhere=True)
                if other != pattern and automaton is not None and anywhere is not None:
                    try:
                        automaton.both(anywhere)
                    except NoText:
                        continue
                    raise unheld("patternProperties", path, f"{pattern!r:.40} and {other!r:.40} match the same names")

    # -- arrays -----------------------------------------------------------------------------------------------------

    def _array(self, start: int, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> int | None:
        path = where or "its top"
        least, most = self._counts(plain, "Items", path)
        items = plain.get("items", plain.get("unevaluatedItems", True))
        prefix = list(plain.get("prefixItems", ()))
        if "contains" in plain and plain.get("minContains", 1) > 0:
            if prefix or "maxContains" in plain or plain.get("minContains", 1) > 1:
                raise unheld("contains", path)
            prefix, least, plain = [{"allOf": [items, plain["contains"]]}], max(least, 1), plain | {"items": items}
        if plain.get("uniqueItems") and not (most is not None and most <= 1):
            if prefix:
                raise unheld("uniqueItems", path, "or leave out prefixItems and contains")
            pieces = self._parts(items, f"{where}/items", within)
            return self.nfa.in_order(start, "[]", [(each, False) for each in pieces], least, most)
        if not prefix:
            return self.nfa.repeated(start, "[]", self._inner(items, f"{where}/items", within), least, most)
        writes = [self._inner(each, f"{where}/prefixItems/{n}", within) for n, each in enumerate(prefix)]
        writes = writes[:most]
        rest = None
        if ("items" in plain or least > len(prefix)) and items is not False and (most is None or most > len(prefix)):
            rest = self._inner(items, f"{where}/items", within)
        return self.nfa.sequence(start, writes, rest, least, most)

    def _parts(self, schema: Any, where: str, within: tuple[str, ...]) -> list[Write]:
        """Return disjoint parts of a schema's documents, from which an array of different items is built.

        Each value of an enum is a part. Strings and numbers are divided by their beginnings (`distinct_texts`), objects
        by the value of a required property, and arrays by their first item.
        """
        path, pieces, types = where or "its top", list[Write](), list[str]()
        values = list[Any]()
        for plain, refs in self.rewriting.ways(schema, path, within):
            rest = {key: value for key, value in plain.items() if key != "enum"}
            if "enum" in plain:
                values += [each for each in plain["enum"] if holds(each, rest, path, self.rewriting.look_up)]
                continue
            of_plain = written_types(plain)
            if "type" not in plain and len(of_plain) > 2:
                of_plain = ["string", "number", "boolean", "null"]  # the types of a value of any kind
            for type in of_plain:
                types.append("number" if type == "integer" else type)
                values += [False, True] if type == "boolean" else [None] if type == "null" else []
                if type not in ("boolean", "null"):
                    pieces += self._parts_of_type(type, plain | {"type": [type]}, where, refs)
        kinds = {each for value in values for each in types_of(value)}
        if len({*types}) < len(types) or kinds & {*types} & {"string", "number", "object", "array"}:
            raise unheld("uniqueItems", path, "its items must differ in their types")
        different = [value for n, value in enumerate(values) if not any(is_equal(value, each) for each in values[:n])]
        return [*(partial(self.nfa.value, value=value) for value in different), *pieces]

    def _parts_of_type(self, type: str, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> list[Write]:
        """Return the parts of a plain schema of one type, as `_parts`; RequestError if it cannot be divided."""
        path = where or "its top"
        if type in ("string", "number", "integer"):
            quote, beginnings = ('"', self.bounds.beginnings) if type == "string" else ("", 0)
            texts = self._strings_of(plain, path) if quote else self._numbers(plain, type == "integer", path)
            parts = [] if texts is None else distinct_texts(texts, beginnings)
            return [partial(self._text, quote=quote, automaton=each) for each in parts]
        if type == "array" and plain.get("prefixItems") and plain.get("minItems", 0) > 0:
            first, *others = plain["prefixItems"]
            firsts = self._parts(first, f"{where}/prefixItems/0", within)[: self.bounds.beginnings]
            schemas = [plain | {"prefixItems": [each, *others]} for each in firsts]
            return [partial(self._array, plain=each, where=where, within=within) for each in schemas]
        for name in plain.get("required", ()):
            try:
                pieces = self._parts(of_name(plain, name), f"{where}/properties/{name}", within)
            except RequestError:
                continue
            schemas = [
                plain | {"properties": {**plain.get("properties", {}), name: each}, "patternProperties": {}}
                for each in pieces[: self.bounds.beginnings]
            ]
            return [partial(self._object, plain=each, where=where, within=within) for each in schemas]
        raise unheld("uniqueItems", path, "its items must be values of an enum, strings, numbers, or require one")

    def _text(self, start: int, quote: str, automaton: ByteAutomaton) -> int:
        """Add a text of the automaton between two `quote` texts, which may be empty."""
        return self.nfa.text(self.nfa.language(self.nfa.text(start, quote), automaton), quote)

    # -- strings and numbers ----------------------------------------------------------------------------------------

    def _string(self, start: int, plain: dict[str, Any], path: str) -> int | None:
        if not {"minLength", "maxLength", "pattern", "format"} & plain.keys():
            return self.nfa.any_string(start)
        automaton = self._strings_of(plain, path)
        return None if automaton is None else self._text(start, '"', automaton)

    def _strings_of(self, plain: dict[str, Any], path: str) -> ByteAutomaton | None:
        least, most = self._counts(plain, "Length", path)
        if most is not None:
            most = max(least, min(most, self.bounds.characters))
        return self._strings(tuple(plain.get("pattern", ())), tuple(plain.get("format", ())), least, most, path)

    def _strings(
        self,
        patterns: tuple[str, ...],
        formats: tuple[str, ...],
        least: int,
        most: int | None,
        path: str,
        **ends: bool,
    ) -> ByteAutomaton | None:
        """Make the automaton of strings (`strings`); None if there are none, with the cause in `reason`."""
        try:
            return strings(patterns, formats, least, most, self.bounds.in_blocks, **ends)
        except NoText:
            rules = " and ".join(map(repr, (*patterns, *formats)))
            self.reason = f"no string without control characters is {rules[:80]} at {path}, with its length"
            return None
        except (TooLarge, TooSlow):
            raise
        except RequestError as error:
            raise RequestError(f"the JSON schema's pattern {patterns[0]!r:.60} at {path} {error}") from None

    def _numbers(self, plain: dict[str, Any], is_integer: bool, path: str) -> ByteAutomaton | None:
        """Make the automaton of numbers (`Numbers`); None if there are none, with the cause in `reason`."""
        least, most = plain.get("minimum"), plain.get("maximum")
        over, under = plain.get("exclusiveMinimum"), plain.get("exclusiveMaximum")
        is_over = over is not None and (least is None or over >= least)
        is_under = under is not None and (most is None or under <= most)
        numbers = Numbers(
            over if is_over else least, under if is_under else most, is_over, is_under, plain.get("multipleOf")
        )
        try:
            automaton = numbers.automaton(is_integer)
        except NoText:
            self.reason = (
                f"there is no {'integer' if is_integer else 'number'} between the bounds at {path}; widen them"
            )
            return None
        if automaton is None:
            raise unheld("multipleOf", path, "or give it a minimum and a maximum that are close")
        return automaton

    def _counts(self, plain: Mapping[str, Any], unit: str, path: str) -> tuple[int, int | None]:
        """Return minimum and maximum of `unit`, such as "Items" (None: no maximum); RequestError if they conflict."""
        least, most = plain.get(f"min{unit}", 0), plain.get(f"max{unit}")
        if most is not None and most < least:
            raise RequestError(f"the JSON schema's max{unit} {most} at {path} is less than its min{unit} {least}")
        return least, most
