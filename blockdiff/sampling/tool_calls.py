"""Tool calls in the tokens of a response: as Gemma 4, MiniMax M3, Hermes with Qwen, and Llama 3 write them."""

from __future__ import annotations

import functools
import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Found = tuple[int, int, list[dict[str, Any]]]

BARE = re.compile(r"([^{}\[\],:]+)(:?)")  # Gemma's keys and values without quotes
BETWEEN_CALLS = "; \t\r\n"  # in Llama's format
FIRST_KEY = re.compile(r'\{\s*(?:"(\w*)("?))?')
TAG = re.compile(r"\s*<(/?)([^<>\s]+)(?:\s+name=\"([^\"]+)\")?\s*>", re.DOTALL)


@dataclass(frozen=True)
class EnclosedCalls:
    """Calls between two tokens, `opens` and `closes`; `decode` parses the tokens between them."""

    tokenizer: PreTrainedTokenizerBase
    opens: int
    closes: int

    def find(self, tokens: Sequence[int], start: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        """Return the start, the end and the calls of the first whole call from `start` on; None if there is none.

        The list of calls, in the form of messages, is empty if the tokens are not a valid call: they are then text.
        """
        try:
            start = tokens.index(self.opens, start)
            end = tokens.index(self.closes, start)
        except ValueError:
            return None
        try:
            return start, end + 1, [self.decode(tokens[start + 1 : end])]
        except (ValueError, RecursionError):
            return start, end + 1, []

    def begin(self, tokens: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the index of the first token that may open a call; None if there is none."""
        return tokens.index(self.opens) if self.opens in tokens else None

    def decode(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Parse tokens as a call in the form of messages; ValueError if they are not a valid call."""
        raise NotImplementedError


@dataclass(frozen=True)
class GemmaCalls(EnclosedCalls):
    """Calls of Gemma 4: `<|tool_call>call:NAME{key:value,...}<tool_call|>`, with strings between two `<|"|>` tokens."""

    quote: int

    MARKS: ClassVar = ("<|tool_call>", "<tool_call|>", '<|"|>')

    def decode(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Parse tokens as a call, see `EnclosedCalls.decode`."""
        parts, start = list[str](), 0  # texts without quotes and strings in turns
        for index, token in enumerate((*tokens, self.quote)):
            if token == self.quote:
                parts.append(str(self.tokenizer.decode(list(tokens[start:index]))))
                start = index + 1
        head, brace, parts[0] = parts[0].partition("{")
        name = head.strip().removeprefix("call:").strip()
        if not brace or not head.strip().startswith("call:") or not name:
            raise ValueError
        written = [json.dumps(part) if number % 2 else BARE.sub(_quoted, part) for number, part in enumerate(parts)]
        return {"type": "function", "function": {"name": name, "arguments": json.loads("{" + "".join(written))}}


def _quoted(bare: re.Match[str]) -> str:
    """Return an unquoted key or value in Gemma's format as JSON.

    A value that is not a number, true, false or null gets quotes.
    """
    word, colon = bare[1].strip(), bare[2]
    if not word:
        return bare[0]
    try:
        json.loads("x" if colon else word, parse_constant=_no_number)
    except ValueError:
        word = json.dumps(word)
    return word + colon


def _no_number(text: str) -> Any:
    """Raise ValueError: NaN and Infinity are no JSON and remain text."""
    raise ValueError(text)


@dataclass(frozen=True)
class TaggedCalls:
    """Calls of MiniMax M3: tags, each after a token `E` that no text spells.

    E<tool_call> E<invoke name="NAME"> E<KEY>VALUE E</KEY> E</invoke> E</tool_call>. A value may hold further keys, or
    E<item> for each entry of a list. The tools' declarations provide the types, because the tags have none.
    """

    tokenizer: PreTrainedTokenizerBase
    opens: int

    EDGE: ClassVar = "]<]minimax[>["
    FIRST: ClassVar = "<tool_call>"
    LAST: ClassVar = "</tool_call>"

    def find(self, tokens: Sequence[int], start: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        """Return the start, the end and the calls of the first pair of outer tags; None if there is none.

        The list of calls is empty if they are invalid. tools: the declarations, for the types of arguments.
        """
        places = [index for index in range(start, len(tokens)) if tokens[index] == self.opens]
        pieces = [self._text(tokens[index + 1 : end]) for index, end in pairwise([*places, len(tokens)])]
        first = next((n for n, piece in enumerate(pieces) if piece.startswith(self.FIRST)), len(pieces))
        last = next((n for n in range(first, len(pieces)) if pieces[n].startswith(self.LAST)), None)
        if last is None:
            return None
        schemas = {each["function"]["name"]: each["function"].get("parameters") or {} for each in tools}
        try:
            calls = _tagged_calls(pieces[first + 1 : last], schemas)
        except (ValueError, RecursionError):
            calls = []
        end = closes = places[last] + 1
        while end < len(tokens) and not self._text(tokens[closes:end]).startswith(self.LAST):
            end += 1
        return places[first], end, calls

    def begin(self, tokens: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> int | None:
        """Return the index of the first token that may open a call; None if there is none."""
        return tokens.index(self.opens) if self.opens in tokens else None

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens)))


@dataclass(frozen=True)
class HermesCalls(EnclosedCalls):
    """Calls of Hermes and Qwen: `<tool_call>{"name": NAME, "arguments": {...}}</tool_call>`, where tags are tokens."""

    MARKS: ClassVar = ("<tool_call>", "</tool_call>")

    def decode(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Parse tokens as a call, see `EnclosedCalls.decode`."""
        return _json_call(json.loads(str(self.tokenizer.decode(list(tokens)))))


@dataclass(frozen=True)
class LlamaCalls:
    """Calls of Llama 3: the response is `{"name": NAME, "parameters": {...}}`, several with `;` between them.

    Not every template has a token before them, so only the tools that a request declares can be called.
    """

    tokenizer: PreTrainedTokenizerBase

    MARK: ClassVar = "<|python_tag|>"  # the token by which the family is known
    KEYS: ClassVar = ("name", "type", "parameters", "arguments")  # with which a call begins

    def find(self, tokens: Sequence[int], start: int, tools: Sequence[Mapping[str, Any]]) -> Found | None:
        """Find the call with which the tokens from `start` on begin, once it is whole; see `EnclosedCalls.find`."""
        rest = tokens[start:]
        if self.begin(rest, tools) is None or self._object(rest) is None:
            return None
        count = bisect_left(range(len(rest)), True, key=lambda count: self._object(rest[:count]) is not None)
        value, after = self._object(rest[:count]) or (None, "")
        try:
            call = _json_call(value)
        except (ValueError, RecursionError):
            return start, start + count, []
        is_declared = call["function"]["name"] in {each["function"]["name"] for each in tools}
        return start, start + count, [call] * (is_declared and not after)

    def begin(self, tokens: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> int | None:
        """Return 0 if tools are declared and the tokens begin like a call, else None."""
        if not tools or not tokens:
            return None
        text = self._text(tokens[:16])
        if not (key := FIRST_KEY.match(text)):
            return None if text else 0
        word, is_whole = key[1] or "", key[2] == '"'
        return 0 if any(word == name if is_whole else name.startswith(word) for name in self.KEYS) else None

    def _object(self, tokens: Sequence[int]) -> tuple[Any, str] | None:
        """Return the JSON value with which tokens begin, and the text after it; None if the value is not whole."""
        text = self._text(tokens)
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return None
        return value, text[end:].strip(BETWEEN_CALLS)

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True)).lstrip(BETWEEN_CALLS)


def _json_call(value: Any) -> dict[str, Any]:
    """Convert a JSON value to a call in the form of messages; ValueError if it is not a valid call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        raise ValueError
    arguments = value.get("arguments", value.get("parameters", {}))
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError
    return {"type": "function", "function": {"name": value["name"], "arguments": arguments}}


CallFormat = EnclosedCalls | TaggedCalls | LlamaCalls


@functools.lru_cache(maxsize=4)
def call_format(tokenizer: PreTrainedTokenizerBase | None) -> CallFormat | None:
    """Return the call format whose tokens the vocabulary has; None if it has none."""
    if tokenizer is None:
        return None
    if (edge := token_ids(tokenizer, TaggedCalls.EDGE)) is not None:
        return TaggedCalls(tokenizer, *edge)
    marks = token_ids(tokenizer, *GemmaCalls.MARKS)
    if marks is not None:
        return GemmaCalls(tokenizer, *marks)
    if (tags := token_ids(tokenizer, *HermesCalls.MARKS)) is not None:
        return HermesCalls(tokenizer, *tags)
    return None if token_ids(tokenizer, LlamaCalls.MARK) is None else LlamaCalls(tokenizer)


def token_ids(tokenizer: PreTrainedTokenizerBase, *marks: str) -> list[int] | None:
    """Return the ids of tokens by their texts; None if the vocabulary lacks one of them."""
    ids = [tokenizer.convert_tokens_to_ids(mark) for mark in marks]
    return None if {None, tokenizer.unk_token_id} & set(ids) else ids


def _tagged_calls(pieces: list[str], schemas: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parse the pieces between the outer tags as calls; ValueError if they are not valid calls."""
    stack, calls = pieces[::-1], []
    while stack:
        closes, tag, name, _ = _tag(stack.pop())
        if closes or tag != "invoke" or not name:
            raise ValueError
        arguments = _tagged_value(stack, "invoke", "", schemas.get(name, {}))
        arguments = {} if arguments == "" else arguments
        if not isinstance(arguments, dict):
            raise ValueError
        calls.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def _tagged_value(stack: list[str], tag: str, text: str, schema: Mapping[str, Any]) -> Any:
    """Parse the value up to the closing `tag`.

    text: the beginning of the value; stack: the pieces after it, in reverse, from which the value's are popped.
    """
    entries: list[tuple[str, Any]] = []
    while stack:
        closes, inner, _, after = _tag(stack.pop())
        if closes:
            if inner != tag:
                raise ValueError
            if not entries:
                return _typed(text, schema)
            if all(key == "item" for key, _ in entries) and schema.get("type") != "object":
                return [value for _, value in entries]
            return dict(entries)
        of_inner = schema.get("items") if inner == "item" else (schema.get("properties") or {}).get(inner)
        entries.append((inner, _tagged_value(stack, inner, after, of_inner if isinstance(of_inner, Mapping) else {})))
    raise ValueError


def _tag(piece: str) -> tuple[bool, str, str | None, str]:
    """Split a tag: whether it closes, its name, the name attribute, and the text after it; ValueError for no tag."""
    match = TAG.match(piece)
    if match is None:
        raise ValueError
    return bool(match[1]), match[2], match[3], piece[match.end() :]


def _typed(text: str, schema: Mapping[str, Any]) -> Any:
    if not schema and not text.strip():
        return ""
    if schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text
