"""The answers of chats and completions: one object with its choices, or a stream of chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from blockdiff.serving.answering import ApiCall, Event, usage_of
from blockdiff.serving.answers import Answer, Choice, Chunk
from blockdiff.serving.deltas import AnswerStream, Delta


class ChunkFormat:
    """The form of answers that are choices."""

    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def choice(self, stream: AnswerStream, delta: Delta) -> Choice:
        """A whole answer, of its last delta."""
        raise NotImplementedError

    def delta(self, stream: AnswerStream, delta: Delta, is_first: bool) -> Choice | None:
        """A delta as a choice of a chunk; None where it says nothing."""
        raise NotImplementedError

    def whole(self, head: dict[str, Any], call: ApiCall, ends: Sequence[Delta]) -> dict[str, Any]:
        """The object of all answers."""
        choices = [self.choice(stream, end) for stream, end in zip(call.streams, ends, strict=True)]
        return _written(Answer(object=self.object, choices=choices, usage=usage_of(call, ends), **head))

    def events(self, head: dict[str, Any], stream: AnswerStream, delta: Delta, is_first: bool) -> Iterable[Event]:
        """The chunk of a delta."""
        if delta.frame is not None:
            yield self._chunk(head, frame=delta.frame)
        elif (choice := self.delta(stream, delta, is_first)) is not None:
            yield self._chunk(head, [choice])

    def end(self, head: dict[str, Any], call: ApiCall, ends: Sequence[Delta]) -> Iterable[Event]:
        """The chunk with the usage if it is asked for, and the mark of the end."""
        if call.body.stream_options is not None and call.body.stream_options.include_usage:
            yield self._chunk(head, usage=usage_of(call, ends))
        yield {"data": "[DONE]"}

    def error(self, head: dict[str, Any], error: dict[str, Any]) -> Iterable[Event]:
        """An error, after which no mark follows."""
        yield {"data": json.dumps({"error": error})}

    def _chunk(self, head: dict[str, Any], choices: Sequence[Choice] = (), **more: Any) -> Event:
        chunk = Chunk(object=self.chunk_object, choices=[*choices], **more, **head)
        return {"data": json.dumps(_written(chunk), ensure_ascii=False, separators=(",", ":"))}


def _written(answer: Answer) -> dict[str, Any]:
    """An answer as JSON has it: null is left out where the protocol does not ask for it."""
    found = answer.model_dump(exclude_none=True)
    for choice in found["choices"]:
        choice.setdefault("finish_reason", None)
        choice.setdefault("logprobs", None)
        if "message" in choice:
            choice["message"].setdefault("content", None)
    return found
