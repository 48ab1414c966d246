"""Next tokens: each running sequence gets its turn to have its last token encoded, with drafted ones behind it."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

import torch

from blockdiff.models.weights import weight_addresses
from blockdiff.sampling.drafts import BlockDraft, Proposal
from blockdiff.sampling.graphs import padding

if TYPE_CHECKING:
    from blockdiff.models.drafted import Drafter
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.graphs import Graphs
    from blockdiff.sampling.sequence import RunningCanvas, Sequence
    from blockdiff.sampling.trace import Step


class BlockBatch:
    """The sequences whose next tokens are drawn, at most `most` of them; what is proposed the next encode verifies.

    A block begins with the last token of the response, which is not encoded yet, and the tokens behind it are proposed,
    as many as `BlockDraft.reach` says: none where there is no drafter. What no constraint of the request lets stand is
    left out.

    buckets, graphs: as in `CanvasBatch`, for the passes of the drafter.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        pages: Pages,
        most: int,
        buckets: abc.Sequence[int] | None = None,
        graphs: Graphs | None = None,
    ):
        self.drafter, self.pages, self.buckets, self.graphs = drafter, pages, buckets, graphs
        self.sequences, self.denoised = list["Sequence"](), 0
        if drafter is not None:
            most, length = most + padding(buckets, most), drafter.canvas_length
            self._steps = pages.step_buffers(most, length, keeps=graphs is None)
            self._anchor_B = torch.zeros(most, dtype=torch.int64, device=drafter.device)
            self._drafted_BK = torch.zeros(most, length - 1, dtype=torch.int64, device=drafter.device)

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
        drafter, steps = self.drafter, self._steps
        assert drafter is not None
        rows = [each.paged for each in sequences if each.paged is not None]
        rows += [self.pages.empty] * padding(self.buckets, len(rows))
        key, of = steps.load(rows), slice(len(rows))
        self._anchor_B[: len(sequences)] = torch.tensor([each.token_ids[-1] for each in sequences])

        def draft() -> None:
            self._drafted_BK[of, :count] = drafter.draft(self._anchor_B[of], count, steps.denoise)

        if self.graphs is not None and all(each.may_capture for each in sequences):
            self.graphs.follow(weight_addresses(self.pages.model))
            self.graphs.run((len(rows), count, key), draft)
        else:
            draft()
        self.denoised += len(rows)
        found: list[list[int]] = self._drafted_BK[: len(sequences), :count].tolist()
        return found
