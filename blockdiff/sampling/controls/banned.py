"""Banned texts and tokens, which stand nowhere in a response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from blockdiff.errors import RequestError
from blockdiff.sampling.constraints.byte_automaton import MOST_STATES, ByteAutomaton, without
from blockdiff.sampling.controls.restriction import Restriction, tokenizer_for

if TYPE_CHECKING:
    from blockdiff.sampling.request import Request
    from blockdiff.sampling.settings import SamplingSettings


@dataclass(frozen=True)
class Banned:
    """Texts, however tokens spell them, and token ids."""

    texts: tuple[str, ...]
    ids: tuple[int, ...]

    @classmethod
    def of(cls, request: Request) -> Banned | None:
        """The `banned` texts and ids of a request."""
        banned = request.banned
        if isinstance(banned, str) or not isinstance(banned, Sequence):
            raise RequestError(f"banned must be a list of texts and token ids, got {banned!r:.80}")
        for each in banned:
            is_id = isinstance(each, int) and not isinstance(each, bool)
            if not is_id and not (isinstance(each, str) and each):
                raise RequestError(f"banned must be a list of texts and token ids, got {each!r:.80} in it")
        texts = tuple(each for each in banned if isinstance(each, str))
        return cls(texts, tuple(each for each in banned if not isinstance(each, str))) if banned else None

    def __str__(self) -> str:
        return f"none of {', '.join(map(repr, (*self.texts, *self.ids)))}"

    def restriction(self, request: Request, settings: SamplingSettings, canvases: int) -> Restriction:
        """The ids, and the language of all texts in which no banned one occurs."""
        for id in self.ids:
            if not 0 <= id < settings.vocab_size:
                raise RequestError(f"banned token {id!r} is not one of the model's {settings.vocab_size} ids")
        if not self.texts:
            return Restriction(banned=frozenset(self.ids))
        tokenizer_for("banned texts", settings)
        return Restriction(banned=frozenset(self.ids), languages=(_without(self.texts),))


@lru_cache(maxsize=32)
def _without(texts: tuple[str, ...]) -> ByteAutomaton:
    words = [text.encode() for text in texts]
    if (size := sum(map(len, words))) > MOST_STATES:
        raise RequestError(f"the banned texts have {size:,} bytes; {MOST_STATES:,} are the most")
    return without(words)
