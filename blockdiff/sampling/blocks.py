"""Blocks of a drafter: one pass over the running sequences proposes tokens behind the last one of each."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.sequence import RunningCanvas, Sequence
    from blockdiff.sampling.trace import Step


class BlockBatch:
    """The sequences that a drafter drafts for, at most `most` of them; what it proposes the next encode verifies.

    A block begins with the last token of the response, which is not encoded yet, and goes on with masks. The drafter
    sees whole blocks, because it has learnt these, and the likeliest tokens of as many places as `Draft.reach` says
    are proposed. What no constraint of the request lets stand is left out.
    """

    buckets: abc.Sequence[int] | None = None

    def __init__(self, drafter: BlockDiffusionModel, pages: Pages, most: int):
        self.drafter, self.sequences, self.denoised = drafter, list["Sequence"](), 0
        self._steps = pages.step_buffers(most, drafter.canvas_length)

    def arrange(self, sequences: abc.Sequence[Sequence]) -> None:
        """Take the sequences of the next pass."""
        self.sequences = list(sequences)

    def step(self, now: int) -> tuple[list[RunningCanvas], list[tuple[Sequence, Step]]]:
        """Put a proposal, which may be of no token, behind each sequence; there are no canvases and no records."""
        counts = {}
        for each in self.sequences:
            assert each.draft is not None
            counts[id(each)] = min(each.draft.reach, each.max_tokens - len(each.tokens) - 1)
            each.draft.proposed_steps = 1
        asked = [each for each in self.sequences if counts[id(each)] > 0]
        if asked:
            drafter = self.drafter
            blocks_BL = torch.full((len(asked), drafter.canvas_length), drafter.mask_id)
            blocks_BL[:, 0] = torch.tensor([each.token_ids[-1] for each in asked])
            self._steps.load([each.paged for each in asked if each.paged is not None])
            widest = max(counts[id(each)] for each in asked)
            hidden_BLD = self._steps.denoise(blocks_BL.to(drafter.device))[:, 1 : 1 + widest]
            anyone_N = torch.zeros(hidden_BLD.shape[:2].numel(), dtype=torch.int64, device=hidden_BLD.device)
            _, likeliest_N = drafter.vocabulary.scores(hidden_BLD.flatten(0, 1), anyone_N)
            self.denoised += len(asked)
            for each, tokens in zip(asked, likeliest_N.view(len(asked), -1).tolist(), strict=True):
                tokens = tokens[: counts[id(each)]]
                each.token_ids += tokens if each.control is None else each.control.possible(tokens)
                each.calls["draft"] += 1
        return [], []
