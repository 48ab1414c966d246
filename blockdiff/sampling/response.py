"""Parse a response into the model's reasoning, its text and its tool calls, all at once or as its tokens arrive.

The formats of reasoning are here, the formats of calls in `tool_calls.py`. Only tokens mark reasoning and calls: a
text that spells a mark is plain text.
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

# The tokens before and after reasoning, and the text right after the first: for MiniMax M3, for Qwen3 and
# others, and for Gemma 4.
REASONING = (
    ("<mm:think>", "</mm:think>", ""),
    ("<think>", "</think>", ""),
    ("<|channel>", "<channel|>", "thought\n"),
)
HALF = "\N{REPLACEMENT CHARACTER}"  # replaces a character whose tokens are incomplete
CONTEXT = 16  # tokens that are decoded again with new ones: the text of a token may depend on the ones before it


@dataclass(frozen=True)
class ParsedResponse:
    """The text of a response, the reasoning before it, and its tool calls in the form of messages.

    reasoning, tool_calls: None if there are none. is_call_cut: True if the response ended within a call, which is left
    out. Special tokens have no text.
    """

    text: str = ""
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    is_call_cut: bool = False


class GrowingText:
    """The text of a growing list of tokens; only the last `CONTEXT` known tokens are decoded again with the new ones.

    All tokens are decoded if new ones change the text of earlier ones.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode, self._tokens, self._text = decode, list[int](), ""

    def read(self, tokens: list[int]) -> str:
        """Return the text of `tokens`; if they begin with the tokens of the previous call, its text is reused."""
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
    """Parses the response to a request. Pass its tokens to `add`, all at once or as they are committed.

    Reasoning is all text between the reasoning tokens, wherever and however often they occur; the text is everything
    outside that is no tool call. Reasoning that is never closed is followed by no text. If the request has an empty
    list of tools, nothing is a call. prompt: the prompt's text, which may have opened the reasoning.
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
        """Add the next tokens of the response."""
        for token in tokens:
            if token == self._opens:
                self._is_open = True
                self._begin_thought()
            elif token == self._closes:
                self._is_open = False
            else:
                (self._thoughts[-1][0] if self._is_open else self._answer).append(token)
        while self._calls_format and (match := self._calls_format.find(self._answer, self._parsed, self._tools)):
            start, end, calls = match
            self._calls += calls
            self._text_tokens += self._answer[self._parsed : start if calls else end]
            self._parsed = end

    def whole(self, is_stopped: bool = False, is_cut: bool = False) -> ParsedResponse:
        """Return the parsed response after its last token.

        is_stopped: a stop text ended the response, so its text or reasoning ends before that text; is_cut: the response
        reached its token limit. In both cases an unfinished call is left out.
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
        """Return the text of tokens up to the first stop text, which the last token completed."""
        before = len(self._settings.text(tokens[:-1]).rstrip(HALF))
        places = (text.find(stop, max(0, before - len(stop) + 1)) for stop in self._stops)
        return text[: min((index for index in places if index >= 0), default=None)]

    def _sure(self, text: str) -> str:
        """Return the text without an end that may be half a character or the beginning of a stop text."""
        text = text.rstrip(HALF)
        for stop in self._stops:
            begun = next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
            text = text[: len(text) - begun]
        return text

    def so_far(self) -> ParsedResponse:
        """Return the part of the response that later tokens cannot change.

        It leaves out half characters and possible beginnings of a stop text or call.
        """
        rest = self._answer[self._parsed :]
        if self._calls_format and (begun := self._calls_format.begin(rest, self._tools)) is not None:
            rest = rest[:begun]
        text = self._sure(self._text.read(self._text_tokens + rest))
        if self._calls_format and not text.strip():  # the white space may belong to a call that follows
            text = ""
        return ParsedResponse(text, self._reasoning(may_go_on=self._is_open), list(self._calls) or None)

    def _reasoning(self, may_go_on: bool = False, is_stopped: bool = False) -> str | None:
        """Return all reasoning, one piece per line; None if there is none.

        may_go_on: the last piece may grow; is_stopped: a stop text ends the last piece.
        """
        texts = [text.read(tokens) for tokens, text in self._thoughts]
        if is_stopped:
            texts[-1] = self._before_stop(texts[-1], self._thoughts[-1][0])
        if may_go_on and texts:
            texts[-1] = "" if self._name.startswith(texts[-1]) else self._sure(texts[-1])
        texts = [text.removeprefix(self._name).strip() for text in texts]
        return "\n".join(text for text in texts if text) if texts else None


def opens_reasoning(prompt: str) -> bool:
    """True if a prompt ends with the beginning of reasoning, as some chat templates write it."""
    return prompt.rstrip().endswith(tuple((opens + name).rstrip() for opens, _, name in REASONING))


def parse(
    tokens: Sequence[int],
    request: Request,
    settings: SamplingSettings,
    prompt: str = "",
    is_stopped: bool = False,
    is_cut: bool = False,
) -> ParsedResponse:
    """Parse a complete response; the arguments and the result are those of `ResponseParser.whole`."""
    parser = ResponseParser(request, settings, prompt)
    parser.add(tokens)
    return parser.whole(is_stopped, is_cut)


@functools.lru_cache(maxsize=4)
def reasoning_format(tokenizer: PreTrainedTokenizerBase | None) -> tuple[int | None, int | None, str]:
    """Return the ids of the tokens before and after reasoning, and the text that follows the first.

    (None, None, "") if the vocabulary has no such tokens.
    """
    for opens, closes, name in REASONING if tokenizer is not None else ():
        if (ids := token_ids(tokenizer, opens, closes)) is not None:
            return ids[0], ids[1], name
    return None, None, ""
