"""Verification: comparing drafts with the tokens that next-token sampling would write at their positions.

A draft is encoded behind its row's tokens without being accepted. Each hidden state predicts the token after it, and
the head draws that token with the same random number and under the same control as next-token sampling. The draft's
tokens are accepted up to the first mismatch, which the head's token replaces. So with any drafter the response has the
tokens of next-token sampling with the same seed: a drafted token x is accepted with probability p(x), and its
replacement has the distribution p without x.
"""

from __future__ import annotations

import functools
import itertools
from collections import abc
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.sampling.canvas_control import CanvasControl, grouped
from blockdiff.sampling.predict import PredictInputs, predict
from blockdiff.sampling.sequence import Proposal
from blockdiff.sampling.strategies import NextToken
from blockdiff.sampling.strategy import Shape
from blockdiff.sampling.trace import Verification
from blockdiff.seeding import Stream, signed, uniform

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel
    from blockdiff.sampling.sequence import Sequence
    from blockdiff.sampling.settings import SamplingSettings


def verify(
    model: BlockDiffusionModel, settings: SamplingSettings, sequences: abc.Sequence[Sequence]
) -> list[Verification | None]:
    """Verify each sequence's draft against the head's tokens; None if logits are not finite.

    The draft is the `proposal` at the end of the sequence's token_ids, and may be empty. Its hidden states are the last
    ones of `hidden_TD`. The hidden state of the token before it is there too if both were encoded in the same call,
    else in `last_hidden_D`. Tokens are drawn by their positions in the response.
    """
    mask_id, device = settings.diffusion.mask_id, model.device
    hidden, shapes, places = list[Tensor](), list[Shape](), list[range]()
    controls = list[CanvasControl | None]()
    for sequence in sequences:
        head, proposal = sequence.round.head, sequence.round.proposal or Proposal()
        hidden_TD = sequence.hidden_TD
        assert head is not None and hidden_TD is not None
        length, num_given = len(proposal.tokens), proposal.given
        first = len(sequence.tokens) + num_given
        end = min(len(sequence.tokens) + length + 1, sequence.max_tokens)  # the last one follows the draft
        if len(hidden_TD) == length:
            assert sequence.last_hidden_D is not None
            hidden_TD = torch.cat([sequence.last_hidden_D[None], hidden_TD])
        hidden.append(hidden_TD[len(hidden_TD) - length - 1 + num_given :][: end - first])
        shapes += [_shape(head)] * (end - first)
        controls += head_controls(sequence, proposal, end - first)
        places.append(range(first, end))
    inputs = PredictInputs(
        hidden_BLD=torch.cat(hidden)[:, None],
        tokens_BL=torch.full((len(shapes), 1), mask_id or 0, device=device),
        temperature=torch.tensor([shape.temperature for shape in shapes], device=device),
        uniform_BL=_draws(sequences, places, device),
        step_B=torch.zeros(len(shapes), dtype=torch.int64, device=device),
    )
    stats = predict(model, inputs, grouped(controls), shapes, mask_id)
    columns = stats.argmax, stats.sample, stats.entropy.isfinite().long()
    outcomes = iter(torch.cat(columns, -1).tolist())
    return [
        _compared(sequence, list(itertools.islice(outcomes, len(positions))))
        for sequence, positions in zip(sequences, places, strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _shape(head: NextToken) -> Shape:
    """Return the distribution that a head draws from; cached."""
    return head.shape(0, 1)


def _draws(sequences: abc.Sequence[Sequence], places: abc.Sequence[range], device: torch.device) -> Tensor:
    """Return the random numbers [N, 1] that draw the tokens at `places` of each response; zeros if no head draws."""
    heads = [sequence.round.head for sequence in sequences]
    if not any(head is not None and head.temperature for head in heads):
        return torch.zeros(sum(map(len, places)), 1, device=device)
    pairs = zip(sequences, places, strict=True)
    addresses = [(signed(sequence.seed), position) for sequence, positions in pairs for position in positions]
    seed_N, place_N = torch.tensor(addresses, device=device).unbind(1)
    return uniform(seed_N, Stream.SAMPLE, (place_N, 0), 1)


def head_controls(sequence: Sequence, proposal: Proposal, count: int) -> abc.Sequence[CanvasControl | None]:
    """Return the control of the `count` tokens after a proposal's given ones, as next-token sampling applies it.

    For a sequence without control, one None for each token.
    """
    control = sequence.control
    if control is None or control.classes is None:
        return [None] * count
    return [control.next_tokens(proposal.tokens, proposal.given, count, sequence.seed)]


def _compared(sequence: Sequence, outcomes: abc.Sequence[abc.Sequence[int]]) -> Verification | None:
    """Compare a draft with the head's tokens at its open positions, and perhaps at the position after it.

    outcomes: for each position the likeliest token, the drawn token, and whether the logits are finite. None if the
    logits up to the first mismatch are not finite.
    """
    head, proposal = sequence.round.head, sequence.round.proposal or Proposal()
    assert head is not None
    tokens, num_given = proposal.tokens, proposal.given
    choices, fresh = [drawn if head.temperature else likeliest for likeliest, drawn, _ in outcomes], tokens[num_given:]
    agreed = next((n for n, token in enumerate(fresh) if token != choices[n]), len(fresh))
    if not all(is_finite for *_, is_finite in outcomes[: agreed + 1]):
        return None
    following = choices[agreed] if agreed < len(choices) else None
    number = len(sequence.steps)
    return Verification(sequence.id, number, proposal.last_step, tokens, num_given, num_given + agreed, following)
