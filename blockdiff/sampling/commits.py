"""Commits: tokens that stand join the response, with the events that say so and what the pages keep of them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from blockdiff.sampling.drafts import BlockDraft, CanvasDraft
from blockdiff.sampling.trace import CommittedCanvas, Verification

if TYPE_CHECKING:
    from blockdiff.sampling.encoding import Encoding
    from blockdiff.sampling.sequence import Sequence
    from blockdiff.sampling.settings import SamplingSettings


class Commits:
    """Commits tokens of sequences: those of a finished canvas, or what stands of a draft after its verification."""

    def __init__(self, encoding: Encoding, settings: SamplingSettings):
        self.encoding, self.settings = encoding, settings

    def settle(self, sequence: Sequence, verification: Verification) -> None:
        """Commit what a verified draft gives: of a drafter's tokens those that stand, a canvas once all of it does."""
        draft, proposal, own = sequence.draft, sequence.retract(), verification.own
        stands = len(sequence.token_ids) + verification.accepted
        if isinstance(draft, BlockDraft):
            assert own is not None
            draft.note(verification)
            kept = self.commit(sequence, [*verification.draft[: verification.accepted], own], 1)
            sequence.count_places(verification, kept)
            self.encoding.accept(sequence, stands)
            return
        assert draft is not None
        draft.take(verification, proposal.steps)
        if not self._can_commit(sequence, draft.standing):
            self.encoding.accept(sequence, len(sequence.token_ids))
            return
        # without what is behind the end of a response, which nobody has verified
        sequence.draft = following = CanvasDraft.after(verification)
        self.commit(sequence, draft.standing, draft.steps)
        self.encoding.accept(sequence, stands)
        if sequence.finish_reason is None and self._can_commit(sequence, following.tokens):
            sequence.draft = CanvasDraft()
            self.commit(sequence, following.tokens, 0)

    def _can_commit(self, sequence: Sequence, verified: list[int]) -> bool:
        """True where tokens that stand are a whole canvas, or end the response."""
        return len(verified) == self.settings.canvas_length or sequence.would_end(verified, self.settings)

    def commit(self, sequence: Sequence, tokens: list[int], steps: int) -> int:
        """Add any number of tokens to the response, and to the token_ids where the next canvas or scores need them.

        Returns how many of them the response keeps.
        """
        number = len(sequence.steps)
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
            if kept == 1 and sequence.hidden_TD is None and sequence.last_hidden_D is not None:  # nothing is encoded
                self.encoding.score(sequence, sequence.num_computed, sequence.last_hidden_D[None, :][:0])
        return kept


def _text(settings: SamplingSettings, tokens: list[int], count: int) -> str:
    """The text of the first tokens of a response."""
    return settings.text(tokens[:count])
