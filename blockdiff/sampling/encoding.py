"""Encoding in the engine: chunks of prompts and committed canvases go into pages, and scores come out."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.checkpoint import with_image_side
from blockdiff.errors import CheckpointError
from blockdiff.sampling.scores import next_token_logprobs

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.models.page_buffers import StepBuffers
    from blockdiff.models.page_rows import PagedRow
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.graphs import Graphs
    from blockdiff.sampling.sequence import Sequence

Chunk = tuple["Sequence", int]  # a sequence, and the number of its tokens to encode


class CapturedEncode:
    """Encodes the same number of tokens behind each of at most `most` rows, in one CUDA graph per number of tokens.

    longest: the most tokens that are encoded behind a row.
    """

    def __init__(self, pages: Pages, most: int, longest: int, graphs: Graphs):
        self.pages, self.longest, self.graphs = pages, longest, graphs
        self.most, self.padded = most, most + graphs.padding(most)
        self._buffers: dict[int, tuple[StepBuffers, Tensor, Tensor]] = {}  # by the number of tokens

    def takes(self, chunks: abc.Sequence[Chunk]) -> bool:
        """True if the chunks are drafts to be verified, have equally many tokens each, and fit into the buffers."""
        counts = {count for _, count in chunks}
        fits = len(counts) == 1 and max(counts) <= self.longest and len(chunks) <= self.most
        return fits and all(each.round.proposal is not None and each.may_capture for each, _ in chunks)

    def __call__(self, rows: abc.Sequence[PagedRow], tokens_BT: Tensor) -> Tensor:
        """Return the hidden states [B, T, D] of the tokens and write their keys and values to pages.

        See `Pages.encode`.
        """
        model, (B, T) = self.pages.model, tokens_BT.shape
        if T not in self._buffers:
            given_BT = torch.zeros(self.padded, T, dtype=torch.int64, device=model.device)
            width = model.vocabulary.table.shape[1]
            hidden_BTD = torch.zeros(self.padded, T, width, dtype=model.dtype, device=model.device)
            self._buffers[T] = self.pages.step_buffers(self.padded, T, is_clean=True), given_BT, hidden_BTD
        steps, given_BT, hidden_BTD = self._buffers[T]
        rows = [*rows, *[self.pages.stand_in(0, T)] * self.graphs.padding(B)]
        key, padded = steps.load(rows), slice(len(rows))
        given_BT[:B] = tokens_BT

        def encode() -> None:
            hidden_BTD[padded] = steps.encode(given_BT[padded])

        self.graphs.run((len(rows), ("encode", T), key), encode)
        return hidden_BTD[:B].clone()  # a sequence keeps the last one


class Encoding:
    """Encodes chunks of sequences. tokens: the number of tokens encoded so far, padding included.

    captured: the captured call that verifies drafts (None: none is captured).
    """

    def __init__(self, pages: Pages):
        self.pages, self.tokens = pages, 0
        self.captured: CapturedEncode | None = None

    def encode(self, chunks: abc.Sequence[Chunk]) -> list[Sequence]:
        """Encode chunks, and score the tokens of sequences that ask for scores.

        Returns the sequences whose encoded tokens the next-token head must verify before they are accepted.
        """
        waiting = list["Sequence"]()
        for call in self._batches(self._with_features(chunks)):
            counts = [count for _, count in call]
            parts = [sequence.token_ids[(start := sequence.num_computed) : start + count] for sequence, count in call]
            width = max(counts)
            tokens_BT = torch.tensor([part + [0] * (width - len(part)) for part in parts])
            rows = [sequence.paged for sequence, _ in call if sequence.paged is not None]
            images = [sequence.placed_images(sequence.num_computed, count) for sequence, count in call]
            captured = self.captured if self.captured is not None and self.captured.takes(call) else None
            hidden_BTD = self.pages.encode(rows, tokens_BT, counts, images=images, call=captured)
            self.tokens += width * (len(call) + (0 if captured is None else captured.graphs.padding(len(call))))
            for (sequence, count), hidden_TD in zip(call, hidden_BTD, strict=True):
                sequence.hidden_TD = hidden_TD[:count]
                sequence.calls[sequence.round.forward] += 1
                if sequence.round.awaits_head(sequence):
                    waiting.append(sequence)
                else:
                    accept(sequence, sequence.num_computed, self.pages)
        return waiting

    def _with_features(self, chunks: abc.Sequence[Chunk]) -> abc.Sequence[Chunk]:
        """Compute the features of all images of the chunks in one call, and return the chunks that can be encoded.

        If the model has no image tensors, all sequences with images get an error and are left out.
        """
        images = [placed.image for each, count in chunks for placed in each.placed_images(each.num_computed, count)]
        if not images:
            return chunks
        try:
            with_image_side(self.pages.model.encoder)
        except CheckpointError as error:
            for sequence in [sequence for sequence, _ in chunks if sequence.images]:
                sequence.error = str(error)
            return [(sequence, count) for sequence, count in chunks if not sequence.images]
        self.pages.images.of(images)
        return chunks

    def _batches(self, chunks: abc.Sequence[Chunk]) -> abc.Iterator[list[Chunk]]:
        """Yield the chunks of each call, grouped by length so that at most half of a row is padding."""
        call: list[Chunk] = []
        for chunk in sorted(chunks, key=lambda chunk: -chunk[1]):
            if call and 2 * chunk[1] < call[0][1]:
                yield call
                call = []
            call.append(chunk)
        if call:
            yield call


def accept(sequence: Sequence, end: int, pages: Pages) -> None:
    """Accept a sequence's encoded tokens before column `end`, and drop the encoded ones after it."""
    row, hidden_TD, sequence.hidden_TD = sequence.paged, sequence.hidden_TD, None
    assert row is not None and hidden_TD is not None
    start, end = row.accepted, min(end, len(sequence.token_ids))
    if row.length > end:
        pages.truncate(row, end)
    pages.accept(row)
    hidden_TD = hidden_TD[: end - start]
    if sequence.is_scored:
        _score(sequence, start, hidden_TD, pages.model)
    elif sequence.round.head is not None and len(hidden_TD):
        sequence.last_hidden_D = hidden_TD[-1]


def score_end(sequence: Sequence, model: BlockDiffusionModel) -> None:
    """Score the last token of an ended response whose other tokens are all encoded."""
    is_ended = sequence.finish_reason is not None and sequence.error is None
    if is_ended and sequence.is_scored and not sequence.num_uncomputed:
        assert sequence.last_hidden_D is not None
        _score(sequence, sequence.num_computed, sequence.last_hidden_D[None, :][:0], model)


def _score(sequence: Sequence, start: int, hidden_TD: Tensor, model: BlockDiffusionModel) -> None:
    """Score the tokens from column `start` to the one after `hidden_TD`, each by the hidden state before it.

    A sequence that is encoded again keeps its scores and adds only new ones.
    """
    end, before_D = start + len(hidden_TD), sequence.last_hidden_D
    if len(hidden_TD):
        sequence.last_hidden_D = hidden_TD[-1]
    scored = sequence.logprobs = sequence.logprobs or []
    first = max(sequence.first_scored + len(scored), start)
    prompt = len(sequence.prompt_tokens)
    tokens = sequence.prompt_tokens[first : end + 1]
    tokens += sequence.tokens[max(0, first - prompt) : max(0, end + 1 - prompt)]
    if tokens:
        before_D = before_D if first == start else hidden_TD[first - start - 1]
        assert before_D is not None
        tokens_T = torch.tensor(tokens, device=hidden_TD.device)
        after_TD = hidden_TD[first - start :]
        logprobs_T, _ = next_token_logprobs(model, before_D, after_TD, tokens_T)
        scored += logprobs_T.tolist()
        if count := sequence.request.top_logprobs:
            before_TD = torch.cat([before_D[None], after_TD[: len(tokens) - 1]])
            sequence.top_logprobs += model.vocabulary.likeliest(before_TD, count)
