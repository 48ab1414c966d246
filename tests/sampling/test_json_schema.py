"""JSON schemas: every text of an automaton is a document that jsonschema validates; what cannot be held is refused."""

from __future__ import annotations

import datetime
import json
import math
import random

import jsonschema
import pytest

from blockdiff.errors import NoText, RequestError
from blockdiff.sampling.constraints.compile_limit import TooLarge, compile_limit
from blockdiff.sampling.constraints.json_schema import schema_automaton
from blockdiff.sampling.constraints.number_range import Numbers
from blockdiff.sampling.constraints.token_automaton import MOST_STATES
from blockdiff.serving.chat import schema_of_call
from tests.support.random_schemas import invalid_texts, judge, random_documents
from tests.support.schema_kinds import KINDS, schema_of_kind

pytestmark = pytest.mark.quick

SCHEMAS = [
    """{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"]}""",
    """{"type": "object", "properties": {"a": {"type": "number"}, "é": {"type": ["boolean", "null"]},
        "c": {"const": [1, {"x": null}]}}}""",
    """{"type": ["array", "object"], "items": {"type": "null"}, "maxItems": 2, "properties": {"a": {"enum": [[], {}]},
        "b": {"type": "null"}, "c": {"type": "null"}}, "required": ["b"]}""",
    r"""{"type": "array", "items": {"anyOf": [{"type": "integer"}, {"enum": ["q\"\\", "é", null, true, 1.5]}]},
         "minItems": 1, "maxItems": 3}""",
    """{"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string", "minLength": 1, "maxLength": 3}]}""",
    """{"type": "object", "additionalProperties": {"type": "integer"}}""",
    """{"$defs": {"d": {"type": "string", "format": "date"}}, "type": "object",
        "properties": {"when": {"$ref": "#/$defs/d"}}, "required": ["when"]}""",
    """{"type": "object", "properties": {"child": {"$ref": "#"}, "id": {"type": "string", "format": "uuid"}}}""",
    """{"type": "string", "pattern": "^[a-c]+(-x)?$"}""",
    """{"type": "string", "format": "date-time"}""",
    """{"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}, "next": {"anyOf": [{"type": "null"},
        {"$ref": "#"}]}}, "required": ["n", "next"]}""",
    """{"type": "object", "properties": {"n": {"enum": [1, 2]}, "children": {"type": "array", "items": {"$ref": "#"},
        "maxItems": 1}}, "required": ["children", "n"]}""",
    """{"$ref": "#/$defs/a", "$defs": {"a": {"type": ["object", "null"], "properties": {"b": {"$ref": "#/$defs/b"}},
        "required": ["b"]}, "b": {"type": "array", "prefixItems": [{"$ref": "#/$defs/a"}]}}}""",
    """{"type": "object", "properties": {"v": {"$ref": "#/$defs/1"}}, "required": ["v"], "$defs": {
        "1": {"$ref": "#/$defs/2"}, "2": {"$ref": "#/$defs/3"}, "3": {"$ref": "#/$defs/4"}, "4": {"$ref": "#/$defs/5"},
        "5": {"$ref": "#/$defs/6"}, "6": {"type": "integer"}}}""",
    """{"type": "array", "items": {"type": "string", "pattern": "yes|no"}, "minItems": 1, "maxItems": 4}""",
    """{"type": "object", "properties": {"age": {"type": ["integer", "null"], "minimum": 18, "maximum": 120},
        "share": {"type": "number", "exclusiveMinimum": -2, "maximum": 1}, "n": {"const": 1000000000000000},
        "minimum": {"type": "array", "items": {"type": "integer", "exclusiveMinimum": 2.5}}}}""",
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_texts_of_a_schema_are_documents_that_it_validates(schema):
    texts = random_documents(schema, random.Random(0), 60)
    for text in texts:
        jsonschema.validate(json.loads(text), json.loads(schema))
    assert len(texts) > 3


@pytest.mark.parametrize("seed", range(30))
def test_texts_of_random_schemas_with_formats_patterns_and_recursion_are_valid(seed):
    judged, invalid = invalid_texts("random", seed)
    assert judged and not invalid


@pytest.mark.parametrize(
    "pattern,held,left_out",
    [
        ("yes|no", ["yes", "no"], ["yes|no", "maybe"]),
        ("^a|b$", ["a", "b"], ["ab"]),
        (r"\d+", ["0", "42"], ["", "\u0664", "4a"]),
        (r"[\d-]\w", ["4_", "-Z"], ["\u0664a", "4é"]),
        (r"[^\D]", ["7"], ["a", "\u0664"]),
        (r"[^\W\d]", ["a", "_"], ["7", "é", "-"]),
        (r"a\sb", ["a b"], ["ab", "a\u3000b"]),
        (r"[^\S]", [" "], ["a", "\u3000"]),
        (r"[a\s]", ["a", " "], ["b"]),
        (r"[^\s\\\x00-\x1f\x22]", ["a", "é"], [" ", "\u3000", "\ufeff"]),
        ("[[a]", ["[", "a"], ["]"]),
        (r"[a&&b\]]", ["a", "&", "b", "]"], ["c"]),
        (r"\<b\>", ["<b>"], ["b"]),
        (r"costs\$", ["costs$"], ["costs"]),
    ],
)
def test_patterns_are_those_of_a_json_schema(pattern, held, left_out):
    # between quotes with whatever stands around them, here a property
    schema = {
        "type": "object",
        "properties": {"a": {"type": ["string", "null"], "pattern": pattern}},
        "required": ["a"],
    }
    automaton = schema_automaton(schema)
    assert automaton.accepts(b'{"a":null}')
    for text in (*held, *left_out):
        written = json.dumps({"a": text}, ensure_ascii=False).encode()
        assert automaton.accepts(written) == (text in held), text
    assert not any(automaton.accepts(f'{{"a":{text}}}'.encode()) for text in (held[0], f'"{held[0]}', f'{held[0]}"'))


@pytest.mark.parametrize(
    "name,held,left_out",
    [
        ("date", ["2024-02-29"], ["2023-02-29", "2024-2-9", "0000-01-01", "\u0662\u0660\u0662\u0664-01-01"]),
        (
            "time",
            ["00:00:00Z", "23:59:59.123456789+23:59", "12:30:00-05:30"],
            ["24:00:00Z", "12:30:00", "12:30Z", "12:60:00Z", "12:30:00.Z", "12:30:00+24:00", "12:30:00z"],
        ),
        (
            "date-time",
            ["2020-02-29T10:00:00Z", "1999-12-31T23:59:59.5+01:00"],
            ["2020-02-31T10:00:00Z", "2020-02-29T10:00:00", "2020-02-29 10:00:00Z", "2020-02-29"],
        ),
        (
            "email",
            ["a@b.c", "first.last+tag@mail.example.org", "o'neil@x-y.de", "{a|b}@1.2"],
            ["a@b", "a..b@c.d", ".a@b.c", "a@-b.c", "a@b-.c", "a@b.c.", "a b@c.d", "a@b@c.d", "é@b.c", "@b.c"],
        ),
        (
            "uuid",
            ["123e4567-e89b-12d3-a456-426614174000", "123E4567-E89B-12D3-A456-426614174000"],
            ["123e4567e89b12d3a456426614174000", "123e4567-e89b-12d3-a456-42661417400g"],
        ),
        ("ipv4", ["0.0.0.0", "255.249.199.9", "10.20.30.100"], ["256.0.0.1", "01.2.3.4", "1.2.3", "1.2.3.4.5"]),
        ("ipv6", ["::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8"], ["1:2", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9"]),
        ("hostname", ["localhost", "a-1.example.org"], ["-a", "a-", "a..b", "a_b", "", "a" * 64]),
        (
            "uri",
            ["https://example.org", "http://localhost:80/a/b%20c?q=1#top", "ftp://a.b/"],
            ["example.org", "https://", "https://a b", "/a", "https://a/%2", "https://a/{b}"],
        ),
        ("uri-reference", ["/a/b", "", "#x", "https://a.org/b"], ["a b", "/%", "{a}"]),
        ("duration", ["P1D", "PT30M", "P1Y2M3DT4H5M6S", "P2W"], ["P", "PT", "1D", "P1S", "P1W2D"]),
        ("json-pointer", ["", "/a/b~1c", "/a~0"], ["a", "/~2"]),
    ],
)
def test_a_format_holds_its_texts_and_no_others(name, held, left_out):
    automaton = schema_automaton({"type": "string", "format": name})
    assert [text for text in held + left_out if automaton.accepts(f'"{text}"'.encode())] == held


def test_the_dates_are_those_of_the_calendar():
    automaton = schema_automaton({"type": "string", "format": "date"})
    for year in (*range(1, 10), 99, 100, 400, *range(1896, 1910), *range(1995, 2030), 2100, 2400, 9996, 9999):
        for month in range(14):
            for day in range(33):
                text = f"{year:04}-{month:02}-{day:02}"
                try:
                    datetime.date.fromisoformat(text)
                except ValueError:
                    assert not automaton.accepts(f'"{text}"'.encode()), text
                else:
                    assert automaton.accepts(f'"{text}"'.encode()), text


@pytest.mark.parametrize(
    "schema,message",
    [
        ("{", "not valid JSON"),
        ([], r"\[\] at its top"),
        (False, "no document"),
        ({"type": "thing"}, 'type "thing" at its top'),
        ({"type": "number", "multipleOf": 0.01}, "multipleOf at its top"),
        ({"type": "integer", "minimum": True}, "minimum at its top.*number.*true"),
        ({"type": "integer", "minimum": 3, "exclusiveMaximum": 3}, "no integer.*at its top"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "oneOf at its top.*anyOf"),
        ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, "oneOf at its top.*anyOf"),
        ({"type": "string", "not": {"pattern": "a"}}, "not at its top"),
        ({"type": "string", "pattern": "(?=a)b"}, r"pattern '\(\?=a\)b' at its top has look-around at character 1"),
        ({"type": "string", "pattern": r"^\n$"}, "control characters"),
        ({"type": "string", "pattern": 5}, "pattern at its top"),
        ({"type": "string", "pattern": "a", "minLength": 3}, "'a' at its top, with its length"),
        ({"type": "string", "format": ["date"]}, r"format at its top.*\['date'\]"),
        ({"type": "string", "enum": [1]}, "no value of the enum at its top"),
        ({"enum": []}, "at least one value"),
        ({"$ref": "https://example.org/x"}, "only #"),
        ({"$ref": "#/nowhere"}, "'#/nowhere'"),
        ({"$dynamicRef": "#a"}, r"\$dynamicRef at its top"),
        ({"$ref": "#"}, "itself.* '#'"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "itself without end"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "itself without end"),
        ({"anyOf": []}, "anyOf .*list of schemas"),
        ({"type": "array", "prefixItems": 5}, "prefixItems at its top"),
        ({"type": "array", "contains": {"type": "null"}, "minContains": 2}, "contains at its top"),
        ({"type": "array", "items": {"type": "object"}, "uniqueItems": True}, "uniqueItems at /items"),
        ({"type": "object", "minProperties": 2}, "minProperties at its top"),
        ({"patternProperties": {"^a": {"type": "null"}, "b": {"type": "string"}}}, "patternProperties at its top"),
        ({"type": "string", "minLength": -1}, "minLength at its top.*-1"),
        ({"type": "array", "items": {"type": "null"}, "minItems": 3, "maxItems": 2}, "minItems 3"),
        ({"properties": {"a": {"type": "null"}}, "required": 5}, "required at its top must"),
        ({"properties": {"a": {"type": "null"}}, "required": [["a"]]}, r"\['a'\]\] at its top"),
        ({"additionalProperties": False, "required": ["b"]}, "requires 'b'"),
        ({"properties": {f"p{n}": {"type": "string"} for n in range(2000)}}, "states or more"),
        ({"const": math.nan}, "not valid JSON"),
    ],
)
def test_what_an_automaton_would_not_hold_of_a_schema_is_refused_by_name(schema, message):
    with pytest.raises(RequestError, match=message) as caught:
        schema_automaton(schema)
    assert "\n" not in str(caught.value)


def test_numbers_have_the_bounds_and_the_factor_that_are_asked_for():
    generator = random.Random(0)
    texts = [f"{sign}{x}{end}" for sign in ("", "-") for x in range(14) for end in ("", ".0", ".05", ".25", ".9")]
    for _ in range(40):
        low, high = (generator.choice([-12, 0, 7, 9, 10, 0.25, -0.5, 0.05, 9.93]) for _ in range(2))
        ends = generator.choice([low, None]), generator.choice([high, None])
        bounds = Numbers(*ends, *generator.choices([True, False], k=2), generator.choice([None, None, 1, 3, 0.25]))
        for is_integer in (True, False):
            try:
                automaton = bounds.automaton(is_integer)
            except NoText:
                automaton = None
            for text in texts:
                x = float(text)
                is_above = bounds.least is None or (x > bounds.least if bounds.over else x >= bounds.least)
                is_below = bounds.most is None or (x < bounds.most if bounds.under else x <= bounds.most)
                is_right = is_above and is_below and not (is_integer and "." in text)
                is_right = is_right and (bounds.factor is None or (x / bounds.factor).is_integer())
                is_held = automaton is not None and automaton.accepts(text.encode())
                # zero has no sign and needs no point, and of multiples one spelling is enough
                assert is_held <= is_right, (bounds, text)
                assert is_held or not is_right or "-0" in text or text.endswith(".0") or bounds.factor, (bounds, text)
    assert not any(Numbers().automaton(False).accepts(text) for text in (b"01", b"-01", b"1.", b".5", b""))


DRAFT_7 = "http://json-schema.org/draft-07/schema#"
STRING, NULL = {"type": "string"}, {"type": "null"}
ONES = {"type": "object", "properties": {"a": {"items": {"const": 1}, "type": "array"}}, "required": ["a"]}
DIAMOND = {**{f"{n}": {"$ref": "#/$defs/ones"} for n in range(3)}, "ones": {**ONES, "additionalProperties": False}}
LISTS = {"lists": {"type": "array", "items": {"$ref": "#/$defs/lists"}}}
KIND = {"kind": {"enum": ["a", "b"]}}


@pytest.mark.parametrize(
    "schema,held,left_out",
    [
        ({}, ["1", '"a"', "null", '{"a":[1]}'], ["[[[1]]]", "NaN"]),
        ({"type": "object"}, ["{}", '{"a":[1,true]}'], ["[]"]),
        ({"type": "array"}, ["[]", '[1,"a",{"b":2}]'], ["{}"]),
        ({"title": "A", "x-own": 5, "type": "string", "minimum": 3}, ['"a"'], ["3"]),
        ({"properties": {'a"': STRING}, "required": ['a"']}, [r'{"a\"":""}'], ["{}"]),
        ({"const": {"a": [1, {"b": None}]}}, ['{"a":[1,{"b":null}]}', '{ "a" : [1, {"b":null}] }'], ["{}"]),
        ({"enum": [1, "a", [True]], "type": ["string", "array"]}, ['"a"', "[true]"], ["1"]),
        ({"enum": ["a", "bcd"], "minLength": 2}, ['"bcd"'], ['"a"']),
        ({"type": "number", "minimum": 0.5, "maximum": 2.25}, ["0.5", "2.25", "1", "2.0"], ["0.49", "2.26", "3"]),
        ({"type": "integer", "multipleOf": 7}, ["0", "-14", "700"], ["8", "7.5"]),
        ({"type": "number", "multipleOf": 0.25}, ["1", "0.75", "-2.50"], ["0.3", "1.1"]),
        ({"type": "number", "multipleOf": 0.01, "minimum": 0, "maximum": 1}, ["0.25", "1"], ["0.255", "1.01"]),
        ({"type": "string", "pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}, ['"ab"'], ['"a"', '"abcd"']),
        ({"type": "string", "pattern": ".+"}, ['"a"', r'"\"\\"'], ['""', r'"\n"']),
        ({"type": "string", "pattern": r"^(?!\s*$)\S+"}, ['"a"'], ['" "', '"　"', '""']),
        ({"type": "string", "maxLength": 200}, [f'"{"a" * 200}"', f'"{"é" * 200}"'], [f'"{"a" * 201}"']),
        ({"allOf": [{"properties": {"a": STRING}}, {"required": ["a"]}]}, ['{"a":""}'], ["{}", '{"a":1}']),
        ({"allOf": [{"$ref": "#/$defs/a"}] * 10, "$defs": {"a": {"enum": [1, 2]}}}, ["1", "2"], ["3"]),
        (
            {"allOf": [{"$ref": f"#/$defs/{n % 3}"} for n in range(12)], "$defs": DIAMOND},
            ['{"a":[1]}', '{"a":[]}'],
            ['{"a":[2]}', "{}"],
        ),
        ({"allOf": [{"$ref": "#/$defs/lists"}] * 6, "$defs": LISTS}, ["[]", "[[],[[]]]"], ["[1]"]),
        ({"allOf": [{"minimum": 3}, {"type": "integer", "maximum": 4}]}, ["3", "4"], ["2", "5", "3.5"]),
        ({"anyOf": [STRING, {"type": "integer"}], "minLength": 1, "minimum": 5}, ['"a"', "5"], ['""', "4"]),
        ({"oneOf": [STRING, {"type": "array", "items": STRING}]}, ['"a"', '["a"]'], ["1"]),
        (
            {"oneOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": NULL, "b": NULL}},
            ['{"a":null}', '{"b":null}'],
            ["{}", '{"a":null,"b":null}'],
        ),
        (
            {"oneOf": [{"properties": {"kind": {"const": each}, each: NULL}} for each in "ab"]},
            ['{"kind":"a","a":null}', '{"kind":"b"}'],
            ["{}", '{"kind":"b","a":null}'],
        ),
        ({"oneOf": [{"maximum": 3}, {"minimum": 5}], "type": "integer"}, ["3", "5"], ["4"]),
        (
            {"if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["x"]}, "properties": KIND},
            ['{"kind":"a","x":1}', '{"kind":"b"}'],
            ['{"kind":"a"}', "{}"],
        ),
        ({"type": "object", "properties": {"a": NULL}, "not": {"required": ["a"]}}, ["{}"], ['{"a":null}']),
        (
            {"properties": {"a": NULL, "b": NULL}, "dependentRequired": {"a": ["b"]}},
            ["{}", '{"b":null}', '{"a":null,"b":null}'],
            ['{"a":null}'],
        ),
        (
            {"patternProperties": {"^x-": NULL, "^[0-9]+$": STRING}, "additionalProperties": False},
            ['{"x-a":null,"12":"a"}', "{}"],
            ['{"x-a":"a"}', '{"a":null}'],
        ),
        ({"additionalProperties": NULL, "propertyNames": {"enum": ["a", "b"]}}, ['{"b":null}'], ['{"c":null}']),
        ({"properties": {"a": NULL, "b": NULL}, "minProperties": 1}, ['{"a":null}', '{"b":null}'], ["{}"]),
        ({"properties": {"a": NULL, "b": NULL}, "maxProperties": 1}, ['{"b":null}'], ['{"a":null,"b":null}']),
        ({"required": ["a"]}, ['{"a":1}', '{"a":{}}'], ["{}"]),
        (
            {"$schema": DRAFT_7, "items": [STRING, NULL], "additionalItems": False},
            ['["a",null]'],
            ["[1]", '["a",null,1]'],
        ),
        ({"type": "array", "contains": {"const": 3}}, ["[3]", '[3,"a"]'], ["[]", "[4]"]),
        ({"items": {"enum": ["a", "b"]}, "uniqueItems": True}, ["[]", '["a","b"]'], ['["a","a"]']),
        ({"items": STRING, "uniqueItems": True, "minItems": 2}, ['["Ann","bo"]', '["a","b"]'], ['["a"]', '["a","a"]']),
        ({"items": {"type": "integer"}, "uniqueItems": True}, ["[-3,10,11,250]"], ["[1,1]"]),
        (
            {"items": {"properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}, "uniqueItems": True},
            ['[{"a":1},{"a":2}]'],
            ['[{"a":1},{"a":1}]'],
        ),
        (
            {"properties": {"a": {"$id": "https://a.org/a", "$ref": "#/$defs/b", "$defs": {"b": NULL}}}},
            ['{"a":null}'],
            ['{"a":1}'],
        ),
    ],
)
def test_keywords_hold_their_documents_and_no_others(schema, held, left_out):
    automaton = schema_automaton(schema)
    assert [text for text in held + left_out if automaton.accepts(text.encode())] == held
    validator = judge(schema)
    assert all(validator.is_valid(json.loads(text)) for text in held)
    texts = random_documents(schema, random.Random(0), 20)
    assert texts and all(validator.is_valid(json.loads(text)) for text in texts)


def test_most_schemas_of_the_field_compile_and_their_texts_are_valid():
    compiled, count = 0, 3
    for kind in KINDS:
        for seed in range(count):
            judged, invalid = invalid_texts(kind, seed, 5)
            assert not invalid, (kind, seed)
            compiled += judged > 0 and schema_automaton(schema_of_kind(kind, seed)).states < MOST_STATES
    assert compiled >= 0.75 * count * len(KINDS)


def test_a_schema_that_is_too_large_is_refused_while_it_is_added_up():
    long = {"enum": [f"value number {number}" for number in range(3000)]}
    schema = {"$defs": {"long": long}, "type": "array", "prefixItems": [{"$ref": "#/$defs/long"}] * 2150}
    with pytest.raises(TooLarge, match="states"):
        schema_automaton(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"not": {"required": ["a"]}}, {"not": {"required": ["b"]}}], "properties": {"a": NULL, "b": NULL}},
        {"enum": ["a" * 40, "b"], "pattern": "^(b|(a+)+x)$"},
        {"properties": {"a": {"$ref": "#"}, **{f"p{n}": {"$ref": "#"} for n in range(9)}}, "type": "object"},
        {"items": {"anyOf": [{"$ref": "#"}] * 9}, "type": "array"},
        {"dependentSchemas": {"a": {"type": "object"}}, "required": ["a"], "type": ["boolean", "object"]},
        {"contains": {"const": 1}, "uniqueItems": False, "type": "array"},
    ],
)
def test_schemas_on_which_walks_could_go_on_without_end_compile(schema):
    with compile_limit(5):
        texts = random_documents(schema, random.Random(0), 10)
    assert texts and all(judge(schema).is_valid(json.loads(text)) for text in texts)


def test_a_schema_that_does_not_fit_otherwise_is_written_with_tighter_bounds():
    properties = {f"text {n}": {"type": "string", "maxLength": 255} for n in range(14)} | {"any": {}}
    automaton = schema_automaton({"properties": properties, "required": [*properties]})
    assert automaton.states < MOST_STATES
    for length, is_held in ((100, True), (255, False)):
        texts = [f'"text {n}":"{"a" * length}"' for n in range(14)]
        assert automaton.accepts(f'{{{",".join(texts)},"any":[1]}}'.encode()) == is_held


@pytest.mark.parametrize(
    "parameters,held,left_out",
    [
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": NULL}, "required": ["x"]}}}, '{"x":null}', "{}"),
        ({"anyOf": [{"properties": {"x": NULL}, "required": ["x"]}, STRING]}, '{"x":null}', "{}"),
        ({"allOf": [{"properties": {"x": NULL}}, {"required": ["x"]}]}, '{"x":null}', "{}"),
        ({"required": ["x"]}, '{"x":3}', "{}"),
        ({"patternProperties": {"^x": NULL}, "minProperties": 1}, '{"x":null}', "{}"),
        ({"type": "object"}, '{"x":3}', "[]"),
        ({"type": "object", "properties": {}}, "{}", '{"x":3}'),
        (None, "{}", '{"x":3}'),
    ],
)
def test_a_forced_call_has_the_arguments_that_its_parameters_say(parameters, held, left_out):
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
    named, either = schema_automaton(schema_of_call(tools, "f")), schema_automaton(schema_of_call(tools, ""))
    for text in (held, left_out, '"x"'):
        assert named.accepts(text.encode()) == (text == held)
        assert either.accepts(f'{{"name":"g","arguments":{text}}}'.encode()) == (text == held)
