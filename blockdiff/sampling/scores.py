"""Scores of texts by the model's own next-token predictions.

The encode pass is causal and its next-token loss is trained together with the denoising loss, so the hidden state of
every clean token predicts the token after it. A sum of such log-probabilities is exact, but only as useful as the
model's next-token loss is low. The scores of a model trained without that loss (`objective.ar_loss: none`) mean
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from blockdiff.errors import BlockdiffError
from blockdiff.models.family import NO_HEAD
from blockdiff.sampling.request import Result

if TYPE_CHECKING:
    from blockdiff.models.model import BlockDiffusionModel

CHUNK = 2048  # columns that one encode takes: the memory of a long text's hidden states


@dataclass(frozen=True)
class Score:
    """The log-probabilities of some tokens after a context, by next-token prediction.

    logprobs: of each token given all before it, in nats; is_greedy: whether each is the most probable one there.
    """

    logprobs: list[float]
    is_greedy: bool

    @property
    def total(self) -> float:
        """The log-probability of all tokens together."""
        return sum(self.logprobs)

    @property
    def mean(self) -> float:
        """The log-probability per token; 0 for no tokens."""
        return self.total / max(1, len(self.logprobs))


def next_token_logprobs(
    model: BlockDiffusionModel, before_D: Tensor, hidden_TD: Tensor, tokens_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of each token given all before it, fp32 [T], and the likeliest tokens, int64 [T].

    before_D: the hidden state of the token before the first one; hidden_TD: the hidden states of the tokens, of which
    the last is not needed ([T - 1, D] is enough).
    """
    hidden_TD = torch.cat([before_D[None], hidden_TD[: len(tokens_T) - 1]])
    loss_T, argmax_T = model.vocabulary.scores(hidden_TD, tokens_T)
    return -loss_T, argmax_T


@torch.no_grad()
def score(
    model: BlockDiffusionModel,
    contexts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    batch_size: int = 32,
) -> list[Score]:
    """Score each continuation after its context, in order; rows of similar length are encoded together.

    Every context needs at least one token (such as bos), else ValueError is raised; a continuation may be empty.
    Source: the definition, log p(y | x) = sum_i log p(y_i | x, y_<i). Raises BlockdiffError for a model without a
    next-token head.
    """
    if not model.config.predicts_next_tokens:
        raise BlockdiffError(f"scores: {NO_HEAD}; ask it for answers, which canvases give")
    pairs = [(list(a), list(b)) for a, b in zip(contexts, continuations, strict=True)]
    if any(not context for context, _ in pairs):
        raise ValueError("a context needs at least one token, such as bos")
    order = sorted(range(len(pairs)), key=lambda row: len(pairs[row][0]) + len(pairs[row][1]))
    scores = [Score([], True)] * len(pairs)
    for first in range(0, len(order), batch_size):
        places = [row for row in order[first : first + batch_size] if pairs[row][1]]
        if places:
            for index, result in zip(places, _scores([pairs[row] for row in places], model), strict=True):
                scores[index] = result
    return scores


def best(answers: Sequence[Result]) -> Result:
    """Return the answer with the highest mean log-probability per token, the earliest of equal ones.

    Answers with the same tokens are equal, whatever the rounding of their scores. Failed answers, and those with
    unscored tokens, come last.

    The mean is used because by the sum the shortest answer would win, and an empty one always.
    """

    def mean(answer: Result) -> float:
        is_whole = answer.score is not None and len(answer.logprobs or ()) == len(answer.tokens)
        is_whole &= answer.finish_reason not in ("error", "cancelled")
        return answer.score if is_whole and answer.score is not None else -inf

    likeliest = max(answers, key=mean)
    same_tokens = (each for each in answers if each.tokens == likeliest.tokens and mean(each) > -inf)
    return next(same_tokens, likeliest)


def _scores(pairs: list[tuple[list[int], list[int]]], model: BlockDiffusionModel) -> list[Score]:
    """Score one batch: all tokens except the last are encoded, in chunks of columns."""
    rows = [[*context, *continuation] for context, continuation in pairs]
    width, device = max(map(len, rows)), model.device
    tokens_BS = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
    end_B = torch.tensor([len(row) - 1 for row in rows], device=device)
    # The column before a continuation is the first that predicts a token of it.
    start_B = torch.tensor([len(context) - 1 for context, _ in pairs], device=device)
    column_S = torch.arange(width - 1, device=device)
    is_scored_BS = (column_S >= start_B[:, None]) & (column_S < end_B[:, None])
    logprobs, is_best, prefix = [], [], None
    for start in range(0, width - 1, CHUNK):
        now = slice(start, min(start + CHUNK, width - 1))
        prefix = model.encode(tokens_BS[:, now], (end_B - start).clamp(0, now.stop - start), prefix)
        is_scored = is_scored_BS[:, now]
        targets_N = tokens_BS[:, 1:][:, now][is_scored]
        loss_N, argmax_N = model.vocabulary.scores(prefix.hidden[is_scored], targets_N)
        logprobs.append(loss_N.new_zeros(is_scored.shape).masked_scatter(is_scored, -loss_N))
        is_best.append(torch.ones_like(is_scored).masked_scatter(is_scored, argmax_N == targets_N))
    logprobs_BS, is_greedy_B = torch.cat(logprobs, 1), torch.cat(is_best, 1).all(1)
    return [
        Score(logprobs_BS[row, len(context) - 1 : len(context) - 1 + len(continuation)].tolist(), is_greedy)
        for row, ((context, continuation), is_greedy) in enumerate(zip(pairs, is_greedy_B.tolist(), strict=True))
    ]
