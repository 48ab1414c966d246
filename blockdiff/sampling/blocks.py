"""Next tokens: each running sequence gets its turn to have its last token encoded, with drafted ones behind it."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

import torch

from blockdiff.sampling.drafts import BlockDraft, Proposal

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
    left out. graphs: for the passes of the drafter.
    """

    def __init__(self, drafter: Drafter | None, pages: Pages, most: int, graphs: Graphs):
        self.drafter, self.pages, self.graphs = drafter, pages, graphs
        self.denoised = 0
        if drafter is not None:
            most, length = most + graphs.padding(most), drafter.canvas_length
            # for one pass, or a few over one layer, no dense copies pay
            self._steps = pages.step_buffers(most, length, keeps=False)
            self._anchor_B = torch.zeros(most, dtype=torch.int64, device=drafter.device)
            self._drafted_BK = torch.zeros(most, length - 1, dtype=torch.int64, device=drafter.device)

    def step(
        self, running: abc.Sequence[Sequence], now: int
    ) -> tuple[list[RunningCanvas], list[tuple[Sequence, Step]]]:
        """Put a proposal, which may be of no token, behind each sequence; there are no canvases and no records."""
        asked = list[tuple["Sequence", int]]()
        for each in running:
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
        rows += [self.pages.empty] * self.graphs.padding(len(rows))
        key, of = steps.load(rows), slice(len(rows))
        self._anchor_B[: len(sequences)] = torch.tensor([each.token_ids[-1] for each in sequences])

        def draft() -> None:
            self._drafted_BK[of, :count] = drafter.draft(self._anchor_B[of], count, steps.denoise)

        if all(each.may_capture for each in sequences):
            self.graphs.run((len(rows), count, key), draft)
        else:
            draft()
        self.denoised += len(rows)
        found: list[list[int]] = self._drafted_BK[: len(sequences), :count].tolist()
        return found
