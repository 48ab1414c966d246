"""From a JSON schema to the automaton of its documents; what an automaton cannot hold is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from blockdiff.errors import NoText, RequestError
from blockdiff.sampling.constraints.byte_automaton import MOST_STATES, ByteAutomaton
from blockdiff.sampling.constraints.byte_nfa import ByteNfa
from blockdiff.sampling.constraints.json_strings import any_string, strings
from blockdiff.sampling.constraints.number_range import Numbers
from blockdiff.sampling.constraints.outlines import TooLarge, TooSlow
from blockdiff.sampling.constraints.schema_merging import is_equal, of_name, unheld, written_types
from blockdiff.sampling.constraints.schema_rewriting import Rewriting
from blockdiff.sampling.constraints.schema_values import holds, types_of
from blockdiff.sampling.constraints.token_automaton import MOST_STATES as MOST_TOKEN_STATES
from blockdiff.sampling.constraints.unique_items import distinct_texts

Write = Callable[[int], "int | None"]  # adds a piece behind a state; None if there is no text of it


@dataclass(frozen=True)
class Bounds:
    """The parts of a schema that are written out.

    refs: the $refs within each other of a schema that refers to itself; free: the arrays and objects within each other
    of a value of any kind; items: the most items of an array that has a maxItems; characters: the most of a string that
    has a maxLength; in_blocks: characters of such strings that are not ASCII's may count for up to eight; beginnings:
    the characters with which the strings of an array with uniqueItems begin.
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
    """The documents of a schema, with one space or none between their parts.

    Not every document is among them: properties come in the order of the schema, and others than the named ones not at
    all. RequestError for a schema that is no JSON, or says what an automaton cannot hold.
    """
    try:
        text = json.dumps(json.loads(schema) if isinstance(schema, str) else schema, allow_nan=False)
        json.dumps(json.loads(text), ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the JSON schema is not valid JSON ({error})") from None
    return _compiled(text)


@lru_cache(maxsize=32)
def _compiled(schema: str) -> ByteAutomaton:
    """The automaton of a schema's text, with the largest bounds that its states allow."""
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

    where: the place of a schema, for messages; within: the $refs around it. Methods return the state after what they
    add, and None where no finite document satisfies the schema.
    """

    def __init__(self, document: Any, bounds: Bounds):
        self.rewriting, self.bounds, self.nfa = Rewriting(document, bounds.refs), bounds, ByteNfa()
        self.reason = ""  # why there is no document

    def automaton(self, most: int) -> ByteAutomaton:
        """The automaton of the document's schema, of at most `most` states."""
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
        """Add the documents of a schema, or the piece that a schema was replaced with."""
        if callable(schema):
            return schema(start)
        if schema is True or schema == {}:
            return self._free(start, self.bounds.free)
        ends = [
            self._plain(start, plain, where, refs)
            for plain, refs in self.rewriting.ways(schema, where or "its top", within)
        ]
        return self._joined(ends)

    def _joined(self, ends: Sequence[int | None]) -> int | None:
        found = [end for end in ends if end is not None]
        if len(found) < 2:
            return found[0] if found else None
        end = self.nfa.state()
        for each in found:
            self.nfa.join(each, end)
        return end

    def _plain(self, start: int, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> int | None:
        place = where or "its top"
        if "enum" in plain:
            rest = {key: value for key, value in plain.items() if key != "enum"}
            values = [each for each in plain["enum"] if holds(each, rest, place, self.rewriting.look_up)]
            if not values:
                self.reason = f"no value of the enum at {place} satisfies its other keywords"
            return self._joined([self._value(start, each) for each in values])
        if not plain:
            return self._free(start, self.bounds.free)
        return self._joined([self._of_type(start, type, plain, where, within) for type in written_types(plain)])

    def _of_type(self, start: int, type: str, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> int | None:
        place = where or "its top"
        if type == "object":
            return self._object(start, plain, where, within)
        if type == "array":
            return self._array(start, plain, where, within)
        if type == "string":
            return self._string(start, plain, place)
        if type == "null":
            return self.nfa.text(start, "null")
        if type == "boolean":
            return self._joined([self.nfa.text(start, "true"), self.nfa.text(start, "false")])
        automaton = self._numbers(plain, type == "integer", place)
        return None if automaton is None else self.nfa.language(start, automaton)

    def _free(self, start: int, depth: int) -> int | None:
        """Add any value, with at most so many arrays and objects within each other."""
        ends = [self._of_type(start, type, {}, "", ()) for type in ("string", "number", "boolean", "null")]
        if depth > 0:
            ends.append(self._list(start, lambda state: self._free(state, depth - 1)))
            ends.append(self._map(start, [(self._any_string, lambda state: self._free(state, depth - 1))]))
        return self._joined(ends)

    def _value(self, start: int, value: Any) -> int:
        """Add one value."""
        nfa = self.nfa
        if isinstance(value, Mapping):
            state = nfa.text(start, "{")
            for number, (key, inner) in enumerate(value.items()):
                state = nfa.space(nfa.text(state, ",")) if number else nfa.space(state)
                state = self._value(nfa.space(nfa.text(nfa.space(self._value(state, key)), ":")), inner)
            return nfa.text(nfa.space(state), "}")
        if isinstance(value, list):
            state = nfa.text(start, "[")
            for number, inner in enumerate(value):
                state = nfa.space(nfa.text(nfa.space(state), ",")) if number else nfa.space(state)
                state = self._value(state, inner)
            return nfa.text(nfa.space(state), "]")
        return nfa.text(start, json.dumps(value, ensure_ascii=False))

    # -- objects ----------------------------------------------------------------------------------------------------

    def _object(self, start: int, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> int | None:
        place, required = where or "its top", plain.get("required", ())
        least, most = self._counts(plain, "Properties", place)
        names = dict.fromkeys([*plain.get("properties", {}), *required])
        is_free = plain.get("additionalProperties", "properties" not in plain) is not False
        if not names and (is_free or plain.get("patternProperties")):
            return self._free_object(start, plain, where, within)
        entries = list[tuple[Write, bool]]()
        for name in names:
            schema = of_name(plain, name)
            can_stand = schema is not False and holds(
                name, plain.get("propertyNames", True), place, self.rewriting.look_up
            )
            if can_stand:
                entries.append((self._entry(name, schema, f"{where}/properties/{name}", within), name in required))
            elif name in required:
                self.reason = self.reason or f"{place} requires {name!r}, which cannot be there"
                return None
        return self._in_order(start, "{}", entries, least, most)

    def _entry(self, name: str, schema: Any, where: str, within: tuple[str, ...]) -> Write:
        def write(start: int) -> int | None:
            state = self.nfa.space(self.nfa.text(start, json.dumps(name, ensure_ascii=False)))
            return self.write(self.nfa.space(self.nfa.text(state, ":")), schema, where, within)

        return write

    def _free_object(self, start: int, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> int | None:
        """Add an object whose properties have no names in the schema."""
        place = where or "its top"
        least, most = self._counts(plain, "Properties", place)
        if least > 1:
            raise unheld("minProperties", place, "name the properties, for others may have one name twice")
        other = plain.get("additionalProperties", plain.get("unevaluatedProperties", True))
        schemas: dict[str | None, Any] = dict(plain.get("patternProperties", {})) or {None: other}
        if any(schema != next(iter(schemas.values())) for schema in schemas.values()):
            self._check_exclusive([each for each in schemas if each is not None], place)
        ways = list[tuple[Write, Write]]()
        for pattern, schema in schemas.items():
            if schema is not False:
                keys = self._any_string if pattern is None else self._key(pattern, place)
                if "propertyNames" in plain:
                    keys = self._named_keys(plain["propertyNames"], pattern, where, within)
                ways.append((keys, self._inner(schema, f"{where}/additionalProperties", within)))
        return self._map(start, ways, least, most)

    def _inner(self, schema: Any, where: str, within: tuple[str, ...]) -> Write:
        if schema is True or schema == {}:
            return lambda state: self._free(state, max(0, self.bounds.free - 1))
        return lambda state: self.write(state, schema, where, within)

    def _any_string(self, start: int) -> int:
        return self.nfa.text(any_string(self.nfa, self.nfa.text(start, '"')), '"')

    def _key(self, pattern: str, place: str) -> Write:
        automaton = self._strings((pattern,), (), 0, None, place, is_open=True)
        if automaton is None:
            return lambda start: None
        return lambda start: self._text(start, '"', automaton)

    def _named_keys(self, schema: Any, pattern: str | None, where: str, within: tuple[str, ...]) -> Write:
        names = {"allOf": [schema, {"type": "string"} | ({"pattern": pattern} if pattern else {})]}
        return lambda start: self.write(start, names, f"{where}/propertyNames", within)

    def _check_exclusive(self, patterns: Sequence[str], place: str) -> None:
        """Raise RequestError if one name may match two patterns, whose schemas differ."""
        for pattern in patterns:
            own = self._strings((pattern,), (), 0, None, place, is_open=True)
            for other in patterns:
                anywhere = self._strings((other,), (), 0, None, place, is_anywhere=True)
                if other != pattern and own is not None and anywhere is not None:
                    try:
                        own.both(anywhere)
                    except NoText:
                        continue
                    raise unheld("patternProperties", place, f"{pattern!r:.40} and {other!r:.40} match the same names")

    def _in_order(
        self, start: int, signs: str, entries: Sequence[tuple[Write, bool]], least: int, most: int | None
    ) -> int | None:
        """Add entries in their order between two signs, each once; those that are not required may be left out."""
        nfa, count = self.nfa, len(entries)
        needed = [number for number, (_, is_required) in enumerate(entries) if is_required]
        most = None if most is None or most >= count else most
        if max(least, len(needed)) > (count if most is None else most):
            self.reason = self.reason or f"{count} of its parts are too few, or {len(needed)} too many"
            return None
        counted = max(least if least > max(1, len(needed)) else 0, most or 0)  # more make no difference
        end = nfa.state()
        first = nfa.text(start, signs[0])
        if not needed and least == 0:
            nfa.join(nfa.text(nfa.space(first), signs[1]), end)
        # the state before the choice of an entry, by the number of entries that are written
        choose = [[nfa.state() for _ in range(count + 1)] for _ in range(counted + 1)]
        nfa.join(nfa.space(first), choose[0][0])
        is_written = False
        for written in range(counted + 1):
            following = min(written + 1, counted)
            for number, (write, is_required) in enumerate(entries):
                if not is_required:
                    nfa.join(choose[written][number], choose[written][number + 1])
                if written > number or (most is not None and written == most):
                    continue
                after = write(choose[written][number])
                if after is None:
                    if is_required:
                        return None
                    continue
                after = nfa.space(after)
                if not any(each > number for each in needed) and (counted == 0 or following >= least):
                    nfa.join(nfa.text(after, signs[1]), end)
                    is_written = True
                if number + 1 < count and (most is None or following < most):
                    nfa.join(nfa.space(nfa.text(after, ",")), choose[following][number + 1])
        return end if is_written or (not needed and least == 0) else None

    def _map(
        self, start: int, ways: Sequence[tuple[Write, Write]], least: int = 0, most: int | None = None
    ) -> int | None:
        """Add an object of any number of entries, each with one of some pairs of a key and a value."""

        def entry(state: int) -> int | None:
            ends = list[int | None]()
            for key, value in ways:
                after = key(state)
                if after is not None:
                    after = self.nfa.space(self.nfa.text(self.nfa.space(after), ":"))
                    ends.append(value(after))
            return self._joined(ends)

        return self._repeated(start, "{}", entry, least, most)

    # -- arrays -----------------------------------------------------------------------------------------------------

    def _array(self, start: int, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> int | None:
        place = where or "its top"
        least, most = self._counts(plain, "Items", place)
        items = plain.get("items", plain.get("unevaluatedItems", True))
        prefix = list(plain.get("prefixItems", ()))
        if "contains" in plain and plain.get("minContains", 1) > 0:
            if prefix or "maxContains" in plain or plain.get("minContains", 1) > 1:
                raise unheld("contains", place)
            prefix, least, plain = [{"allOf": [items, plain["contains"]]}], max(least, 1), plain | {"items": items}
        if plain.get("uniqueItems") and not (most is not None and most <= 1):
            if prefix:
                raise unheld("uniqueItems", place, "or leave out prefixItems and contains")
            pieces = self._parts(items, f"{where}/items", within)
            return self._in_order(start, "[]", [(each, False) for each in pieces], least, most)
        if not prefix:
            return self._list(start, self._inner(items, f"{where}/items", within), least, most)
        writes = [self._inner(each, f"{where}/prefixItems/{n}", within) for n, each in enumerate(prefix)]
        writes = writes[:most]
        rest = None
        if ("items" in plain or least > len(prefix)) and items is not False and (most is None or most > len(prefix)):
            rest = self._inner(items, f"{where}/items", within)
        return self._sequence(start, writes, rest, least, most)

    def _sequence(
        self, start: int, writes: Sequence[Write], rest: Write | None, least: int, most: int | None
    ) -> int | None:
        """Add an array of items in their places, and others behind them."""
        nfa, end = self.nfa, self.nfa.state()
        state = nfa.text(start, "[")
        for number, write in enumerate(writes):
            state = nfa.space(nfa.text(state, ",")) if number else nfa.space(state)
            after = write(state)
            if after is None:
                return None
            state = nfa.space(after)
        if least <= len(writes):
            nfa.join(nfa.text(state, "]"), end)
        elif rest is None:
            return None
        if rest is not None:
            left = None if most is None else most - len(writes)
            needed = max(0, least - len(writes))
            before = nfa.space(nfa.text(state, ",")) if writes else nfa.space(state)
            behind = self._items(before, rest, max(1, needed), left)
            if behind is not None:
                nfa.join(nfa.text(behind, "]"), end)
            elif needed:
                return None
        return end

    def _list(self, start: int, item: Write, least: int = 0, most: int | None = None) -> int | None:
        return self._repeated(start, "[]", item, least, most)

    def _repeated(self, start: int, signs: str, item: Write, least: int, most: int | None) -> int | None:
        """Add at least and at most so many items between two signs."""
        nfa, end = self.nfa, self.nfa.state()
        first = nfa.space(nfa.text(start, signs[0]))
        if least == 0:
            nfa.join(nfa.text(first, signs[1]), end)
        behind = None if most == 0 else self._items(first, item, max(1, least), most)
        if behind is None:
            return end if least == 0 else None
        nfa.join(nfa.text(behind, signs[1]), end)
        return end

    def _items(self, start: int, item: Write, least: int, most: int | None) -> int | None:
        """Add items with commas between them, of which there are some, and a space."""
        nfa, last = self.nfa, self.nfa.state()
        most = None if most is None else max(least, min(most, self.bounds.items))
        state = start
        for number in range(least if most is None else most):
            loop = nfa.join(state, nfa.state())
            after = item(loop)
            if after is None:
                return None
            after = nfa.space(after)
            if number + 1 >= least:
                nfa.join(after, last)
            state = nfa.space(nfa.text(after, ","))
        if most is None:
            nfa.join(state, loop)
        return last

    def _parts(self, schema: Any, where: str, within: tuple[str, ...]) -> list[Write]:
        """Pieces of which no two have a document in common, for an array of different items.

        The values of an enum are one piece each, other texts are divided by their beginnings, objects by a property
        that they require, and arrays by their first item.
        """
        place, pieces, types = where or "its top", list[Write](), list[str]()
        values = list[Any]()
        for plain, refs in self.rewriting.ways(schema, place, within):
            rest = {key: value for key, value in plain.items() if key != "enum"}
            if "enum" in plain:
                values += [each for each in plain["enum"] if holds(each, rest, place, self.rewriting.look_up)]
                continue
            of_plain = written_types(plain)
            if "type" not in plain and len(of_plain) > 2:
                of_plain = ["string", "number", "boolean", "null"]  # of a value of any kind
            for type in of_plain:
                types.append("number" if type == "integer" else type)
                values += [False, True] if type == "boolean" else [None] if type == "null" else []
                if type not in ("boolean", "null"):
                    pieces += self._parts_of_type(type, plain | {"type": [type]}, where, refs)
        kinds = {each for value in values for each in types_of(value)}
        if len({*types}) < len(types) or kinds & {*types} & {"string", "number", "object", "array"}:
            raise unheld("uniqueItems", place, "its items must differ in their types")
        different = [value for at, value in enumerate(values) if not any(is_equal(value, each) for each in values[:at])]
        return [*(partial(self._value, value=value) for value in different), *pieces]

    def _parts_of_type(self, type: str, plain: dict[str, Any], where: str, within: tuple[str, ...]) -> list[Write]:
        place = where or "its top"
        if type in ("string", "number", "integer"):
            quote, beginnings = ('"', self.bounds.beginnings) if type == "string" else ("", 0)
            texts = self._strings_of(plain, place) if quote else self._numbers(plain, type == "integer", place)
            found = [] if texts is None else distinct_texts(texts, beginnings)
            return [partial(self._text, quote=quote, automaton=each) for each in found]
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
        raise unheld("uniqueItems", place, "its items must be values of an enum, strings, numbers, or require one")

    def _text(self, start: int, quote: str, automaton: ByteAutomaton) -> int:
        return self.nfa.text(self.nfa.language(self.nfa.text(start, quote), automaton), quote)

    # -- strings and numbers ----------------------------------------------------------------------------------------

    def _string(self, start: int, plain: dict[str, Any], place: str) -> int | None:
        if not {"minLength", "maxLength", "pattern", "format"} & plain.keys():
            return self._any_string(start)
        automaton = self._strings_of(plain, place)
        return None if automaton is None else self._text(start, '"', automaton)

    def _strings_of(self, plain: dict[str, Any], place: str) -> ByteAutomaton | None:
        least, most = self._counts(plain, "Length", place)
        if most is not None:
            most = max(least, min(most, self.bounds.characters))
        return self._strings(tuple(plain.get("pattern", ())), tuple(plain.get("format", ())), least, most, place)

    def _strings(
        self,
        patterns: tuple[str, ...],
        formats: tuple[str, ...],
        least: int,
        most: int | None,
        place: str,
        **ends: bool,
    ) -> ByteAutomaton | None:
        try:
            return strings(patterns, formats, least, most, self.bounds.in_blocks, **ends)
        except NoText:
            said = " and ".join(map(repr, (*patterns, *formats)))
            self.reason = f"no string without control characters is {said[:80]} at {place}, with its length"
            return None
        except (TooLarge, TooSlow):
            raise
        except RequestError as error:
            raise RequestError(f"the JSON schema's pattern {patterns[0]!r:.60} at {place} {error}") from None

    def _numbers(self, plain: dict[str, Any], is_integer: bool, place: str) -> ByteAutomaton | None:
        least, most = plain.get("minimum"), plain.get("maximum")
        over, under = plain.get("exclusiveMinimum"), plain.get("exclusiveMaximum")
        is_over = over is not None and (least is None or over >= least)
        is_under = under is not None and (most is None or under <= most)
        numbers = Numbers(
            over if is_over else least, under if is_under else most, is_over, is_under, plain.get("multipleOf")
        )
        try:
            found = numbers.automaton(is_integer)
        except NoText:
            self.reason = (
                f"there is no {'integer' if is_integer else 'number'} between the bounds at {place}; widen them"
            )
            return None
        if found is None:
            raise unheld("multipleOf", place, "or give it a minimum and a maximum that are close")
        return found

    def _counts(self, plain: Mapping[str, Any], of: str, place: str) -> tuple[int, int | None]:
        """The values of minX and maxX (None: no end)."""
        least, most = plain.get(f"min{of}", 0), plain.get(f"max{of}")
        if most is not None and most < least:
            raise RequestError(f"the JSON schema's max{of} {most} at {place} is less than its min{of} {least}")
        return least, most
