"""Sampling by a race: of all tokens that one wins whose exponential clock, of the rate of its probability, rings first.

The winner has the distribution that the race runs for: argmax over tokens of p / E with E from Exponential(1), or, by
logarithms, of z / T plus Gumbel noise. It takes a random number for each token, where `token_stats` takes one for all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from blockdiff.kernels.vocabulary.logits import chunk_rows, logits
from blockdiff.kernels.vocabulary.shaping import Shaping, is_left
from blockdiff.kernels.vocabulary.torch import is_forbidden_by
from blockdiff.seeding import Stream, words

WORDS = 8  # so many times a chunk's logits is what drawing its numbers needs


@torch.no_grad()
def race(
    hidden_ND: Tensor,
    table_VD: Tensor,
    softcap: float | None,
    temperature_N: Tensor | float,
    uniform_N: Tensor,
    allowed_NW: Tensor | None = None,
    shaping: Shaping | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """The winner of every row's race, int64 [N], and its z / T + Gumbel noise, fp32 [N] (-inf: no token was allowed).

    uniform_N: multiples of 2^-24 in [0, 1), each of which is the seed of its row's noise; first: the token of the
    table's first row, where it is a part: the winner of all parts is the one of the highest score. The other arguments
    are those of `token_stats`; of shapings there are filters only (ValueError).
    """
    if shaping is not None and shaping != Shaping(shaping.top_k, shaping.top_p, shaping.min_p):
        raise ValueError("a race goes with top_k, top_p and min_p; corrections need the other way to draw")
    N, V = len(hidden_ND), len(table_VD)
    token_N = torch.zeros(N, dtype=torch.int64, device=hidden_ND.device)
    score_N = torch.full((N,), -torch.inf, device=hidden_ND.device)
    size = max(1, chunk_rows(hidden_ND, V) // WORDS)
    for rows in (slice(lo, lo + size) for lo in range(0, N, size)):
        z = logits(hidden_ND[rows], table_VD, softcap).float()
        if allowed_NW is not None:
            z.masked_fill_(is_forbidden_by(allowed_NW[rows], V), -torch.inf)
        z.div_(temperature_N[rows, None] if isinstance(temperature_N, Tensor) else temperature_N)
        if shaping is not None and shaping.has_filters:
            z.masked_fill_(~is_left(z, shaping.top_k, shaping.top_p, shaping.min_p), -torch.inf)
        score_N[rows], token_N[rows] = z.add_(gumbel(uniform_N[rows], first, V)).max(-1)
    return token_N + first, score_N


def gumbel(uniform_N: Tensor, first: int, count: int) -> Tensor:
    """The noise of `count` tokens from `first` on, fp32 [N, count]: -log of Exponential(1) numbers."""
    seed_N = (uniform_N.double() * 2**24).long()
    drawn = words(seed_N, Stream.RACE, (), first + count)[:, first:]
    exponential = (drawn.double() + 0.5).mul_(2.0**-32).log_().neg_()  # of numbers in (0, 1)
    return exponential.log_().neg_().float()
