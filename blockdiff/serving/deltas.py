"""The deltas of an answer, from the engine's events: texts canvas by canvas, frames of denoising, and the end."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blockdiff.errors import EngineError, RequestError
from blockdiff.sampling.constraints.tokens import token_bytes
from blockdiff.sampling.request import Request, Result
from blockdiff.sampling.response import ParsedResponse, ResponseParser, parse
from blockdiff.sampling.settings import SamplingSettings
from blockdiff.sampling.trace import CommittedCanvas, Step
from blockdiff.serving.answers import FinishReason, Frame


@dataclass(frozen=True)
class Delta:
    """The new part of an answer. calls: new tool calls, the first of which has the index `first_call`.

    The last delta of an answer has its `result`, cut to the tokens that were requested, and the reason `finish`.
    """

    text: str = ""
    reasoning: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    first_call: int = 0
    frame: Frame | None = None
    finish: FinishReason | None = None
    result: Result | None = None


@dataclass
class AnswerStream:
    """Turns the events of one request into deltas of the answer with the number `index`.

    max_tokens: the length at which the answer is cut (None: it is not cut); forced: the function whose arguments the
    whole response is, or "" if the response also names the function (None: no call is forced); most_calls: the most
    tool calls to pass on (None: all). Text that later tokens may change is held back.
    """

    settings: SamplingSettings
    request: Request
    index: int = 0
    max_tokens: int | None = None
    forced: str | None = None
    most_calls: int | None = None
    parser: ResponseParser | None = None  # of the canvases that were committed so far
    said: ParsedResponse = field(default_factory=ParsedResponse)  # the sum of all deltas so far
    prompt: str = ""
    tokens: int = 0  # tokens that the parser has received

    def canvas(self, event: CommittedCanvas) -> Delta:
        """Return the delta of a committed canvas.

        It is empty if the text is not known before the result: with `best_of`, for a forced call, and for the last
        canvas.
        """
        self.prompt = event.prompt
        if self.request.best_of > 1 or self.forced is not None or event.finish_reason is not None:
            return Delta()  # the result follows, and has the whole text
        self.parser = self.parser or ResponseParser(self.request, self.settings, self.prompt)
        room = event.kept if self.max_tokens is None else min(event.kept, self.max_tokens - self.tokens)
        self.parser.add(event.tokens[:room])
        self.tokens += room
        return self._delta(self.parser.so_far())

    def frame(self, event: Step) -> Delta:
        """Return the delta of a denoising step, a frame."""
        texts = [self.text_of(token) for token in event.argmax]
        entropy = [round(each, 4) for each in event.entropy]
        return Delta(
            frame=Frame(
                index=self.index,
                canvas=event.canvas,
                step=event.step,
                temperature=round(event.temperature, 4),
                tokens=event.argmax,
                texts=texts,
                entropy=entropy,
                is_kept=event.is_accepted,
                is_pinned=event.is_pinned,
                stays=event.stays,
            )
        )

    def committed(self, event: CommittedCanvas) -> Delta:
        """Return a committed canvas as the frame after its last step."""
        return Delta(
            frame=Frame(
                index=self.index,
                canvas=event.canvas,
                step=event.steps,
                tokens=event.tokens,
                texts=[self.text_of(token) for token in event.tokens],
                is_kept=[index < event.kept for index in range(len(event.tokens))],
                is_committed=True,
            )
        )

    def end(self, result: Result) -> Delta:
        """Return the last delta, with the result cut to `max_tokens` and `most_calls`, and the finish reason.

        Raises EngineError if the answer failed.
        """
        if result.error is not None:
            raise EngineError(result.error)
        is_cut = self.max_tokens is not None and len(result.tokens) > self.max_tokens
        is_out = result.finish_reason == "length" and self.request.form is None  # a form is whole at any length
        is_call_cut = False
        if is_cut or (self.request.tools and self.forced is None and (is_out or result.finish_reason == "stop")):
            tokens, most = result.tokens[: self.max_tokens], self.max_tokens
            is_stopped = result.finish_reason == "stop" and not is_cut
            parts = parse(tokens, self.request, self.settings, self.prompt, is_stopped, is_cut or is_out)
            is_call_cut = parts.is_call_cut
            result = replace(
                result,
                text=parts.text,
                reasoning=parts.reasoning,
                tool_calls=parts.tool_calls,
                tokens=tokens,
                logprobs=result.logprobs and result.logprobs[:most],
                top_logprobs=result.top_logprobs and result.top_logprobs[:most],
            )
        if self.forced is not None:
            result = replace(result, text="", tool_calls=[_forced(self.forced, result.text)])
        if self.most_calls is not None and result.tool_calls:
            result = replace(result, tool_calls=result.tool_calls[: self.most_calls])
        delta = self._delta(ParsedResponse(result.text, result.reasoning, result.tool_calls))
        finish: FinishReason = "length" if is_cut or is_out or is_call_cut else "stop"
        if result.tool_calls and not is_call_cut:
            finish = "tool_calls"
        return replace(delta, finish=finish, result=result)

    def text_of(self, token: int) -> str:
        """Return the text of one token, control tokens included ("" without a tokenizer)."""
        tokenizer = self.settings.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode([token]))

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of one token, perhaps a part of a character. For control tokens, the bytes of their text."""
        try:
            content = token_bytes(self.settings.tokenizer)[token] if self.settings.tokenizer is not None else b""
        except (RequestError, IndexError):  # the decoder does more than join tokens, or has no such token
            content = b""
        return content or self.text_of(token).encode()

    def name_of(self, token: int) -> str:
        """Return the text of one token, or its bytes if they are no whole characters: "bytes:\\xe2\\x82"."""
        content = self.bytes_of(token)
        try:
            return content.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)

    def _delta(self, parts: ParsedResponse) -> Delta:
        calls, earlier_calls = parts.tool_calls or [], self.said.tool_calls or []
        calls = calls[: self.most_calls]
        delta = Delta(
            _new(parts.text, self.said.text),
            _new(parts.reasoning or "", self.said.reasoning or ""),
            calls[len(earlier_calls) :],
            len(earlier_calls),
        )
        self.said = ParsedResponse(
            self.said.text + delta.text,
            (self.said.reasoning or "") + delta.reasoning,
            calls if calls else earlier_calls,
        )
        return delta


def _new(text: str, said: str) -> str:
    """Return the part of `text` after `said`; "" if `text` does not begin with `said`."""
    return text[len(said) :] if text.startswith(said) else ""


def _forced(name: str, text: str) -> dict[str, Any]:
    """Return the tool call in the JSON of a forced response; name: its function, or "" if the JSON names it."""
    value = json.loads(text)
    function = {"name": name, "arguments": value} if name else value
    return {"type": "function", "function": function}
