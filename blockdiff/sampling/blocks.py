"""Next tokens: each running sequence gets its turn to have its last token encoded, with drafted ones behind it."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

import torch

from blockdiff.sampling.drafts import BlockDraft, Proposal

if TYPE_CHECKING:
    from blockdiff.models.drafted import Drafter
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.sequence import RunningCanvas, Sequence
    from blockdiff.sampling.trace import Step


class BlockBatch:
    """The sequences whose next tokens are drawn, at most `most` of them; what is proposed the next encode verifies.

    A block begins with the last token of the response, which is not encoded yet, and the tokens behind it are proposed,
    as many as `BlockDraft.reach` says: none where there is no drafter. What no constraint of the request lets stand is
    left out.
    """

    buckets: abc.Sequence[int] | None = None

    def __init__(self, drafter: Drafter | None, pages: Pages, most: int):
        self.drafter, self.sequences, self.denoised = drafter, list["Sequence"](), 0
        self._steps = None if drafter is None else pages.step_buffers(most, drafter.canvas_length)

    def arrange(self, sequences: abc.Sequence[Sequence]) -> None:
        """Take the sequences of the next pass."""
        self.sequences = list(sequences)

    def step(self, now: int) -> tuple[list[RunningCanvas], list[tuple[Sequence, Step]]]:
        """Put a proposal, which may be of no token, behind each sequence; there are no canvases and no records."""
        asked = list[tuple["Sequence", int]]()
        for each in self.sequences:
            assert isinstance(each.draft, BlockDraft)
            if (count := min(each.draft.reach, each.max_tokens - len(each.tokens) - 1)) > 0:
                asked.append((each, count))
            else:
                each.propose(Proposal())
        likeliest = self._likeliest([each for each, _ in asked], max(count for _, count in asked)) if asked else []
        for (each, count), tokens in zip(asked, likeliest, strict=True):
            tokens = tokens[:count]
            each.propose(Proposal(tokens if each.control is None else each.control.possible(tokens)))
            each.calls["draft"] += 1
        return [], []

    def _likeliest(self, sequences: list[Sequence], count: int) -> list[list[int]]:
        """The `count` tokens that the drafter takes for the likeliest behind each sequence."""
        assert self.drafter is not None and self._steps is not None
        anchor_B = torch.tensor([each.token_ids[-1] for each in sequences], device=self.drafter.device)
        self._steps.load([each.paged for each in sequences if each.paged is not None])
        self.denoised += len(sequences)
        found: list[list[int]] = self.drafter.draft(anchor_B, count, self._steps.denoise).tolist()
        return found
