"""Verification: drafts of canvases against the tokens that next-token sampling writes in their places.

A draft is encoded behind its row's tokens without being accepted. Each hidden state predicts the token after it, and
the head draws that token with the very number, and under the very control, with which next-token sampling draws it. The
draft's tokens stand as far as they are those; the first that differs is replaced by the head's. So whatever drafts, the
response has the tokens of next-token sampling with the same seed: a drafted token x stands with probability p(x), and
what replaces it has the distribution p without x.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.sampling.canvas_control import FREE, CanvasControl, grouped
from blockdiff.sampling.predict import StepInputs, predict
from blockdiff.sampling.strategies import head_of
from blockdiff.sampling.trace import Verification
from blockdiff.seeding import Stream, uniform

if TYPE_CHECKING:
    from blockdiff.models.family import BlockDiffusionModel
    from blockdiff.sampling.sequence import Sequence
    from blockdiff.sampling.settings import SamplingSettings


@dataclass
class Drafting:
    """The course of the canvas that a sequence drafts and verifies.

    tokens: those of the last round, of which the first `given` stand and the others are where the next draft starts;
    before the first round none, or the one that the verification of the canvas before has added. rounds: verifications
    so far; steps: denoising steps so far. unverified: denoising steps of the draft that stands at the end of the
    sequence's token_ids until it is verified, 0 where none does; step: the number of the last of them.
    """

    tokens: list[int] = field(default_factory=list)
    given: int = 0
    rounds: int = 0
    steps: int = 0
    unverified: int = 0
    step: int = 0

    @classmethod
    def after(cls, verification: Verification) -> Drafting:
        """The course of the next canvas, with the token that a verification of the whole canvas before has added."""
        own = verification.own
        return cls() if own is None or verification.accepted < len(verification.draft) else cls([own], given=1)

    def control(
        self, own: CanvasControl | None, settings: SamplingSettings, device: torch.device
    ) -> CanvasControl | None:
        """The control of the next round's canvas: the request's own, with the tokens that stand pinned.

        The rest of the last draft is what the canvas starts from. Under mask noise it is masks, because tokens that a
        canvas starts from would never change.
        """
        if not self.tokens:
            return own
        length = settings.canvas_length
        tokens_L = torch.tensor(self.tokens + [FREE] * (length - len(self.tokens)), device=device)
        own = own or CanvasControl(torch.full_like(tokens_L, FREE)[None])
        is_given_L = torch.arange(length, device=device) < self.given
        pinned_BL, start_BL = tokens_L.where(is_given_L, own.pinned_BL), tokens_L[None]
        return replace(own, pinned_BL=pinned_BL, start_BL=start_BL if settings.diffusion.mask_id is None else None)

    def add(self, verification: Verification) -> None:
        """Take note of a round's verification."""
        self.tokens, self.given = list(verification.draft), verification.accepted
        if self.given < len(self.tokens):
            assert verification.own is not None
            self.tokens[self.given] = verification.own
            self.given += 1
        self.rounds, self.steps = self.rounds + 1, self.steps + self.unverified


def verify(
    model: BlockDiffusionModel, settings: SamplingSettings, drafts: abc.Sequence[tuple[Sequence, Tensor]]
) -> list[Verification | None]:
    """The verification of each sequence's draft, by its hidden states [L, D]; None where logits are not finite.

    The draft is the end of the sequence's token_ids; `last_hidden_D` is the hidden state of the token before it.
    """
    length, mask_id = settings.canvas_length, settings.diffusion.mask_id
    hidden, shapes, draws, controls, counts = list[Tensor](), [], list[Tensor](), list[CanvasControl | None](), []
    for sequence, hidden_LD in drafts:
        head, drafting, number = head_of(sequence.strategy), sequence.drafting, len(sequence.steps)
        assert head is not None and drafting is not None and sequence.last_hidden_D is not None
        end = length + (number + 1 < sequence.canvases)  # the token after the canvas is the first of the next one
        first, count = number * length + drafting.given, end - drafting.given
        hidden.append(torch.cat([sequence.last_hidden_D[None], hidden_LD])[drafting.given : end])
        shapes += [head.shape(0, 1)] * count
        places = torch.arange(first, first + count, device=model.device)
        draws.append(uniform(sequence.seed, Stream.SAMPLE, (places, 0), 1))
        controls += head_controls(sequence, drafting.given, count)
        counts.append(count)
    inputs = StepInputs(
        hidden_BLD=torch.cat(hidden)[:, None],
        tokens_BL=torch.full((len(shapes), 1), mask_id or 0, device=model.device),
        temperature=torch.tensor([shape.temperature for shape in shapes], device=model.device),
        uniform_BL=torch.cat(draws),
        step_B=torch.zeros(len(shapes), dtype=torch.int64, device=model.device),
    )
    stats = predict(model, inputs, grouped(controls), shapes, mask_id, settings.diffusion.prediction)
    columns = stats.argmax, stats.sample, stats.entropy.isfinite().long()
    found = torch.cat(columns, -1).cpu().split(counts)
    return [_compared(sequence, *part.T.tolist()) for (sequence, _), part in zip(drafts, found, strict=True)]


def head_controls(sequence: Sequence, given: int, count: int) -> abc.Sequence[CanvasControl | None]:
    """The control of `count` tokens from the place `given` of the draft on, as next-token sampling has it.

    One None stands for each token of a sequence without control.
    """
    control = sequence.control
    if control is None or control.classes is None:
        return [None] * count
    return [control.next_tokens(len(sequence.steps), sequence.draft, given, count, sequence.seed)]


def _compared(sequence: Sequence, likeliest: list[int], drawn: list[int], is_finite: list[int]) -> Verification | None:
    """A draft beside the head's tokens in the places that did not stand before, and perhaps in the one after it."""
    head, drafting, draft = head_of(sequence.strategy), sequence.drafting, sequence.draft
    assert head is not None and drafting is not None
    own, fresh = drawn if head.temperature else likeliest, draft[drafting.given :]
    agreed = next((n for n, token in enumerate(fresh) if token != own[n]), len(fresh))
    if not all(is_finite[: agreed + 1]):
        return None
    following = own[agreed] if agreed < len(own) else None
    number, given = len(sequence.steps), drafting.given
    return Verification(sequence.id, number, drafting.step, draft, given, given + agreed, following)
