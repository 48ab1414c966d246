"""The answers of chats and completions: one object with its choices, or a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from blockdiff.serving.answering import ApiCall, Event, usage_of
from blockdiff.serving.answers import Answer, Choice, Chunk
from blockdiff.serving.deltas import AnswerStream, Delta


class ChunkFormat:
    """The form of answers that consist of choices; a route says how a choice is written. See `AnswerFormat`."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def choice(self, stream: AnswerStream, delta: Delta) -> Choice:
        """Return a whole answer as a choice, from its last delta."""
        raise NotImplementedError

    def delta(self, stream: AnswerStream, delta: Delta, is_first: bool) -> Choice | None:
        """Return a delta as a choice of a chunk; None if it has nothing new."""
        raise NotImplementedError

    def whole(self, head: dict[str, Any], call: ApiCall, ends: Sequence[Delta]) -> dict[str, Any]:
        """Return one object with all answers and their usage."""
        choices = [self.choice(stream, end) for stream, end in zip(call.streams, ends, strict=True)]
        return _written(Answer(object=self.object, choices=choices, usage=usage_of(call, ends), **head))

    def events(self, head: dict[str, Any], stream: AnswerStream, delta: Delta, is_first: bool) -> Iterable[Event]:
        """Yield the chunk of a delta, or none if the delta has nothing new."""
        if delta.frame is not None:
            yield self._chunk(head, frame=delta.frame)
        elif (choice := self.delta(stream, delta, is_first)) is not None:
            yield self._chunk(head, [choice])

    def end(self, head: dict[str, Any], call: ApiCall, ends: Sequence[Delta]) -> Iterable[Event]:
        """Yield the chunk with the usage, if it was requested, and `[DONE]`."""
        if call.body.stream_options is not None and call.body.stream_options.include_usage:
            yield self._chunk(head, usage=usage_of(call, ends))
        yield {"data": "[DONE]"}

    def error(self, head: dict[str, Any], error: dict[str, Any]) -> Iterable[Event]:
        """Yield the error; no `[DONE]` follows it."""
        yield {"data": json.dumps({"error": error})}

    def _chunk(self, head: dict[str, Any], choices: Sequence[Choice] = (), **more: Any) -> Event:
        chunk = Chunk(object=self.chunk_object, choices=[*choices], **more, **head)
        return {"data": json.dumps(_written(chunk), ensure_ascii=False, separators=(",", ":"))}


def _written(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON values. Fields that are null are left out, except the ones that the protocol demands."""
    record = answer.model_dump(exclude_none=True)
    for choice in record["choices"]:
        choice.setdefault("finish_reason", None)
        choice.setdefault("logprobs", None)
        if "message" in choice:
            choice["message"].setdefault("content", None)
    return record
