"""The deltas of an answer, made of the events of its request: texts canvas by canvas, frames, and the end."""

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
    """The new part of an answer. `calls` are the calls of tools from the one with the number `first_call` on.

    The last delta of an answer has its `result`, cut to the tokens that were asked for, and a `finish`.
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
    """Reads the events of one request, the answer with the number `index`.

    max_tokens: where the answer is cut (None: nowhere); forced: the name of the function whose arguments the whole
    response is, or "" where it names the function, too (None: no call is forced); most_calls: calls after these are
    left out. Texts that later tokens may change are held back.
    """

    settings: SamplingSettings
    request: Request
    index: int = 0
    max_tokens: int | None = None
    forced: str | None = None
    most_calls: int | None = None
    parser: ResponseParser | None = None  # of the canvases that were committed so far
    said: ParsedResponse = field(default_factory=ParsedResponse)
    prompt: str = ""
    tokens: int = 0  # that the parser has

    def canvas(self, event: CommittedCanvas) -> Delta:
        """The delta of a committed canvas; an empty one where the best of several answers is still to be found."""
        self.prompt = event.prompt
        if self.request.best_of > 1 or self.forced is not None or event.finish_reason is not None:
            return Delta()  # the result follows, or says all
        self.parser = self.parser or ResponseParser(self.request, self.settings, self.prompt)
        room = event.kept if self.max_tokens is None else min(event.kept, self.max_tokens - self.tokens)
        self.parser.add(event.tokens[:room])
        self.tokens += room
        return self._delta(self.parser.so_far())

    def frame(self, event: Step) -> Delta:
        """A denoising step."""
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
        """A committed canvas, as the frame after its last step."""
        return Delta(
            frame=Frame(
                index=self.index,
                canvas=event.canvas,
                step=event.steps,
                tokens=event.tokens,
                texts=[self.text_of(token) for token in event.tokens],
                is_kept=[place < event.kept for place in range(len(event.tokens))],
                is_committed=True,
            )
        )

    def end(self, result: Result) -> Delta:
        """The last delta; raises EngineError for an answer that failed under way."""
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
        """The text of one token, control tokens as they are written."""
        tokenizer = self.settings.tokenizer
        return "" if tokenizer is None else str(tokenizer.decode([token]))

    def bytes_of(self, token: int) -> bytes:
        """The bytes of one token, which may be a part of a character; those of its text where it is a control token."""
        try:
            found = token_bytes(self.settings.tokenizer)[token] if self.settings.tokenizer is not None else b""
        except (RequestError, IndexError):  # a decoder that does more than joining tokens, or no token of it
            found = b""
        return found or self.text_of(token).encode()

    def name_of(self, token: int) -> str:
        """The text of one token, or its bytes where it has a part of a character: "bytes:\\xe2\\x82"."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def _delta(self, parts: ParsedResponse) -> Delta:
        calls, said = parts.tool_calls or [], self.said.tool_calls or []
        calls = calls[: self.most_calls]
        delta = Delta(
            _new(parts.text, self.said.text),
            _new(parts.reasoning or "", self.said.reasoning or ""),
            calls[len(said) :],
            len(said),
        )
        self.said = ParsedResponse(
            self.said.text + delta.text, (self.said.reasoning or "") + delta.reasoning, calls if calls else said
        )
        return delta


def _new(text: str, said: str) -> str:
    """The part of a text that was not said yet; nothing where it does not go on with what was said."""
    return text[len(said) :] if text.startswith(said) else ""


def _forced(name: str, text: str) -> dict[str, Any]:
    """The call that a response of a forced form is."""
    value = json.loads(text)
    function = {"name": name, "arguments": value} if name else value
    return {"type": "function", "function": function}
