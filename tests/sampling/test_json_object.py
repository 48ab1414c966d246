"""The automaton of any JSON object against the standard library's parser."""

from __future__ import annotations

import json

import pytest

from blockdiff.sampling.constraints.json_object import DEPTH, any_object

pytestmark = pytest.mark.quick

OBJECTS = (
    '{}|{"a":1}|{ "a" : -0.5e+3 }|{"a": [1, 2.5, {"b": null}], "c":{"d":{"e":"\\u00e9 é€😀\\n"}}}'
    '|{"a":\n[ ]}|{"":[[true,false]]}'
)
OTHERS = (
    '[]|1|{"a":}|{"a":1,}|{,}|{"a":01}|{"a":+1}|{"a":1.}|{"a":.5}|{"a":1e}|{"a":[1}}|{"a":1}}|{"a" "b"}|{a:1}'
    '|{"a":tru}|{"a":"\t"}|{"a":"\\x"}|{"a":"\\u12g4"}|{"a":[1,]}|{"a":NaN}|{"a"'
)


@pytest.mark.parametrize("text", OBJECTS.split("|"))
def test_objects_are_in_the_language(text):
    assert isinstance(json.loads(text), dict) and any_object().accepts(text.encode())


@pytest.mark.parametrize("text", OTHERS.split("|"))
def test_other_texts_are_not(text):
    assert not any_object().accepts(text.encode())


def test_the_depth_is_bounded_and_texts_are_utf8():
    for levels, is_held in ((DEPTH, True), (DEPTH + 1, False)):
        assert any_object().accepts(b'{"a":' * levels + b"1" + b"}" * levels) == is_held
    for broken in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"):
        assert not any_object().accepts(b'{"a":"' + broken + b'"}')
