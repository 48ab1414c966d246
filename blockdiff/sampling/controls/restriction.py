"""The tokens that may stand in a response, as controls say it, and how a control says it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol, Self

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.byte_automaton import ByteAutomaton

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdiff.sampling.request import Request
    from blockdiff.sampling.settings import SamplingSettings

FREE = -1  # in place of a token: the model decides


@dataclass(frozen=True, eq=False)
class Restriction:
    """The tokens that a control, or several together, let stand in a response; the defaults restrict nothing.

    pins: tokens that are given, over whole canvases, FREE between them. start: tokens over whole canvases from which
    denoising starts, each replaced by noise with probability `noise`. languages: automata that the bytes of the text
    must satisfy; is_text: no special token stands in it. banned: ids that stand nowhere. penalty: the factor by which
    tokens that were seen before are less likely.
    """

    pins: Sequence[int] | None = None
    start: Sequence[int] = ()
    noise: float = 0.0
    languages: tuple[ByteAutomaton, ...] = ()
    is_text: bool = False
    banned: frozenset[int] = frozenset()
    penalty: float = 1.0

    def joined(self, other: Restriction) -> Restriction:
        """Both restrictions at once."""
        pins = self.pins if other.pins is None else other.pins
        if self.pins is not None and other.pins is not None:
            both = zip_longest(self.pins, other.pins, fillvalue=FREE)
            pins = [first if second == FREE else second for first, second in both]
        return Restriction(
            pins,
            other.start or self.start,
            other.noise if other.start else self.noise,
            (*self.languages, *other.languages),
            self.is_text or other.is_text,
            self.banned | other.banned,
            self.penalty * other.penalty,
        )


class Control(Protocol):
    """A frozen dataclass of a control's settings; `str` says it in words, as "regex '[0-9]+'"."""

    @classmethod
    def of(cls, request: Request) -> Self | None:
        """The control as a request asks for it, None where it does not; RequestError for fields that are no control."""

    def restriction(self, request: Request, settings: SamplingSettings, canvases: int) -> Restriction:
        """The tokens that it lets stand in a response of at most `canvases` canvases.

        RequestError where none can.
        """


def tokenizer_for(name: str, settings: SamplingSettings) -> PreTrainedTokenizerBase:
    """The tokenizer that a control's texts need; RequestError where there is none."""
    if settings.tokenizer is None:
        raise RequestError(f"the words of {name} need a tokenizer, and there is none")
    return settings.tokenizer


def require_no_thinking(request: Request, name: str) -> None:
    """Raise RequestError where thinking is asked for beside the form of the whole response."""
    if request.thinking:
        raise RequestError(f"{name} says the form of the whole response and leaves no place for thinking; give one")


def is_number(value: object) -> bool:
    """True for a finite number that is no truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
