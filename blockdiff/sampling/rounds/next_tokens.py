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
    """The growth of an answer by next tokens; a drafter proposes at most `most` of them per round.

    follows: whether the number of drafted tokens adapts to recent acceptance; recent: the moving average of accepted
    tokens per round (None: nothing was drafted yet).
    """

    most: int = 0
    follows: bool = True
    recent: float | None = None
    denoises: ClassVar[bool] = False
    leads: ClassVar[int] = 1  # the last token of the response

    @classmethod
    def of(cls, strategy: Strategy, settings: SamplingSettings) -> Self:
        """Return a round without a proposal; only `Speculative` drafts tokens."""
        most = settings.block or 1
        block = strategy.block if isinstance(strategy, Speculative) else 1
        return cls(next_token_head(strategy), most=min(block or most, most) - 1, follows=block is None)

    @classmethod
    def steps(cls, strategy: Strategy, max_steps: int) -> int:
        """Return 1: nothing is denoised."""
        return 1

    @classmethod
    def answer_chunk(cls, settings: SamplingSettings, chunk_tokens: int) -> int:
        """Return `chunk_tokens`, as for prompts: after a preemption, response tokens can share a call."""
        return chunk_tokens

    @property
    def reach(self) -> int:
        """The number of tokens to draft: `most`, or, if `follows` is set, at most 1.5 times `recent` plus 1."""
        return min(self.most, 1 + round(1.5 * self.recent)) if self.follows and self.recent is not None else self.most

    def to_encode(self, sequence: Sequence) -> int:
        """All unencoded tokens, except the response's last one, which is encoded together with a proposal."""
        count = sequence.num_uncomputed
        return 0 if count == 1 and sequence.tokens and self.proposal is None else count

    def awaits_head(self, sequence: Sequence) -> bool:
        """True after a proposal and after the end of the prompt: the head reads the last hidden state."""
        return self.proposal is not None or not sequence.num_uncomputed

    @property
    def forward(self) -> str:
        """The field of `Forwards` that counts the next encode: "verify" if a drafter's proposal is in it."""
        return "verify" if self.proposal is not None and self.most else "encode"

    def settle(self, sequence: Sequence, verification: Verification, pages: Pages, settings: SamplingSettings) -> None:
        """Commit the accepted tokens of the block and the head's own token after them."""
        self.retract(sequence)
        accepted, token = verification.accepted, verification.own
        assert token is not None
        encoded_end = len(sequence.token_ids) + accepted
        self.note(verification)
        count = sequence.commit([*verification.draft[:accepted], token], 1, settings)
        self._count_places(verification, len(verification.draft) if sequence.finish_reason is None else count)
        accept(sequence, encoded_end, pages)

    def note(self, verification: Verification) -> None:
        """Update `recent` with a round's accepted number, at a weight of 1/4."""
        if verification.draft:
            before = float(verification.accepted) if self.recent is None else self.recent
            self.recent = before + (verification.accepted - before) / 4

    def _count_places(self, verification: Verification, count: int) -> None:
        """Count the first `count` drafted tokens of a block, and the accepted ones among them, in `places`."""
        for index in range(count)[: len(verification.draft)]:
            drafted, accepted = self.places[index] if index < len(self.places) else (0, 0)
            self.places[index : index + 1] = [(drafted + 1, accepted + (index < verification.accepted))]


class BlockBatch:
    """At most `most` rows that grow by next tokens, and the model that drafts for them, if any."""

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
            # dense copies do not pay off for one pass, or for a few over one layer
            self._steps = pages.step_buffers(most, length, keeps=False)
            self._anchor_B = torch.zeros(most, dtype=torch.int64, device=drafter.device)
            self._drafted_BK = torch.zeros(most, length - 1, dtype=torch.int64, device=drafter.device)

    def propose(self, rows: abc.Sequence[Sequence], now: int) -> list[RunningCanvas]:
        """Append a proposal, which may be empty, to each row; returns no canvases."""
        pairs = list[tuple["Sequence", int]]()
        for each in rows:
            assert isinstance(each.round, NextTokenRound)
            if (count := min(each.round.reach, each.max_tokens - len(each.tokens) - 1)) > 0:
                pairs.append((each, count))
            else:
                each.round.propose(each, Proposal())
        likeliest = self._likeliest([each for each, _ in pairs], max(count for _, count in pairs)) if pairs else []
        for (each, count), tokens in zip(pairs, likeliest, strict=True):
            tokens = tokens[:count]
            each.round.propose(each, Proposal(tokens if each.control is None else each.control.possible(tokens)))
            each.calls["draft"] += 1
        return []

    def _likeliest(self, sequences: list[Sequence], count: int) -> list[list[int]]:
        """Draft the `count` tokens that follow each sequence."""
        steps = self._steps
        rows = [each.paged for each in sequences if each.paged is not None]
        rows += [self.pages.empty] * self.graphs.padding(len(rows))
        key, span = steps.load(rows), slice(len(rows))
        self._anchor_B[: len(sequences)] = torch.tensor([each.token_ids[-1] for each in sequences])

        def draft() -> None:
            self._drafted_BK[span, :count] = self._draft(self._anchor_B[span], count, steps.denoise)

        if all(each.may_capture for each in sequences):
            self.graphs.run((len(rows), count, key), draft)
        else:
            draft()
        self.denoised += len(rows)
        tokens: list[list[int]] = self._drafted_BK[: len(sequences), :count].tolist()
        return tokens
