"""Rounds: the ways in which answers grow, one class each, which holds the state of one answer.

`CanvasRound` denoises a canvas over several steps and commits it as it is. `SeededRound` does the same, except that the
head draws the first token. `VerifiedRound` denoises a canvas over the few steps of a round. The next call encodes it,
the head accepts its tokens up to the first mismatch, and the next round starts from the rest; the canvas is committed
once all of it is accepted. `NextTokenRound` proposes the tokens of a drafter's pass, or none. The next call encodes
them after the last token of the response, and the accepted ones are committed with the head's own next token.

All rows of an engine propose in one call, `Proposer.propose`: canvases of all kinds in a `CanvasBatch`, next tokens in
a `BlockBatch`. The head also reads all rows of a call together (`verification.py`). The round answers everything else
that differs: when a sequence is ready for the next proposal, what it keeps when it is preempted, how many tokens a call
encodes, and which warm-up calls an engine needs. The table below maps requests to rounds. All rows of an engine have
canvases, verified or not, or all have next tokens.
"""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING, Protocol

from blockdiff.errors import RequestError
from blockdiff.models.family import NO_HEAD
from blockdiff.sampling.rounds.batch import CanvasBatch
from blockdiff.sampling.rounds.canvases import CanvasRound, RunningCanvas
from blockdiff.sampling.rounds.next_tokens import BlockBatch, NextTokenRound
from blockdiff.sampling.rounds.seeded import SeededRound
from blockdiff.sampling.rounds.verified import VerifiedRound
from blockdiff.sampling.strategies import NAMES, NextToken, Speculative, Verified, next_token_head

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.graphs import Graphs
    from blockdiff.sampling.sequence import Round, Sequence
    from blockdiff.sampling.settings import SamplingSettings
    from blockdiff.sampling.strategy import Strategy

__all__ = [
    "CanvasRound",
    "NextTokenRound",
    "Proposer",
    "VerifiedRound",
    "proposer_for",
    "require_fitting",
    "require_head",
    "round_of",
]

# A strategy of any other class denoises canvases.
ROUNDS: dict[type[Strategy], type[Round]] = {
    NextToken: NextTokenRound,
    Speculative: NextTokenRound,
    Verified: VerifiedRound,
}


def round_of(strategy: Strategy, is_seeded: bool = False) -> type[Round]:
    """Return the round class for a strategy; is_seeded: as in `SamplingSettings`."""
    canvases = SeededRound if is_seeded else CanvasRound
    return next((round_class for kind, round_class in ROUNDS.items() if isinstance(strategy, kind)), canvases)


class Proposer(Protocol):
    """The buffers of an engine in which all its rows propose together.

    denoised: the number of canvases, or of a drafter's blocks, that were run, padding included.
    """

    denoised: int

    def propose(self, rows: abc.Sequence[Sequence], now: int) -> list[RunningCanvas]:
        """Advance the proposal of every row by one step, and return the canvases that this finishes.

        now: the number of the engine's step. An empty `rows` drops the previous rows.
        """


def proposer_for(
    model: BlockDiffusionModel, settings: SamplingSettings, pages: Pages, max_rows: int, graphs: Graphs
) -> Proposer:
    """Make the buffers for at most `max_rows` rows of an engine; `graphs` captures their steps if possible."""
    return (CanvasBatch if settings.denoises else BlockBatch)(model, settings, pages, max_rows, graphs)


def require_head(strategy: Strategy, predicts_next_tokens: bool) -> None:
    """Raise RequestError for a strategy that needs a next-token head if the model has none."""
    if next_token_head(strategy) is not None and not predicts_next_tokens:
        names = {named.strategy: name for name, named in NAMES.items()}
        name = names.get(type(strategy), type(strategy).__name__)
        raise RequestError(f"the strategy {name}: {NO_HEAD}; give one that denoises canvases, or none")


def require_fitting(strategy: Strategy, settings: SamplingSettings) -> None:
    """Raise RequestError for a strategy that the model, or its drafter, cannot use."""
    way = round_of(strategy)
    require_head(strategy, settings.predicts_next_tokens)
    if isinstance(strategy, Speculative) and settings.block is None:
        raise RequestError(
            "the strategy speculative needs a drafter, unless a model that denoises masks has it for all requests; "
            "give one (--draft-model), or the strategy next_token"
        )
    if settings.is_drafted and settings.block is not None and way.denoises:
        raise RequestError(
            "the strategy denoises canvases, and a drafter drafts next tokens; give speculative or next_token, or none"
        )
    if settings.is_drafted and settings.block is None and way is not VerifiedRound:
        raise RequestError("a draft model drafts for verified canvases alone; give the strategy verified, or none")
    if way.denoises != settings.denoises:
        raise RequestError(
            "some strategies denoise canvases and next_token does not, so not both can answer the requests of one "
            "sampler; use two"
        )
