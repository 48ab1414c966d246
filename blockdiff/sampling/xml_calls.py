"""The calls of tools in a response of MiniMax M3: tags, each after a token that no text spells.

With `E` for that token: E<tool_call> E<invoke name="NAME"> E<KEY>VALUE E</KEY> E</invoke> E</tool_call>. A value may
hold further keys, or E<item> for each entry of a list. The tags say no types, so the tools' declarations do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EDGE = "]<]minimax[>["
FIRST, LAST = "<tool_call>", "</tool_call>"
TAG = re.compile(r"\s*<(/?)([^<>\s]+)(?:\s+name=\"([^\"]+)\")?\s*>", re.DOTALL)


def xml_called(
    tokens: Sequence[int], edge: int, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[dict[str, Any]] | None, list[int]]:
    """The calls in a response (None: there is none), and the other tokens; `edge` is the token before every tag."""
    schemas = {each["function"]["name"]: each["function"].get("parameters") or {} for each in tools}
    calls: list[dict[str, Any]] = []
    rest: list[int] = []
    places = [place for place, token in enumerate(tokens) if token == edge]
    pieces = [str(tokenizer.decode(list(tokens[place + 1 : end]))) for place, end in pairwise([*places, len(tokens)])]
    at = first = 0
    while first < len(places):
        last = next((n for n in range(first, len(places)) if pieces[n].startswith(LAST)), None)
        if last is None or not pieces[first].startswith(FIRST):
            first += 1
            continue
        end = _end(tokens, places[last] + 1, tokenizer)
        try:
            found = _calls(pieces[first + 1 : last], schemas)
        except (ValueError, RecursionError):
            found = []
        if found:
            calls += found
            rest += tokens[at : places[first]]
            at = end
        first = last + 1
    return calls or None, [*rest, *tokens[at:]]


def _end(tokens: Sequence[int], start: int, tokenizer: PreTrainedTokenizerBase) -> int:
    """The place after the tokens that spell the last tag."""
    end = start
    while end < len(tokens) and not str(tokenizer.decode(list(tokens[start:end]))).startswith(LAST):
        end += 1
    return end


def _calls(pieces: list[str], schemas: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The calls that the pieces between the first and the last tag spell; ValueError where they spell none."""
    left, calls = pieces[::-1], []
    while left:
        closes, tag, name, _ = _tag(left.pop())
        if closes or tag != "invoke" or not name:
            raise ValueError
        arguments = _value(left, "invoke", "", schemas.get(name, {}))
        arguments = {} if arguments == "" else arguments
        if not isinstance(arguments, dict):
            raise ValueError
        calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def _value(left: list[str], tag: str, text: str, schema: Mapping[str, Any]) -> Any:
    """The value up to the end of `tag`, whose pieces are taken from `left`; `text` follows its beginning."""
    entries: list[tuple[str, Any]] = []
    while left:
        closes, inner, _, after = _tag(left.pop())
        if closes:
            if inner != tag:
                raise ValueError
            if not entries:
                return _typed(text, schema)
            if all(key == "item" for key, _ in entries) and schema.get("type") != "object":
                return [value for _, value in entries]
            return dict(entries)
        of_inner = schema.get("items") if inner == "item" else (schema.get("properties") or {}).get(inner)
        entries.append((inner, _value(left, inner, after, of_inner if isinstance(of_inner, Mapping) else {})))
    raise ValueError


def _tag(piece: str) -> tuple[bool, str, str | None, str]:
    """A tag taken apart: True where it closes, its name, the name that it gives, and the text after it."""
    found = TAG.match(piece)
    if found is None:
        raise ValueError
    return bool(found[1]), found[2], found[3], piece[found.end() :]


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    if not schema and not text.strip():
        return ""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
