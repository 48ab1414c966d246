"""Next tokens: a call encodes the last token with a drafter's proposal behind it, and the head draws the next one.

A model that denoises masks can draft for itself, over its own pages. Without a drafter the proposal has no token.
Tokens that the request's constraint excludes are not proposed.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from blockdiff.models.drafted import Drafter, draft_block
from blockdiff.sampling.encoding import accept
from blockdiff.sampling.sequence import Proposal, Round
from blockdiff.sampling.strategies import Speculative, next_token_head

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.graphs import Graphs
    from blockdiff.sampling.rounds.canvases import RunningCanvas
    from blockdiff.sampling.sequence import Sequence
    from blockdiff.sampling.settings import SamplingSettings
    from blockdiff.sampling.strategy import Strategy
    from blockdiff.sampling.trace import Verification


@dataclass(eq=False)
class NextTokenRound(Round):
    """The growth of an answer by next tokens, of which a drafter proposes at most `most` behind the last one.

    follows: whether later rounds go by what was accepted lately; recent: the number of drafted tokens of a round that
    were accepted lately (None: there was none).
    """

    most: int = 0
    follows: bool = True
    recent: float | None = None
    denoises: ClassVar[bool] = False
    leads: ClassVar[int] = 1  # the last token of the response

    @classmethod
    def of(cls, strategy: Strategy, settings: SamplingSettings) -> Self:
        """Nothing is drafted yet; tokens are drafted for `Speculative` alone."""
        most = settings.block or 1
        block = strategy.block if isinstance(strategy, Speculative) else 1
        return cls(next_token_head(strategy), most=min(block or most, most) - 1, follows=block is None)

    @classmethod
    def steps(cls, strategy: Strategy, max_steps: int) -> int:
        """One: nothing is denoised."""
        return 1

    @classmethod
    def answer_chunk(cls, settings: SamplingSettings, chunk_tokens: int) -> int:
        """A chunk of a prompt: tokens that are encoded again need not go one by one."""
        return chunk_tokens

    @property
    def reach(self) -> int:
        """The number of tokens to draft: the most, or half as many again as were accepted lately, and one more."""
        return min(self.most, 1 + round(1.5 * self.recent)) if self.follows and self.recent is not None else self.most

    def to_encode(self, sequence: Sequence) -> int:
        """All but the last token of a response that has begun: it is encoded together with a proposal."""
        count = sequence.num_uncomputed
        return 0 if count == 1 and sequence.tokens and self.proposal is None else count

    def awaits_head(self, sequence: Sequence) -> bool:
        """True behind a proposal and behind the prompt, whose last token the head reads."""
        return self.proposal is not None or not sequence.num_uncomputed

    @property
    def forward(self) -> str:
        """A call without a drafter verifies nothing."""
        return "verify" if self.proposal is not None and self.most else "encode"

    def settle(self, sequence: Sequence, verification: Verification, pages: Pages, settings: SamplingSettings) -> None:
        """Commit the accepted tokens of the block and the head's own token behind them."""
        self.retract(sequence)
        accepted, own = verification.accepted, verification.own
        assert own is not None
        encoded_end = len(sequence.token_ids) + accepted
        self.note(verification)
        kept = sequence.commit([*verification.draft[:accepted], own], 1, settings)
        self._count_places(verification, len(verification.draft) if sequence.finish_reason is None else kept)
        accept(sequence, encoded_end, pages)

    def note(self, verification: Verification) -> None:
        """Take note of a round; `recent` is by a quarter the newest and by three what it was."""
        if verification.draft:
            before = float(verification.accepted) if self.recent is None else self.recent
            self.recent = before + (verification.accepted - before) / 4

    def _count_places(self, verification: Verification, count: int) -> None:
        """Count the first `count` drafted tokens of a block by their places, and those that were accepted."""
        for place in range(count)[: len(verification.draft)]:
            drafted, accepted = self.places[place] if place < len(self.places) else (0, 0)
            self.places[place : place + 1] = [(drafted + 1, accepted + (place < verification.accepted))]


class BlockBatch:
    """The rows whose next tokens are drawn, at most `most` of them, and the model that drafts for them, if any."""

    def __init__(self, model: BlockDiffusionModel, settings: SamplingSettings, pages: Pages, most: int, graphs: Graphs):
        self.pages, self.graphs, self.denoised = pages, graphs, 0
        if settings.block is not None:
            drafter, mask_id = model.denoiser, settings.diffusion.mask_id
            if isinstance(drafter, Drafter):
                self._draft = drafter.draft
            else:
                assert mask_id is not None
                self._draft = partial(draft_block, drafter, mask_id)
            most, length = most + graphs.padding(most), drafter.canvas_length
            # for one pass, or a few over one layer, no dense copies pay
            self._steps = pages.step_buffers(most, length, keeps=False)
            self._anchor_B = torch.zeros(most, dtype=torch.int64, device=drafter.device)
            self._drafted_BK = torch.zeros(most, length - 1, dtype=torch.int64, device=drafter.device)

    def propose(self, rows: abc.Sequence[Sequence], now: int) -> list[RunningCanvas]:
        """Put a proposal, which may be of no token, behind each row; there are no canvases."""
        asked = list[tuple["Sequence", int]]()
        for each in rows:
            assert isinstance(each.round, NextTokenRound)
            if (count := min(each.round.reach, each.max_tokens - len(each.tokens) - 1)) > 0:
                asked.append((each, count))
            else:
                each.round.propose(each, Proposal())
        likeliest = self._likeliest([each for each, _ in asked], max(count for _, count in asked)) if asked else []
        for (each, count), tokens in zip(asked, likeliest, strict=True):
            tokens = tokens[:count]
            each.round.propose(each, Proposal(tokens if each.control is None else each.control.possible(tokens)))
            each.calls["draft"] += 1
        return []

    def _likeliest(self, sequences: list[Sequence], count: int) -> list[list[int]]:
        """The `count` tokens that the drafter takes for the likeliest behind each sequence."""
        steps = self._steps
        rows = [each.paged for each in sequences if each.paged is not None]
        rows += [self.pages.empty] * self.graphs.padding(len(rows))
        key, of = steps.load(rows), slice(len(rows))
        self._anchor_B[: len(sequences)] = torch.tensor([each.token_ids[-1] for each in sequences])

        def draft() -> None:
            self._drafted_BK[of, :count] = self._draft(self._anchor_B[of], count, steps.denoise)

        if all(each.may_capture for each in sequences):
            self.graphs.run((len(rows), count, key), draft)
        else:
            draft()
        self.denoised += len(rows)
        found: list[list[int]] = self._drafted_BK[: len(sequences), :count].tolist()
        return found
