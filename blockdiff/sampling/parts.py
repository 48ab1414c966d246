"""The parts of a response: what the model thought, what it says, and the tools that it calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blockdiff.sampling.reasoning import separated
from blockdiff.sampling.tool_calls import begin, called

if TYPE_CHECKING:
    from blockdiff.sampling.settings import SamplingSettings


@dataclass(frozen=True)
class Parts:
    """The text of an answer, the reasoning before it, and the calls of tools in it (None: there is none)."""

    text: str
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


def parts_of(
    tokens: Sequence[int],
    settings: SamplingSettings,
    tools: Sequence[Mapping[str, Any]] = (),
    is_thinking: bool = False,
    is_whole: bool = True,
) -> Parts:
    """The parts of a response's tokens, without its special tokens.

    is_thinking: whether the prompt has opened the reasoning; is_whole: False while more tokens may come, which may
    complete a call that has begun: it and the tokens after it are left out.
    """
    if settings.tokenizer is None:
        return Parts("")
    reasoning, answer = separated(tokens, settings.tokenizer, is_thinking)
    calls, answer = called(answer, settings.tokenizer, tools)
    if not is_whole:
        answer = answer[: begin(answer, settings.tokenizer)]
    return Parts(settings.text(answer), reasoning, calls)
