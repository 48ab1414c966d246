"""What the engine encodes: pieces of prompts and committed canvases go into pages, and are scored where asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.sampling.scheduler import Row
from blockdiff.sampling.scores import next_token_logprobs

if TYPE_CHECKING:
    from blockdiff.models.pages import Pages
    from blockdiff.sampling.context import Context


class Encoding:
    """Encodes pieces of rows; exact: each in a call of its own. tokens: how many it has encoded, padding included."""

    def __init__(self, context: Context, pages: Pages, exact: bool):
        self.context, self.pages, self.exact, self.tokens = context, pages, exact, 0

    def encode(self, pieces: Sequence[tuple[Row, int]]) -> None:
        """Encode pieces of rows, each a row and how many of its tokens, and score what is to be scored."""
        for call in self._calls_of(pieces):
            counts, starts = [count for _, count in call], [row.length for row, _ in call]
            width = max(counts)
            tokens = [
                row.known[start : start + count] + [0] * (width - count)
                for (row, count), start in zip(call, starts, strict=True)
            ]
            rows = [row.paged for row, _ in call if row.paged is not None]
            hidden_BTD = self.pages.encode(rows, torch.tensor(tokens), counts)
            self.tokens += width * len(call)
            self._encode_others(call)
            for (row, count), start, hidden_TD in zip(call, starts, hidden_BTD, strict=True):
                if row.asked.is_scored:
                    self.score(row, start, hidden_TD[:count])
                elif self.context.is_next_token and count:
                    row.before_D = hidden_TD[count - 1]

    def _encode_others(self, call: Sequence[tuple[Row, int]]) -> None:
        """Encode for guided rows what their prefixes without the prompt have now: bos once, then the same canvases."""
        for row, count in call:
            if row.other is None or row.length < len(row.asked.prompt_tokens):
                continue
            tokens = row.known[row.length - count : row.length] if row.other.length else [self.context.bos_id or 0]
            assert row.other.length in (0, 1 + row.length - count - len(row.asked.prompt_tokens))
            self.pages.encode([row.other], torch.tensor([tokens]), [len(tokens)])

    def _calls_of(self, pieces: Sequence[tuple[Row, int]]) -> Iterator[list[tuple[Row, int]]]:
        """Pieces that are encoded together: of similar length, so that little of a call is padding."""
        call: list[tuple[Row, int]] = []
        for piece in sorted(pieces, key=lambda piece: -piece[1]):
            if call and (self.exact or 2 * piece[1] < call[0][1]):
                yield call
                call = []
            call.append(piece)
        if call:
            yield call

    def score(self, row: Row, start: int, hidden_TD: Tensor) -> None:
        """Score the tokens of a response that the tokens encoded from column `start` on, and the one before, predict.

        A row that is encoded again is scored on from where it was.
        """
        asked, prompt, end = row.asked, len(row.asked.prompt_tokens), start + len(hidden_TD)
        known = asked.logprobs = asked.logprobs or []
        before_D, row.before_D = row.before_D, hidden_TD[-1] if len(hidden_TD) else row.before_D
        first = max(prompt + len(known), start)
        tokens = asked.tokens[first - prompt : max(0, end + 1 - prompt)]
        if tokens:
            before_D = before_D if first == start else hidden_TD[first - start - 1]
            assert before_D is not None
            tokens_T = torch.tensor(tokens, device=hidden_TD.device)
            scored = next_token_logprobs(self.context.model, before_D, hidden_TD[first - start :], tokens_T)
            known += scored[0].tolist()
