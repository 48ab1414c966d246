"""A response is parsed into the model's reasoning, its text, and its calls of tools: whole, or as its tokens come.

The formats of reasoning are here, those of calls in `tool_calls.py`. Only tokens count: a text that spells one of
their marks neither thinks nor calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockdiff.sampling.tool_calls import call_format, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.sampling.request import Request
    from blockdiff.sampling.settings import SamplingSettings

# The tokens around reasoning, and the text that stands right after the first of them: of MiniMax M3, of
# Qwen3 and others, and of Gemma 4.
REASONING = (
    ("<mm:think>", "</mm:think>", ""),
    ("<think>", "</think>", ""),
    ("<|channel>", "<channel|>", "thought\n"),
)
HALF = "\N{REPLACEMENT CHARACTER}"  # stands for a character of which tokens are missing
CONTEXT = 16  # tokens that are decoded again with new ones, for those before a token may change how it is written


@dataclass(frozen=True)
class ParsedResponse:
    """The text of a response, the reasoning before it, and its calls of tools in the form that messages have them.

    reasoning, tool_calls: None if there are none. is_call_cut: the response ended within a call, which is left out.
    Special tokens have no text.
    """

    text: str = ""
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    is_call_cut: bool = False


class GrowingText:
    """The text of tokens to which others are added, of which the last `CONTEXT` are decoded again with the new ones.

    All tokens are decoded where new ones have changed the text of those before them.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode, self._tokens, self._text = decode, list[int](), ""

    def read(self, tokens: list[int]) -> str:
        """The text of these tokens, of which those that were read before are not all decoded again."""
        count = len(self._tokens)
        if tokens[:count] != self._tokens:
            self._tokens, self._text, count = [], "", 0
        first = max(0, count - CONTEXT)
        before, after = self._decode(tokens[first:count]), self._decode(tokens[first:])
        text = self._text + after[len(before) :] if after.startswith(before) else self._decode(tokens)
        if not text.endswith(HALF):
            self._tokens, self._text = tokens.copy(), text
        return text


class ResponseParser:
    """Parses the response to a request; give `add` its tokens, in one piece or as they are committed.

    Reasoning is what stands between its tokens, wherever and however often; the text is all that stands outside and is
    no call of a tool. Reasoning that is never closed has no text after it. If the request has an empty list of tools,
    nothing is a call. prompt: its text, which may have opened the reasoning.
    """

    def __init__(self, request: Request, settings: SamplingSettings, prompt: str):
        self._settings, self._tools, self._stops = settings, request.tools or (), request.stop
        self._opens, self._closes, self._name = reasoning_format(settings.tokenizer)
        may_call = request.tools is None or bool(request.tools)
        self._calls_format = call_format(settings.tokenizer) if may_call else None
        self._is_open = self._opens is not None and opens_reasoning(prompt)
        self._thoughts: list[tuple[list[int], GrowingText]] = []  # the tokens of each reasoning, and their text
        self._text = GrowingText(settings.text)  # of the answer
        if self._is_open:
            self._begin_thought()
        self._answer: list[int] = []  # tokens outside
        self._calls: list[dict[str, Any]] = []
        self._text_tokens: list[int] = []  # tokens of the answer, up to `_parsed`, that are no calls
        self._parsed = 0

    def _begin_thought(self) -> None:
        self._thoughts.append(([], GrowingText(self._settings.text)))

    def add(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the response."""
        for token in tokens:
            if token == self._opens:
                self._is_open = True
                self._begin_thought()
            elif token == self._closes:
                self._is_open = False
            else:
                (self._thoughts[-1][0] if self._is_open else self._answer).append(token)
        while self._calls_format and (found := self._calls_format.find(self._answer, self._parsed, self._tools)):
            start, end, calls = found
            self._calls += calls
            self._text_tokens += self._answer[self._parsed : start if calls else end]
            self._parsed = end

    def whole(self, is_stopped: bool = False, is_cut: bool = False) -> ParsedResponse:
        """The response when no more tokens come.

        is_stopped: a stop text has ended it, before which its text or its reasoning ends; is_cut: it has no more room.
        A call that is not whole then is left out.
        """
        rest, begun = self._answer[self._parsed :], None
        if self._calls_format and (is_stopped or is_cut) and not self._is_open:
            begun = self._calls_format.begin(rest, self._tools)
        tokens = self._text_tokens + rest[:begun]
        text = self._settings.text(tokens)
        if is_stopped and not self._is_open and begun is None:
            text = self._before_stop(text, tokens)
        if self._calls and not text.strip():
            text = ""
        reasoning = self._reasoning(is_stopped=is_stopped and self._is_open)
        return ParsedResponse(text, reasoning, self._calls or None, begun is not None)

    def _before_stop(self, text: str, tokens: list[int]) -> str:
        """The text of tokens up to the first stop text, which the last of them has completed."""
        before = len(self._settings.text(tokens[:-1]).rstrip(HALF))
        places = (text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops)
        return text[: min((place for place in places if place >= 0), default=None)]

    def _sure(self, text: str) -> str:
        """The text without its end, if that may be half a character or begin a stop text."""
        text = text.rstrip(HALF)
        for stop in self._stops:
            begun = next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
            text = text[: len(text) - begun]
        return text

    def so_far(self) -> ParsedResponse:
        """The beginning of the response that more tokens do not change.

        Halves of characters are held back, and what may begin a stop text or a call.
        """
        rest = self._answer[self._parsed :]
        if self._calls_format and (begun := self._calls_format.begin(rest, self._tools)) is not None:
            rest = rest[:begun]
        text = self._sure(self._text.read(self._text_tokens + rest))
        if self._calls_format and not text.strip():  # a call may follow, of which white space is no text
            text = ""
        return ParsedResponse(text, self._reasoning(may_go_on=self._is_open), list(self._calls) or None)

    def _reasoning(self, may_go_on: bool = False, is_stopped: bool = False) -> str | None:
        """All reasoning, each on a line of its own; None if there is none. is_stopped: a stop text ends the last."""
        texts = [text.read(tokens) for tokens, text in self._thoughts]
        if is_stopped:
            texts[-1] = self._before_stop(texts[-1], self._thoughts[-1][0])
        if may_go_on and texts:
            texts[-1] = "" if self._name.startswith(texts[-1]) else self._sure(texts[-1])
        texts = [text.removeprefix(self._name).strip() for text in texts]
        return "\n".join(text for text in texts if text) if texts else None


def opens_reasoning(prompt: str) -> bool:
    """True if the text of a prompt ends with the beginning of reasoning, as some chat templates write it."""
    return prompt.rstrip().endswith(tuple((opens + name).rstrip() for opens, _, name in REASONING))


def parse(
    tokens: Sequence[int],
    request: Request,
    settings: SamplingSettings,
    prompt: str = "",
    is_stopped: bool = False,
    is_cut: bool = False,
) -> ParsedResponse:
    """The parts of a response whose tokens are all there, as `ResponseParser.whole` has them."""
    parser = ResponseParser(request, settings, prompt)
    parser.add(tokens)
    return parser.whole(is_stopped, is_cut)


@functools.lru_cache(maxsize=4)
def reasoning_format(tokenizer: PreTrainedTokenizerBase | None) -> tuple[int | None, int | None, str]:
    """The tokens around reasoning that a vocabulary has, and the text after the first; None if it has none."""
    for opens, closes, name in REASONING if tokenizer is not None else ():
        if (ids := token_ids(tokenizer, opens, closes)) is not None:
            return ids[0], ids[1], name
    return None, None, ""
