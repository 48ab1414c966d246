"""Calls that traffic will bring, made before there is any: kernels are compiled, steps captured, memory is measured.

The rows stand in for real ones: their tokens are written where padding is, so that calls of any size need no pages.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdiff import memory
from blockdiff.errors import BlockdiffError, RequestError
from blockdiff.models.family import family_of
from blockdiff.sampling.drafts import Proposal
from blockdiff.sampling.request import Request
from blockdiff.sampling.sequence import RunningCanvas, Sequence, prepare_sequences
from blockdiff.sampling.strategies import adjusted
from blockdiff.sampling.verification import verify

if TYPE_CHECKING:
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.batch import CanvasBatch
    from blockdiff.sampling.blocks import BlockBatch
    from blockdiff.sampling.encoding import CapturedEncode
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
    captured: CapturedEncode | None

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

    def step(self, rows: int, times: int = 1, **asked: Any) -> None:
        """Denoise the canvases of so many rows, or draft blocks, and encode what was drafted where that is captured.

        The second time the step is captured, where that can be done. asked: fields of their requests.
        """
        before, sequences = self.batch.denoised, self._sequences(rows, **asked)
        self.batch.arrange(sequences)
        for step in range(times):
            self.batch.step(step)
            if self.captured is not None and (proposal := sequences[0].proposal) is not None:
                count = len(proposal.tokens) + sequences[0].is_drawn_from  # a block begins with a token that stands
                row = self.pages.stand_in(sequences[0].num_computed, count)
                self.captured([row] * rows, torch.zeros(rows, count, dtype=torch.int64))
        self.batch.arrange([])
        self.batch.denoised = before

    def filtered(self) -> None:
        """Denoise and verify a row of which tokens are drawn with top_p, unless the strategy has no filters."""
        with suppress(RequestError):
            self._asked(strategy=adjusted(self.settings.strategy, temperature=1.0, top_p=0.9))  # 0 would draw nothing

    def constrained(self) -> None:
        """Denoise and verify a row with a constraint, unless the engine has no tokenizer, say, which that takes."""
        with suppress(RequestError):
            self._asked(regex=".*")

    def _asked(self, **asked: Any) -> None:
        self.step(1, **asked)
        self.verify(1, **asked)

    def verify(self, rows: int | None = None, **asked: Any) -> None:
        """Verify a draft of so many rows (None: of as many as there may be), where drafts are verified."""
        sequences = self._sequences(rows or self.scheduler.max_rows, **asked)
        drafts = [(each, self._hidden(len(each.proposal.tokens))) for each in sequences if each.proposal is not None]
        if drafts:
            verify(self.pages.model, self.settings, drafts)

    def _sequences(self, rows: int, **asked: Any) -> list[Sequence]:
        """Answers to the same request, with a canvas that is about to be denoised each."""
        length = self.settings.block or self.settings.canvas_length
        prompt = [0] * max(1, min(PREFIX_TOKENS, self._positions() - length))
        found = list[Sequence]()
        for number in range(rows):
            request = Request(number, tokens=prompt, seed=0, max_new_tokens=length, **asked)
            [sequence] = prepare_sequences(request, self.settings, device=self.pages.model.device)
            sequence.paged = self.pages.stand_in(len(prompt), 0)
            control = None if sequence.control is None else sequence.control.begin(sequence.seed)
            sequence.canvas, sequence.last_hidden_D = RunningCanvas(sequence, 0, 0, control), self._hidden(1)[0]
            if sequence.draft is not None:
                sequence.propose(Proposal([0] * length, steps=1))
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


@dataclass
class PageRoom:
    """The memory that the pages of an engine take, once it is known what its largest calls need.

    asked: the tokens that all rows may have together (None: as many as memory has room for); is_taken: whether the
    pages have what they get; measured_rows: the rows of the largest calls whose memory is known.
    """

    pages: Pages
    asked: int | None
    is_taken: bool
    measured_rows: int = 0

    def take(self, calls: WarmUp, most_rows: int, most_added: int) -> None:
        """Let the pages take what memory there is for them, or what was asked for, once."""
        if self.is_taken:
            return
        self.is_taken = True
        self._measure(calls, most_rows)
        self.pages.grow(self.asked, most_rows, most_added)
        if self.measured_rows and not self.pages.capacity:
            raise BlockdiffError(
                f"{self.pages.model.device}: {memory.size(self.pages.kept_free or 0)} for the calls of {most_rows} "
                "rows leave no memory for pages; let fewer run together"
            )

    def grow(self, calls: WarmUp | None, tokens: int, rows: int, most_rows: int, most_added: int) -> bool:
        """Let pages of so many tokens be taken, by at most `rows` rows; False where memory has no room for all.

        calls: those to measure (None: none can be made now).
        """
        self.is_taken = True
        if calls is not None:
            self._measure(calls, most_rows)
        return self.pages.grow(tokens, rows, most_added)

    @torch.no_grad()
    def _measure(self, calls: WarmUp, most_rows: int) -> None:
        """Find how much memory to leave to calls, where pages take all at once."""
        if self.pages.grows or self.measured_rows >= most_rows:
            return
        device = self.pages.model.device
        try:
            self.pages.kept_free = calls.bytes_of_calls()
        except torch.cuda.OutOfMemoryError:
            raise BlockdiffError(
                f"{device}: there is no memory for a step of {most_rows} rows; let fewer run together"
            ) from None
        self.measured_rows = most_rows
