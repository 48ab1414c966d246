"""Calls that traffic will bring, made before there is any: kernels are compiled, steps captured, memory is measured.

The rows stand in for real ones: their tokens are written where padding is, so that calls of any size need no pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff import memory
from blockdiff.models.family import family_of
from blockdiff.sampling.request import Request
from blockdiff.sampling.sequence import RunningCanvas, Sequence, prepare_sequences
from blockdiff.sampling.verification import verify

if TYPE_CHECKING:
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.batch import CanvasBatch
    from blockdiff.sampling.blocks import BlockBatch
    from blockdiff.sampling.scheduler import Scheduler
    from blockdiff.sampling.settings import SamplingSettings

PREFIX_TOKENS = 1000  # of the rows whose steps are captured
MARGIN = 1.25  # times what calls took: free memory is in pieces, and no two calls are alike
KEPT_BYTES = 1 << 30  # for captured steps, the features of images and the workspaces of libraries


@dataclass(frozen=True)
class WarmUp:
    """The calls of an engine with these parts, each of which can be made without any request."""

    pages: Pages
    batch: CanvasBatch | BlockBatch
    settings: SamplingSettings
    scheduler: Scheduler

    def bytes_of_calls(self) -> int:
        """The bytes to leave free for calls beside pages, after the largest call of every kind has been made.

        A captured step has memory of its own, so what the calls took is added up. Raises torch's OutOfMemoryError.
        """
        device, rows = self.pages.model.device, self.scheduler.max_rows
        peaks = [memory.peak_of(call, device) for call in (self.encode, lambda: self.step(rows), self.verify)]
        return int(MARGIN * sum(peaks)) + KEPT_BYTES + self._image_bytes()

    def encode(self) -> None:
        """Encode as many tokens as a step does at most."""
        tokens = min(self.scheduler.chunk_tokens, self._positions())
        rows = max(1, self.scheduler.tokens_per_step // tokens)
        tokens_BT = torch.arange(rows * tokens).view(rows, tokens) % self.settings.vocab_size
        self.pages.encode([self.pages.stand_in(0, tokens) for _ in range(rows)], tokens_BT, [tokens] * rows)

    def step(self, rows: int, times: int = 1) -> None:
        """Denoise the canvases of so many rows; the second time the step is captured, where that can be done."""
        before = self.batch.denoised
        self.batch.arrange(self._sequences(rows))
        for step in range(times):
            self.batch.step(step)
        self.batch.arrange([])
        self.batch.denoised = before

    def verify(self) -> None:
        """Verify a draft of every row, where drafts are verified."""
        drafts = [(each, self._hidden(len(each.proposed))) for each in self._sequences(self.scheduler.max_rows)]
        if any(sequence.proposed for sequence, _ in drafts):
            verify(self.pages.model, self.settings, drafts)

    def _sequences(self, rows: int) -> list[Sequence]:
        """Answers to the same request, with a canvas that is about to be denoised each."""
        length = self.settings.block or self.settings.canvas_length
        prompt = [0] * max(1, min(PREFIX_TOKENS, self._positions() - length))
        found = list[Sequence]()
        for number in range(rows):
            request = Request(number, tokens=prompt, seed=0, max_new_tokens=length)
            [sequence] = prepare_sequences(request, self.settings, device=self.pages.model.device)
            sequence.paged = self.pages.stand_in(len(prompt), 0)
            sequence.canvas, sequence.last_hidden_D = RunningCanvas(sequence, 0, 0), self._hidden(1)[0]
            if sequence.draft is not None:
                sequence.token_ids += [0] * length
                sequence.draft.proposed_steps = 1
            found.append(sequence)
        return found

    def _hidden(self, tokens: int) -> Tensor:
        """Hidden states [tokens, D] of nothing."""
        model = self.pages.model
        return torch.zeros(tokens, model.vocabulary.table.shape[1], dtype=model.dtype, device=model.device)

    def _positions(self) -> int:
        """The most tokens that a row may have."""
        return self.settings.positions or PREFIX_TOKENS + self.settings.canvas_length

    def _image_bytes(self) -> int:
        """The bytes of what turns images into embeddings, where it comes with the first image."""
        model = self.pages.model
        if self.settings.image_reader is None or model.image_side is not None:
            return 0
        with torch.device("meta"):
            side = family_of(model.config).image_side(model.config)
        return 0 if side is None else model.dtype.itemsize * sum(x.numel() for x in side.parameters())
