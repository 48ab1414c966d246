"""Statistics and samples of the vocabulary in Triton against the reference in fp64, in the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from blockdiff.kernels.vocabulary import Classes, Shaping, pack_allowed, triton
from blockdiff.kernels.vocabulary import torch as in_torch
from blockdiff.kernels.vocabulary import triton_launch as launch
from tests.kernels.test_triton_vocabulary import DEVICE, FP32, bf16_case, case, chunks_of_rows
from tests.oracles import vocabulary as reference
from tests.support.closeness import relative_error

pytestmark = pytest.mark.usefixtures("unwritten_memory_is_nan")


EDGE = 1e-6  # how far rounding may move an edge of the CDF


def stats_case(N: int, V: int, D: int = 24) -> tuple[Tensor, ...]:
    """Hidden states, a table, tokens, a temperature for each row, uniform numbers."""
    g = torch.Generator().manual_seed(N)
    hidden, table, given = case(N, V, D)
    uniform = torch.rand(N, generator=g)
    uniform[0], uniform[-1] = 0.0, 1.0 - 2.0**-24
    return hidden, table, given, torch.linspace(0.1, 2.0, N, device=DEVICE), uniform.to(DEVICE)


def compare_stats(stats: in_torch.Stats, log_p: Tensor, table: Tensor, uniform: Tensor) -> None:
    p = log_p.exp()
    assert torch.allclose(stats.entropy.double(), torch.special.entr(p).sum(-1), rtol=0.0, atol=1e-5)
    assert torch.equal(stats.argmax, log_p.argmax(-1))
    assert relative_error(stats.soft_embedding, p @ table.double()) < FP32
    its = log_p.gather(-1, stats.sample[:, None]).squeeze(-1)
    assert torch.allclose(stats.log_probability.double(), its, rtol=1e-5, atol=1e-5)
    cdf = torch.nn.functional.pad(p.cumsum(-1), (1, 0))
    low, high = (cdf.gather(-1, stats.sample[:, None] + i).squeeze(-1) for i in (0, 1))
    assert (low - EDGE <= uniform).all() and (uniform <= high + EDGE).all()
    assert (p.gather(-1, stats.sample[:, None]) > 0).all()


def compare_best(stats: in_torch.Stats, hidden: Tensor, table: Tensor, softcap: float | None, *allowed: Tensor) -> None:
    """The best tokens' probabilities are those at temperature 1, whatever the rows' temperatures."""
    one = torch.ones(len(hidden), device=DEVICE)
    own = reference.log_probabilities(hidden.double(), table.double(), softcap, one, *allowed)
    assert torch.equal(stats.best, stats.argmax)
    assert torch.allclose(stats.best_log_probability.double(), own.amax(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [30.0, None])
@pytest.mark.parametrize("N,V", [(1, 17), (63, 203)])
def test_stats_match_the_reference(softcap, N, V, small_tiles, monkeypatch):
    chunks_of_rows(monkeypatch, 13, V)
    hidden, table, _, temperature, uniform = stats_case(N, V)
    stats = triton.token_stats(hidden, table, softcap, temperature, uniform)
    log_p = reference.log_probabilities(hidden.double(), table.double(), softcap, temperature)
    compare_stats(stats, log_p, table, uniform)
    compare_best(stats, hidden, table, softcap)


def test_statistics_of_an_untied_head_are_those_of_a_tied_one_but_for_the_soft_embedding(small_tiles, monkeypatch):
    chunks_of_rows(monkeypatch, 4, 203)
    hidden, table, _, temperature, uniform = stats_case(9, 203)
    classes = Classes.of(torch.arange(203, device=DEVICE) % 5, 5)
    other, shaping = table.flip(0).contiguous(), Shaping(top_k=9, top_p=0.9)
    log_p = reference.log_probabilities(hidden.double(), table.double(), 30.0, temperature)
    for op, rest in ((triton.token_stats, (uniform, None, shaping)), (triton.class_stats, (uniform, classes))):
        tied, untied = (op(hidden, table, 30.0, temperature, *rest, embedding_VD=e) for e in (None, other))
        columns = zip(tied._asdict().items(), untied, strict=True)
        assert all(torch.equal(a, b) for (name, a), b in columns if name != "soft_embedding")
        assert relative_error(untied.soft_embedding, log_p.exp() @ other.double()) < FP32


def test_stats_in_tiles_of_full_size():
    hidden, table, _, temperature, uniform = stats_case(5, 9001, 48)
    stats = triton.token_stats(hidden * 0.1, table, 30.0, temperature, uniform)
    log_p = reference.log_probabilities(hidden.double() * 0.1, table.double(), 30.0, temperature)
    compare_stats(stats, log_p, table, uniform)


@pytest.mark.quick
@pytest.mark.parametrize("V", [31, 64, 203])
def test_stats_of_the_allowed_tokens(V, small_tiles):
    N = 37
    hidden, table, _, temperature, uniform = stats_case(N, V)
    g = torch.Generator().manual_seed(7)
    is_allowed = torch.rand(N, V, generator=g) < torch.rand(N, 1, generator=g)
    is_allowed[0], is_allowed[1], is_allowed[2, : V // 2] = True, False, False
    is_allowed[torch.arange(N), torch.randint(0, V, (N,), generator=g)] = True
    is_allowed = is_allowed.to(DEVICE)
    stats = triton.token_stats(hidden, table, 30.0, temperature, uniform, pack_allowed(is_allowed))
    log_p = reference.log_probabilities(hidden.double(), table.double(), 30.0, temperature, is_allowed)
    compare_stats(stats, log_p, table, uniform)
    compare_best(stats, hidden, table, 30.0, is_allowed)
    one_for_all = pack_allowed(is_allowed[3:4]).expand(N, -1)
    stats = triton.token_stats(hidden, table, 30.0, temperature, uniform, one_for_all)
    compare_stats(
        stats,
        reference.log_probabilities(hidden.double(), table.double(), 30.0, temperature, is_allowed[3:4]),
        table,
        uniform,
    )


def test_samples_are_those_of_torch_away_from_the_edges(small_tiles):
    N, V = 300, 203
    hidden, table, _, _, uniform = stats_case(N, V, 8)
    temperature = torch.full((N,), 1.3, device=DEVICE)
    mine = triton.token_stats(hidden, table, 30.0, temperature, uniform).sample
    torchs = in_torch.token_stats(hidden, table, 30.0, temperature, uniform).sample
    cdf = reference.log_probabilities(hidden.double(), table.double(), 30.0, temperature).exp().cumsum(-1)
    is_clear = (cdf - uniform[:, None]).abs().amin(-1) > EDGE
    assert is_clear.float().mean() > 0.9 and torch.equal(mine[is_clear], torchs[is_clear])


def test_evenly_spaced_uniform_numbers_give_every_token_its_share(small_tiles):
    n, V = 400, 40
    hidden, table, _ = case(1, V, 8, 0.5)
    uniform = (torch.arange(n, device=DEVICE) + 0.5) / n
    sample = triton.token_stats(hidden.expand(n, -1), table, 30.0, 0.7, uniform).sample
    p = (reference.logits(hidden.double(), table.double(), 30.0) / 0.7).softmax(-1)[0]
    counts = torch.bincount(sample, minlength=V)
    assert (counts - n * p).abs().max() <= 1.0 + 1e-3


def test_samples_follow_the_distribution(small_tiles):
    n, V = 1000, 6
    hidden, table, _ = case(1, V, 8, 0.5)
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    stats = triton.token_stats(hidden.expand(n, -1), table, 30.0, 0.7, uniform)
    p = (reference.logits(hidden.double(), table.double(), 30.0) / 0.7).softmax(-1)[0]
    counts = torch.bincount(stats.sample, minlength=V)
    assert ((counts - n * p) ** 2 / (n * p)).sum() < 20.5  # 5 degrees of freedom, p = 0.001


def test_a_position_does_not_depend_on_what_else_is_in_the_batch(small_tiles):
    """With the identity as table the products are exact, so everything else must be, too."""
    N, V = 12, 100
    logits, _, _, temperature, uniform = stats_case(N, V, V)
    table = torch.eye(V, device=DEVICE)
    together = triton.token_stats(logits, table, 30.0, temperature, uniform)
    for n in (0, 5, 11):
        row = slice(n, n + 1)
        alone = triton.token_stats(logits[row], table, 30.0, temperature[row], uniform[row])
        assert all(torch.equal(a, b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("softcap", [30.0, None])
def test_ties_in_argmax_go_to_the_lower_id(softcap, small_tiles):
    V = 100
    logits = torch.zeros(3, V, device=DEVICE)
    logits[1, 40:] = logits[2, [31, 64, 99]] = 2.0
    target, table = torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.eye(V, device=DEVICE)
    uniform = torch.rand(3, device=DEVICE)
    assert triton.token_stats(logits, table, softcap, 1.0, uniform).argmax.tolist() == [0, 40, 31]
    assert triton.token_scores(logits, table, target, softcap)[1].tolist() == [0, 40, 31]


def test_shards_of_the_vocabulary_combine_to_the_same_bits(small_tiles):
    """Statistics and losses of all shards are merged. Compiled kernels read rows of an odd width in another layout."""
    N, V, cut = 20, 203 if DEVICE == "cpu" else 208, 96
    hidden, table, tokens, temperature, uniform = stats_case(N, V)
    assert (tokens < cut).any() and (tokens >= cut).any()
    tile, x = launch.tile_for(V), hidden @ table.T
    shards = [(x[:, :cut].contiguous(), 0), (x[:, cut:].contiguous(), cut)]

    def rows() -> launch.RowStats:
        numbers, tokens = torch.empty(6, N, device=DEVICE), torch.empty(2, N, dtype=torch.int64, device=DEVICE)
        peak, total, loss, entropy, rest, best = numbers
        return launch.RowStats(peak, total, loss, tokens[0], entropy, tokens[1], rest, best)

    def tiles_of(x: Tensor, first: int) -> launch.TileStats:
        """As a rank makes them that holds the tokens from `first` on."""
        tiles = launch.new_tiles(x, -(-x.shape[1] // tile.columns), rows())
        launch.fill(tiles, x, how, tile, tokens, first)
        return tiles

    how = launch.LogitTransform(30.0, temperature)
    whole, of_shards = tiles_of(x, 0), [tiles_of(*shard) for shard in shards]
    first, second = (shard.target_z for shard in of_shards)
    assert torch.equal(first.isnan(), tokens >= cut) and torch.equal(second.isnan(), tokens < cut)
    *joined, own = (torch.cat(pair, 1) for pair in zip(*(s[:4] + s[5:] for s in of_shards), strict=True))
    merged, truth = rows(), rows()
    target = first.where(tokens < cut, second)
    launch.merge(launch.TileStats(*joined, target, own), merged, uniform, temperature)
    launch.merge(whole, truth, uniform, temperature)
    assert all(torch.equal(x, y) for x, y in zip(merged, truth, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("N,V,D", [(257, 20_000, 2816), (256, 262_144, 64)])
def test_bf16_stats_are_as_close_to_fp64_as_torch_in_bf16(N, V, D):
    hidden, table, _ = bf16_case(N, V, D)
    uniform = torch.rand(N, generator=torch.Generator().manual_seed(0)).cuda()
    mine = triton.token_stats(hidden, table, 30.0, 0.6, uniform)
    torchs = in_torch.token_stats(hidden, table, 30.0, 0.6, uniform)
    exact = in_torch.token_stats(hidden.float(), table.float(), 30.0, 0.6, uniform)
    for name in ("entropy", "soft_embedding", "log_probability"):
        x, y, truth = (getattr(stats, name) for stats in (mine, torchs, exact))
        assert relative_error(x, truth) <= 1.2 * relative_error(y, truth) + 1e-6
    # chunks of other sizes may round a product otherwise, which moves an edge of the CDF or breaks a tie
    assert (mine.argmax == torchs.argmax).float().mean() >= 0.98
    assert (mine.sample == torchs.sample).float().mean() >= 0.98
