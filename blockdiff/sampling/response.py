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

# The tokens around the reasoning of MiniMax M3 and of Gemma 4, and the text that stands right after the first of them.
REASONING = (("<mm:think>", "</mm:think>", ""), ("<|channel>", "<channel|>", "thought\n"))
HALF = "\N{REPLACEMENT CHARACTER}"  # stands for a character of which tokens are missing
CONTEXT = 16  # tokens before new ones that are decoded again with them: more than change how these are written


@dataclass(frozen=True)
class ParsedResponse:
    """The text of a response, the reasoning before it, and its calls of tools in the form that messages have them.

    reasoning, tool_calls: None where there are none. Special tokens have no text.
    """

    text: str = ""
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class GrowingText:
    """The text of tokens that are added to; only the last of those known before are decoded again.

    Where their text is not the beginning of that of them and the new ones, all tokens are decoded.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode, self._tokens, self._text = decode, list[int](), ""

    def read(self, tokens: list[int]) -> str:
        """The text of these tokens, by what is known of those that they begin with."""
        count = len(self._tokens)
        if tokens[:count] != self._tokens:
            self._tokens, self._text, count = [], "", 0
        first = max(0, count - CONTEXT)
        before, after = self._decode(tokens[first:count]), self._decode(tokens[first:])
        text = self._text + after[len(before) :] if after.startswith(before) else self._decode(tokens)
        if not text.endswith(HALF):
            self._tokens, self._text = tokens, text
        return text


class ResponseParser:
    """Parses the response to a request; give `add` its tokens, in one piece or as they are committed.

    The text is what follows the last closed reasoning and is no call of a tool. Reasoning that was never closed,
    because the response ran out of tokens, has no text after it. prompt: its text, which may have opened the reasoning.
    """

    def __init__(self, request: Request, settings: SamplingSettings, prompt: str):
        self._settings, self._tools, self._stops = settings, request.tools or (), request.stop
        self._opens, self._closes, self._name = reasoning_format(settings.tokenizer)
        self._calls_format = call_format(settings.tokenizer)
        openings = tuple((opens + name).rstrip() for opens, _, name in REASONING)
        self._is_open = self._opens is not None and prompt.rstrip().endswith(openings)
        self._has_reasoning = self._is_open
        self._thought: list[int] = []  # tokens of closed reasoning
        self._opened: list[int] = []  # tokens of reasoning that is still open
        self._texts = GrowingText(settings.text), GrowingText(settings.text)  # of the answer, of the reasoning
        self._begin_answer()

    def _begin_answer(self) -> None:
        self._answer: list[int] = []  # tokens after closed reasoning
        self._calls: list[dict[str, Any]] = []
        self._text_tokens: list[int] = []  # tokens of the answer, up to `_parsed`, that are no calls
        self._parsed = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Take the next tokens of the response."""
        for token in tokens:
            if token == self._opens:
                self._is_open = self._has_reasoning = True
            elif token == self._closes:  # what came before was reasoning, even where nothing opened it
                self._thought += self._answer + self._opened
                self._opened, self._is_open, self._has_reasoning = [], False, True
                self._begin_answer()
            else:
                (self._opened if self._is_open else self._answer).append(token)
        while self._calls_format and (found := self._calls_format.find(self._answer, self._parsed, self._tools)):
            start, end, calls = found
            self._calls += calls
            self._text_tokens += self._answer[self._parsed : start if calls else end]
            self._parsed = end

    def whole(self, is_stopped: bool = False) -> ParsedResponse:
        """The response when no more tokens come; is_stopped: a stop text has ended it, before which its text ends."""
        text = self._settings.text(self._text_tokens + self._answer[self._parsed :])
        if is_stopped:
            text = text[: min((place for place in map(text.find, self._stops) if place >= 0), default=None)]
        return ParsedResponse(text, self._reasoning, self._calls or None)

    def so_far(self) -> ParsedResponse:
        """The beginning of the response that more tokens do not change.

        Halves of characters are held back, and what may begin a stop text or a call.
        """
        rest = self._answer[self._parsed :]
        if self._calls_format and self._calls_format.opens in rest:
            rest = rest[: rest.index(self._calls_format.opens)]
        text = self._texts[0].read(self._text_tokens + rest).rstrip(HALF)
        for stop in self._stops:
            begun = next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
            text = text[: len(text) - begun]
        reasoning = self._reasoning
        if reasoning is not None:
            reasoning = "" if self._name.startswith(reasoning) else reasoning.rstrip(HALF)
        return ParsedResponse(text, reasoning, list(self._calls) or None)

    @property
    def _reasoning(self) -> str | None:
        if not self._has_reasoning:
            return None
        return self._texts[1].read(self._thought + self._opened).removeprefix(self._name).strip()


def parse(
    tokens: Sequence[int], request: Request, settings: SamplingSettings, prompt: str = "", is_stopped: bool = False
) -> ParsedResponse:
    """The parts of a response whose tokens are all there, as `ResponseParser.whole` has them."""
    parser = ResponseParser(request, settings, prompt)
    parser.add(tokens)
    return parser.whole(is_stopped)


@functools.lru_cache(maxsize=4)
def reasoning_format(tokenizer: PreTrainedTokenizerBase | None) -> tuple[int | None, int | None, str]:
    """The tokens around reasoning that a vocabulary has, and the text after the first; None where it has none."""
    for opens, closes, name in REASONING if tokenizer is not None else ():
        if (ids := token_ids(tokenizer, opens, closes)) is not None:
            return ids[0], ids[1], name
    return None, None, ""
