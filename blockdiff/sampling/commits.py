"""Commits: tokens that stand join the response, with the events that say so and what the pages keep of them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from blockdiff.sampling.drafts import BlockDraft, CanvasDraft
from blockdiff.sampling.trace import CommittedCanvas, Verification

if TYPE_CHECKING:
    from torch import Tensor

    from blockdiff.sampling.encoding import Encoding
    from blockdiff.sampling.sequence import Sequence
    from blockdiff.sampling.settings import SamplingSettings


class Commits:
    """Commits tokens of sequences: those of a finished canvas, or what stands of a draft after its verification."""

    def __init__(self, encoding: Encoding, settings: SamplingSettings):
        self.encoding, self.settings = encoding, settings

    def settle(self, sequence: Sequence, verification: Verification, start: int, hidden_TD: Tensor) -> None:
        """Commit what a verified draft gives: of a drafter's tokens those that stand, a canvas once all of it stands.

        hidden_TD: of the tokens from column `start` on that were encoded with the draft.
        """
        draft, proposal, own = sequence.draft, sequence.retract(), verification.own
        hidden_TD = hidden_TD[: len(sequence.token_ids) - start + verification.accepted]
        if isinstance(draft, BlockDraft):
            assert own is not None
            draft.note(verification)
            standing = [*verification.draft[: verification.accepted], own]
            kept = self.commit(sequence, standing, 1, hidden_TD, start)
            sequence.count_places(verification, kept)
            return
        assert draft is not None
        draft.take(verification, proposal.steps)
        if not self._can_commit(sequence, draft.standing):
            self.encoding.accept(sequence, start, hidden_TD[:0])
            return
        # without what is behind the end of a response, which nobody has verified
        sequence.draft = following = CanvasDraft.after(verification)
        self.commit(sequence, draft.standing, draft.steps, hidden_TD, start)
        if sequence.finish_reason is None and self._can_commit(sequence, following.tokens):
            sequence.draft = CanvasDraft()
            self.commit(sequence, following.tokens, 0, hidden_TD[:0])

    def _can_commit(self, sequence: Sequence, verified: list[int]) -> bool:
        """True where tokens that stand are a whole canvas, or end the response."""
        return len(verified) == self.settings.canvas_length or sequence.would_end(verified, self.settings)

    def commit(
        self,
        sequence: Sequence,
        tokens: list[int],
        steps: int,
        hidden_TD: Tensor | None = None,
        start: int | None = None,
    ) -> int:
        """Add any number of tokens to the response, and to the token_ids where the next canvas or scores need them.

        hidden_TD: of verified tokens the hidden states of the first ones, which stand in the pages from column `start`
        on (None: behind the tokens before). Returns the number of tokens added, up to the end of the response.
        """
        number, start = len(sequence.steps), len(sequence.token_ids) if start is None else start
        kept = sequence.commit(tokens, steps, self.settings.generation.eos_ids)
        kept -= sequence.stop(kept, self.settings.text)
        if sequence.error is not None:
            return kept
        committed = CommittedCanvas.undecoded(
            functools.partial(_text, self.settings, sequence.tokens, len(sequence.tokens)),
            id=sequence.id,
            canvas=number,
            prompt=sequence.prompt,
            tokens=tokens,
            kept=kept,
            steps=steps,
            finish_reason=sequence.finish_reason,
            max_steps=sequence.max_steps,
            control=sequence.request.control_in_words,
        )
        sequence.events.append((sequence, committed))
        if sequence.finish_reason is None:
            sequence.token_ids += tokens
        elif sequence.is_scored:  # the last token predicts nothing
            sequence.token_ids += tokens[: kept - 1]
            if kept == 1 and hidden_TD is None and sequence.last_hidden_D is not None:
                hidden_TD = sequence.last_hidden_D[None, :][:0]
        if hidden_TD is not None:
            self.encoding.accept(sequence, start, hidden_TD[: len(sequence.token_ids) - start])
        return kept


def _text(settings: SamplingSettings, tokens: list[int], count: int) -> str:
    """The text of the first tokens of a response."""
    return settings.text(tokens[:count])
