"""Statistics of classes of tokens against their reference: sums, maxima, draws, penalties, memory."""

from __future__ import annotations

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from blockdiff.kernels.tiles import Tile
from blockdiff.kernels.vocabulary import Classes, Penalty, logits, triton, triton_classes
from blockdiff.kernels.vocabulary import torch as in_torch
from tests.oracles import vocabulary as reference

pytestmark = pytest.mark.quick
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[in_torch, triton], ids=["torch", "triton"])
def ops(request):
    return request.param


def case(N: int, V: int, D: int, count: int):
    g = torch.Generator().manual_seed(N + V + D)
    hidden, table = torch.randn(N, D, generator=g), torch.randn(V, D, generator=g) * 3
    class_V = torch.randint(0, count + 1, (V,), generator=g)
    class_V[torch.randperm(V, generator=g)[:count]] = torch.arange(count)  # none is empty
    return tuple(x.to(DEVICE) for x in (hidden, table, class_V, torch.rand(N, generator=g)))


@pytest.mark.parametrize(
    "N,V,D,count,rows,softcap",
    [(1, 3, 4, 1, 9, 30.0), (23, 101, 16, 7, 5, None), (9, 1000, 31, 20, 1000, 30.0), (3, 4000, 8, 2, 2, None)],
)
def test_classes_match_the_reference(ops, softcap, N, V, D, count, rows, monkeypatch):
    for name in ("CHUNK_BYTES", "CPU_BYTES"):
        monkeypatch.setattr(logits, name, rows * 4 * V)
    hidden, table, class_V, uniform = case(N, V, D, count)
    temperature = torch.linspace(0.05, 2.0, N, device=DEVICE)
    stats = ops.class_stats(hidden, table, softcap, temperature, uniform, Classes.of(class_V, count))
    z = reference.logits(hidden.double(), table.double(), softcap) / temperature[:, None].double()
    log_sum, maximum, argmax, entropy = reference.class_stats(z, class_V, count)
    for mine, truth in ((stats.log_sum, log_sum), (stats.maximum, maximum)):
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(stats.entropy, entropy, rtol=1e-4, atol=2e-4)
    assert (stats.argmax == argmax).float().mean() > 0.99, "but for ties within rounding"
    of_sample = z.gather(1, stats.sample) - log_sum
    torch.testing.assert_close(stats.log_probability, of_sample, rtol=1e-4, atol=1e-3)
    ids = torch.arange(count, device=DEVICE)
    assert (class_V[stats.sample] == ids).all() and (class_V[stats.argmax] == ids).all()
    plain = ops.token_stats(hidden, table, softcap, temperature, uniform)
    assert torch.equal(stats.soft_embedding, plain.soft_embedding), "the signal is the model's own"


def test_draws_within_a_class_have_its_probabilities(ops, monkeypatch):
    monkeypatch.setattr(triton_classes, "TILE", Tile(2, 2, warps=4))  # a class of more tokens than a program takes
    n, V = 40_000 if ops is in_torch else 80, 24
    hidden, table, class_V, _ = case(1, V, 4, 3)
    classes = Classes.of(class_V, 3)
    uniform = (torch.arange(n, device=DEVICE) + 0.5) / n
    stats = ops.class_stats(hidden.expand(n, -1), table, None, 3.0, uniform, classes)
    p = (hidden @ table.T / 3.0)[0].exp()
    for place in range(3):
        truth = torch.where(class_V == place, p, 0.0)
        drawn = stats.sample[:, place].bincount(minlength=V) / n
        torch.testing.assert_close(drawn, truth / truth.sum(), atol=8 / n, rtol=0)


def test_one_class_of_all_tokens_is_what_token_stats_gives(ops):
    hidden, table, classes, uniform = case(50, 200, 8, 1)
    plain = ops.token_stats(hidden, table, 30.0, 0.7, uniform)
    stats = ops.class_stats(hidden, table, 30.0, 0.7, uniform, Classes.of(torch.zeros_like(classes), 1))
    assert torch.equal(stats.argmax[:, 0], plain.argmax) and torch.equal(stats.sample[:, 0], plain.sample)
    torch.testing.assert_close(stats.entropy[:, 0].float(), plain.entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(stats.log_probability[:, 0].float(), plain.log_probability, atol=1e-4, rtol=1e-5)


def test_ties_go_to_the_lower_id_and_an_edge_of_the_uniform_numbers_stays_within_its_class(ops, monkeypatch):
    monkeypatch.setattr(triton_classes, "TILE", Tile(2, 2, warps=4))  # equal tokens in several tiles
    table = torch.ones(12, 2, device=DEVICE)
    classes = Classes.of(torch.tensor([2, 1, 0, 1, 0, 2] * 2, device=DEVICE), 3)
    uniform = torch.tensor([0.0, 1 - 2**-24], device=DEVICE)
    stats = ops.class_stats(torch.ones(2, 2, device=DEVICE), table, None, 1.0, uniform, classes)
    assert stats.argmax.tolist() == [[2, 1, 0]] * 2 and stats.sample.tolist() == [[2, 1, 0], [10, 9, 11]]


def test_an_excluded_token_is_in_no_sum_not_even_the_soft_embedding(ops):
    hidden, table, _, uniform = case(5, 20, 8, 1)
    everything = torch.zeros(20, dtype=torch.int64, device=DEVICE)
    without = everything.clone()
    without[7] = 1
    stats = ops.class_stats(hidden, table, None, 1.0, uniform, Classes.of(without, 1), excluded=7)
    p = (hidden @ table.T).index_fill(1, torch.tensor([7], device=DEVICE), -torch.inf).softmax(-1)
    torch.testing.assert_close(stats.soft_embedding, p @ table, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(stats.entropy[:, 0].float(), torch.special.entr(p).sum(-1), atol=1e-5, rtol=1e-4)


def test_the_penalty_is_that_of_transformers(ops):
    hidden, table, _, uniform = case(6, 30, 8, 1)
    seen = [[3, 4, 4, 9], [0, 29, 17, 3]]
    seen_RV = torch.zeros(2, 30, dtype=torch.bool, device=DEVICE)
    for row, tokens in enumerate(seen):
        seen_RV[row, tokens] = True
    row_N = torch.tensor([0, 0, 1, 1, 0, 1], device=DEVICE)
    penalty = Penalty(seen_RV, torch.tensor([1.7, 1.7], device=DEVICE), row_N)
    classes = Classes.of(torch.arange(30, device=DEVICE), 30)
    stats = ops.class_stats(hidden, table, None, 0.8, uniform, classes, penalty)
    truth = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor(seen, device=DEVICE)[row_N], hidden @ table.T) / 0.8
    torch.testing.assert_close(stats.maximum.float(), truth, atol=1e-4, rtol=1e-5)
    plain = ops.token_stats(hidden, table, None, 0.8, uniform)
    assert torch.equal(stats.soft_embedding, plain.soft_embedding)


@pytest.mark.gpu
def test_bf16_classes_are_as_close_to_fp64_as_torch_in_bf16():
    g = torch.Generator().manual_seed(0)
    hidden, table = (torch.randn(n, 64, generator=g).cuda().bfloat16() for n in (257, 20_000))
    class_V = torch.randint(0, 31, (20_000,), generator=g).cuda()
    given = None, 0.6, torch.rand(257, generator=g).cuda(), Classes.of(class_V, 30)
    mine, torchs = (ops.class_stats(hidden, table, *given) for ops in (triton, in_torch))
    exact = in_torch.class_stats(hidden.double(), table.double(), *given)
    for name in ("log_sum", "maximum", "entropy"):
        x, y, truth = (getattr(stats, name) for stats in (mine, torchs, exact))
        assert (x - truth).norm() <= 1.2 * (y - truth).norm() + 1e-6 * truth.norm()
    assert (mine.argmax == torchs.argmax).float().mean() >= 0.98
