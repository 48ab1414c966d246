"""Sampling by a race against its formula: the winners, their distribution, filters, and a table in parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Shaping, pack_allowed, race
from blockdiff.kernels.vocabulary.shaping import is_left
from blockdiff.seeding import Stream, words
from tests.oracles import vocabulary as reference

pytestmark = pytest.mark.quick


def case(N: int, V: int, D: int = 8) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a table, a temperature of each row, and uniform numbers of 24 bits."""
    draw = torch.Generator().manual_seed(N + V)
    hidden, table = torch.randn(N, D, generator=draw), torch.randn(V, D, generator=draw)
    return hidden, table, torch.linspace(0.2, 2.0, N), torch.rand(N, generator=draw)


def exponentials(uniform_N: Tensor, V: int) -> Tensor:
    """An Exponential(1) number for each row and token: the n-th word of the row's seed as a number in (0, 1)."""
    return torch.stack([
        -torch.log((words(int(u * 2**24), Stream.RACE, (), V).double() + 0.5) / 2**32) for u in uniform_N
    ])  # fmt: skip


@pytest.mark.parametrize("softcap", [5.0, None])
@pytest.mark.parametrize("N,V", [(1, 3), (40, 101)])
def test_the_winner_is_the_token_of_the_highest_p_over_e_with_a_temperature_per_row(N, V, softcap):
    hidden, table, temperature, uniform = case(N, V)
    p = reference.log_probabilities(hidden, table, softcap, temperature).double().exp()
    token, score = race(hidden, table, softcap, temperature, uniform)
    assert torch.equal(token, (p / exponentials(uniform, V)).argmax(-1))
    assert bool(score.isfinite().all())


def test_winners_have_the_distribution_of_the_softmax():
    hidden, table, _, _ = case(1, 6)
    n = 20_000
    uniform = torch.randperm(1 << 24, generator=torch.Generator().manual_seed(0))[:n] / 2**24
    token, _ = race(hidden.expand(n, -1), table, 30.0, 0.7, uniform)
    p = reference.log_probabilities(hidden, table, 30.0, torch.tensor([0.7])).exp()[0]
    counts = torch.bincount(token, minlength=6)
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 20.5  # 5 degrees of freedom, p = 0.001
    assert float(p.max()) < 0.9


def test_filters_and_masks_leave_the_others_out_of_the_race():
    N, V = 60, 101
    hidden, table, temperature, uniform = case(N, V)
    is_allowed = torch.rand(N, V, generator=torch.Generator().manual_seed(1)) < 0.3
    is_allowed[:, 7] = True
    z = reference.logits(hidden, table, None) / temperature[:, None]
    e = exponentials(uniform, V)
    for filters in ((3, 1.0, 0.0), (None, 0.6, 0.0), (None, 1.0, 0.2)):
        runs = z.masked_fill(~is_allowed, -torch.inf)
        runs = runs.masked_fill(~is_left(runs, *filters), -torch.inf)
        token, _ = race(hidden, table, None, temperature, uniform, pack_allowed(is_allowed), Shaping(*filters))
        assert torch.equal(token, (runs.double().softmax(-1) / e).argmax(-1))
    token, _ = race(hidden, table, None, temperature, uniform, shaping=Shaping(top_k=1))
    assert torch.equal(token, z.argmax(-1))
    with pytest.raises(ValueError, match="a race goes with top_k, top_p and min_p"):
        race(hidden, table, None, 1.0, uniform, shaping=Shaping(observed_N=torch.zeros(50), bonus_N=torch.zeros(50)))


def test_the_winner_of_parts_of_the_table_is_that_of_all():
    hidden, table, temperature, uniform = case(50, 101)
    whole, best = race(hidden, table, 30.0, temperature, uniform)
    first, parts = 0, []
    for part in table.split((40, 1, 60)):
        parts.append(race(hidden, part, 30.0, temperature, uniform, first=first))
        first += len(part)
    token, score = (torch.stack(column) for column in zip(*parts, strict=True))
    assert torch.equal(token.gather(0, score.argmax(0)[None])[0], whole)
    torch.testing.assert_close(score.amax(0), best)
