"""Filters of the distribution that is drawn from, in torch and in Triton, against dense logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Shaping, kernels_filters, logits, pack_allowed, shaping, triton
from blockdiff.kernels.vocabulary import torch as in_torch
from blockdiff.kernels.vocabulary import triton_launch as launch
from blockdiff.kernels.vocabulary.shaping import is_left
from blockdiff.kernels.vocabulary.torch import Stats
from tests.oracles import vocabulary as reference
from tests.support.peaks import peak_memory

pytestmark = pytest.mark.quick
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # of Triton

FILTERS = [(3, 1.0, 0.0), (None, 0.7, 0.0), (None, 1.0, 0.05), (7, 0.8, 0.1), (1, 0.5, 1.0), (500, 0.999, 1e-6)]


def logits_case(N: int, V: int, scale: float = 2.0) -> Tensor:
    """Rows of logits: sharp and flat, with equal ones, with many impossible ones, and with none but one possible."""
    z = torch.randn(N, V, generator=torch.Generator().manual_seed(N + V)) * torch.linspace(0.01, scale, N)[:, None]
    z[1] = (z[1] * 2).round() / 2
    z[2] = 0.0
    z[3, ::2] = -torch.inf
    z[4] = -torch.inf
    z[4, V // 2] = -3.0
    return z


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("V", [5, 64, 203])
@pytest.mark.parametrize("head", [1024, 2])
def test_filters_leave_what_a_sort_of_the_probabilities_leaves(filters, V, head, monkeypatch):
    monkeypatch.setattr(shaping, "HEAD", head)  # 2: most rows are sorted by bins
    z = logits_case(12, V)
    expected = reference.is_left(z, *filters)
    assert torch.equal(is_left(z, *filters), expected)
    assert expected.any(-1).all() and expected[4].sum() == 1
    assert (z[2] == 0).all() and expected[2].all()  # equal tokens are left together


def test_a_nucleus_holds_its_share_and_would_not_without_its_least_likely_token():
    z = logits_case(30, 500, scale=4.0)
    z[1] = z[0]
    for top_p in (0.1, 0.5, 0.95):
        p = z.double().softmax(-1)
        left = is_left(z, None, top_p, 0.0)
        held, least = (p * left).sum(-1), p.masked_fill(~left, 2.0).amin(-1)
        assert (held >= top_p - 1e-6).all()
        is_alone = (p == least[:, None]).sum(-1) == 1
        assert (held - least < top_p + 1e-6)[is_alone].all() and is_alone.sum() > 20


def stats_case(N: int, V: int, D: int = 16) -> tuple[Tensor, ...]:
    """Hidden states, a table, temperatures, uniform numbers, and allowed tokens, of which there is one at least."""
    g = torch.Generator().manual_seed(V)
    hidden = torch.randn(N, D, generator=g) * torch.linspace(0.1, 1.5, N)[:, None]
    table, uniform = torch.randn(V, D, generator=g), torch.rand(N, generator=g)
    is_allowed = torch.rand(N, V, generator=g) < 0.7
    is_allowed[torch.arange(N), torch.randint(0, V, (N,), generator=g)] = True
    return hidden, table, torch.linspace(0.3, 1.5, N), uniform, is_allowed


def expected_logits(case: tuple[Tensor, ...], how: Shaping, allows: bool) -> Tensor:
    """The tempered logits that are drawn from, all at once in fp64."""
    hidden, table, temperature, _, is_allowed = (x.double() if x.is_floating_point() else x for x in case)
    z = reference.logits(hidden, table, 30.0)
    z = z.masked_fill(~is_allowed, -torch.inf) if allows else z
    z = z / temperature[:, None]
    return z.masked_fill(~reference.is_left(z, how.top_k, how.top_p, how.min_p), -torch.inf)


def compare(stats: Stats, plain: Stats, z: Tensor, uniform: Tensor) -> None:
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    assert torch.allclose(stats.entropy.double(), torch.special.entr(p).sum(-1), atol=2e-5)
    assert torch.equal(stats.argmax, log_p.argmax(-1))
    cdf = torch.nn.functional.pad(p.cumsum(-1), (1, 0))
    low, high = (cdf.gather(-1, stats.sample[:, None] + i).squeeze(-1) for i in (0, 1))
    assert (p.gather(-1, stats.sample[:, None]) > 0).all()
    assert (low - 1e-5 <= uniform).all() and (uniform <= high + 1e-5).all()
    its = log_p.gather(-1, stats.sample[:, None]).squeeze(-1)
    assert torch.allclose(stats.log_probability.double(), its, rtol=1e-4, atol=1e-4)
    assert torch.equal(stats.soft_embedding, plain.soft_embedding)
    assert torch.equal(stats.best, plain.argmax)
    assert torch.allclose(stats.best_log_probability, plain.best_log_probability, rtol=1e-6, atol=1e-6)


SHAPINGS = {"all": Shaping(7, 0.9, 0.02), "top_k": Shaping(5), "top_p": Shaping(None, 0.8), "min_p": Shaping(min_p=0.1)}


@pytest.mark.parametrize("name", SHAPINGS)
@pytest.mark.parametrize("allows", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [5, 1000])
def test_statistics_of_a_filtered_distribution(name, allows, rows_per_chunk, monkeypatch):
    N, V = 23, 203
    monkeypatch.setattr(logits, "CHUNK_BYTES", 4 * V * rows_per_chunk)
    case = stats_case(N, V)
    hidden, table, temperature, uniform, is_allowed = case
    rest = 30.0, temperature, uniform, pack_allowed(is_allowed) if allows else None
    stats, plain = (in_torch.token_stats(hidden, table, *rest, each) for each in (SHAPINGS[name], None))
    compare(stats, plain, expected_logits(case, SHAPINGS[name], allows), uniform)


def test_filters_that_leave_everything_change_no_bit():
    hidden, table, temperature, uniform, *_ = stats_case(23, 203)
    plain = in_torch.token_stats(hidden, table, 30.0, temperature, uniform)
    for how in (Shaping(), Shaping(203), Shaping(500, 1.0, 1e-30)):
        shaped = in_torch.token_stats(hidden, table, 30.0, temperature, uniform, shaping=how)
        assert all(torch.equal(a, b) for a, b in zip(plain, shaped, strict=True))


def test_what_a_shaped_distribution_takes_does_not_grow_with_the_positions(monkeypatch):
    V, D = 20_000, 8
    monkeypatch.setattr(logits, "CHUNK_BYTES", 4 * V * 16)
    table, peaks = torch.randn(V, D), []
    for N in (48, 160):
        hidden = torch.randn(N, D) * 0.01  # flat: a nucleus is most of the tokens
        how = Shaping(15_000, 0.9)
        work = partial(in_torch.token_stats, hidden, table, 30.0, 1.0, torch.rand(N), shaping=how)
        peaks.append(peak_memory(work, torch.device("cpu")))
    assert peaks[0] >= 4 * V * 16, "the trace missed the chunk itself"
    assert peaks[1] < 1.02 * peaks[0]


def test_logits_that_are_no_numbers_are_seen_in_the_entropy():
    hidden, table, temperature, uniform, *_ = stats_case(23, 203)
    hidden[3] = torch.nan
    stats = in_torch.token_stats(hidden, table, 30.0, temperature, uniform, shaping=Shaping(5, 0.9, 0.1))
    assert stats.entropy.isfinite().tolist() == [row != 3 for row in range(23)]
    two = [x[2:4].to(DEVICE) for x in (hidden, temperature, uniform)]
    stats = triton.token_stats(two[0], table.to(DEVICE), 30.0, *two[1:], shaping=Shaping(None, 1.0, 0.1))
    assert stats.entropy.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("name,allows", [("all", False), ("top_p", True)])
def test_statistics_of_a_filtered_distribution_in_triton(name, allows, monkeypatch):
    N, V = 5, 101
    monkeypatch.setattr(launch, "CHUNK_BYTES", 4 * V * 3)
    case = tuple(x.to(DEVICE) for x in stats_case(N, V))
    hidden, table, temperature, uniform, is_allowed = case
    rest = 30.0, temperature, uniform, pack_allowed(is_allowed) if allows else None
    stats, plain = (triton.token_stats(hidden, table, *rest, each) for each in (SHAPINGS[name], None))
    compare(stats, plain, expected_logits(case, SHAPINGS[name], allows), uniform)


ROW_READS = [
    *(((50, 0.9, 0.01), 4, 1.0), ((300, 1.0, 0.0), 4, 6.0)),
    *(((None, 0.9, 0.0), 4, 1.0), ((None, 1.0, 0.1), 2, 6.0)),
    # the window does not hold the bins that decide, and each filter goes over the row bit by bit
    *(((50, 0.9, 0.01), 68, 0.001), ((None, 0.9, 0.0), 35, 0.001)),
]


@pytest.mark.parametrize(("filters", "most", "spread"), ROW_READS, ids=str)
def test_triton_reads_a_row_four_times_or_bit_by_bit_where_its_logits_are_nearly_equal(
    filters, most, spread, monkeypatch
):
    """Rows of bf16, and so with many equal ones."""
    logits_of, reads = kernels_filters._logits, [0]

    def counted(*arguments: Any) -> Any:
        reads[0] += 1
        return logits_of(*arguments)

    if DEVICE == "cpu":  # in the interpreter, where the kernel is Python
        monkeypatch.setattr(kernels_filters, "_logits", counted)
    monkeypatch.setattr(launch, "WINDOW", 2048)  # an eighth of the released vocabulary, of the window, too
    V = 32_768
    z = (torch.randn(1, V, generator=torch.Generator().manual_seed(3)) * spread).bfloat16().float().to(DEVICE)
    left = launch.filtered(z, launch.LogitTransform(None), *filters).allowed
    expected = reference.is_left(z.cpu(), *filters)
    assert 0 < expected.sum() <= V - (spread > 0.1) and torch.equal(left, pack_allowed(expected).to(DEVICE))
    if DEVICE == "cpu":
        assert reads[0] * launch.TILE == most * V


@pytest.mark.parametrize("filters,tile", [((3, 1.0, 0.0), 32), ((None, 0.7, 0.05), 4096), ((500, 0.9, 1.0), 4096)])
def test_triton_leaves_the_same_tokens(filters, tile, monkeypatch):
    monkeypatch.setattr(launch, "TILE", tile)
    z = logits_case(5, 77).to(DEVICE)
    is_allowed = z > -torch.inf
    z = z.masked_fill(~is_allowed, 0.0)
    how = launch.LogitTransform(None, torch.ones(5, device=DEVICE), allowed=pack_allowed(is_allowed), words=3)
    expected = pack_allowed(reference.is_left(z.masked_fill(~is_allowed, -torch.inf), *filters))
    for window in (16384, 16):  # 16: rows of nearly equal logits are searched whole
        monkeypatch.setattr(launch, "WINDOW", window)
        assert torch.equal(launch.filtered(z, how, *filters).allowed, expected)
