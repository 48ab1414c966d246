"""Warm-up calls: before any request they compile kernels, capture steps and measure memory.

Their rows stand in for real ones and write to the padding page, so that calls of any size need no pages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockdiff import memory
from blockdiff.errors import BlockdiffError, RequestError
from blockdiff.sampling.prepare import prepare_sequences
from blockdiff.sampling.request import Request
from blockdiff.sampling.sequence import Proposal, Sequence
from blockdiff.sampling.strategies import adjusted
from blockdiff.sampling.verification import verify

if TYPE_CHECKING:
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.encoding import CapturedEncode
    from blockdiff.sampling.rounds import Proposer
    from blockdiff.sampling.scheduler import Scheduler
    from blockdiff.sampling.settings import SamplingSettings

PREFIX_TOKENS = 1000  # of the rows whose steps are captured
MARGIN = 1.25  # factor on measured bytes, because calls vary
KEPT_BYTES = 1 << 30  # for the features of images and the workspaces of libraries


@dataclass
class WarmUp:
    """Calls of an engine's parts that need no request.

    peaks: the bytes that the largest call of each kind takes, once measured.
    """

    pages: Pages
    proposer: Proposer
    settings: SamplingSettings
    scheduler: Scheduler
    captured: CapturedEncode | None
    peaks: dict[str, int] = field(default_factory=dict)

    @torch.no_grad()
    def measure(self) -> None:
        """Measure the bytes that pages must leave free for the largest call of each kind, unless pages grow on demand.

        Captured steps have memory of their own, and a step runs before it is captured, so steps count twice. Raises
        BlockdiffError if the device has too little memory for the calls.
        """
        if self.pages.grows or self.peaks:
            return
        device, rows = self.pages.model.device, self.scheduler.max_rows
        calls: dict[str, Callable[[], None]] = {
            "encode": self.encode,
            "step": lambda: self.step(rows),
            "filtered": lambda: self.filtered(rows),
            "verify": self.verify,
        }
        try:
            peaks = {name: memory.peak_of(call, device) for name, call in calls.items()}
        except torch.cuda.OutOfMemoryError:
            raise BlockdiffError(
                f"{device}: there is no memory for a step of {rows} rows; let fewer run together"
            ) from None
        of_calls = peaks["encode"] + 2 * max(peaks["step"], peaks["filtered"]) + peaks["verify"]
        self.pages.kept_free = int(MARGIN * of_calls) + KEPT_BYTES + self._image_bytes()
        self.peaks = peaks

    def encode(self) -> None:
        """Encode as many tokens as a step encodes at most."""
        tokens = min(self.scheduler.chunk_tokens, self._positions())
        rows = max(1, self.scheduler.tokens_per_step // tokens)
        tokens_BT = torch.arange(rows * tokens).view(rows, tokens) % self.settings.vocab_size
        self.pages.encode([self.pages.stand_in(0, tokens) for _ in range(rows)], tokens_BT, [tokens] * rows)

    def step(self, rows: int, times: int = 1, **asked: Any) -> None:
        """Let `rows` rows propose `times` times, and encode the proposals if that call is captured.

        The second time captures the step, if possible. asked: fields of the rows' requests.
        """
        before, sequences = self.proposer.denoised, self._sequences(rows, **asked)
        for step in range(times):
            self.proposer.propose(sequences, step)
            round = sequences[0].round
            if self.captured is not None and round.proposal is not None:
                count = round.leads + len(round.proposal.tokens)
                row = self.pages.stand_in(sequences[0].num_computed, count)
                self.captured([row] * rows, torch.zeros(rows, count, dtype=torch.int64))
        self.proposer.propose([], times)
        self.proposer.denoised = before

    def filtered(self, rows: int = 1) -> None:
        """Denoise and verify rows that draw with top_p, unless the strategy has no filters."""
        with suppress(RequestError):
            self._asked(
                rows, strategy=adjusted(self.settings.strategy, temperature=1.0, top_p=0.9)
            )  # 0 would draw nothing

    def constrained(self) -> None:
        """Denoise and verify a row with a constraint, unless that is refused, as without a tokenizer."""
        with suppress(RequestError):
            self._asked(1, regex=".*")

    def _asked(self, rows: int, **fields: Any) -> None:
        self.step(rows, **fields)
        self.verify(rows, **fields)

    def verify(self, rows: int | None = None, **asked: Any) -> None:
        """Verify a draft of `rows` rows (None: of `max_rows`), if drafts are verified."""
        sequences = self._sequences(rows or self.scheduler.max_rows, **asked)
        if all(each.round.proposal is not None for each in sequences):
            verify(self.pages.model, self.settings, sequences)

    def _sequences(self, rows: int, **fields: Any) -> list[Sequence]:
        """Return sequences of equal requests, each ready to propose."""
        length = self.settings.round_length
        prompt = [0] * max(1, min(PREFIX_TOKENS, self._positions() - length))
        sequences = list[Sequence]()
        for number in range(rows):
            request = Request(number, tokens=prompt, seed=0, max_new_tokens=length, **fields)
            [sequence] = prepare_sequences(request, self.settings, device=self.pages.model.device)
            sequence.paged = self.pages.stand_in(sequence.num_prompted, 0)
            sequence.last_hidden_D = self._hidden(1)[0]
            if sequence.round.head is not None:  # which may have to read a proposal of the most tokens
                sequence.round.propose(sequence, Proposal([0] * length, steps=1))
                sequence.hidden_TD = self._hidden(length)
            sequences.append(sequence)
        return sequences

    def _hidden(self, tokens: int) -> Tensor:
        """Return hidden states [tokens, D] of zeros."""
        model = self.pages.model
        return torch.zeros(tokens, model.vocabulary.table.shape[1], dtype=model.dtype, device=model.device)

    def _positions(self) -> int:
        """The most tokens that a row may have."""
        return self.settings.positions or PREFIX_TOKENS + self.settings.canvas_length

    def _image_bytes(self) -> int:
        """The bytes of the image encoder, if it is loaded with the first image."""
        model = self.pages.model
        if self.settings.image_reader is None or model.image_side is not None:
            return 0
        with torch.device("meta"):
            side = model.config.image_side()
        return 0 if side is None else model.dtype.itemsize * sum(x.numel() for x in side.parameters())
