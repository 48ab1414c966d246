"""The vocabulary ops against their reference: values, gradients, memory, samples."""

from __future__ import annotations

import pytest
import torch

from blockdiff.kernels import IN_C, IN_TORCH
from blockdiff.kernels.vocabulary import logits
from blockdiff.kernels.vocabulary import torch as in_torch
from tests.oracles import vocabulary as reference
from tests.support.closeness import relative_error


@pytest.fixture(params=["torch", "c"])
def ops(request):
    """Every op runs in torch and, where it has one, by its C function."""
    return IN_TORCH if request.param == "torch" else IN_C


def case(N: int, V: int, D: int, dtype: torch.dtype = torch.float32, scale: float = 1.0):
    g = torch.Generator().manual_seed(N + V + D)
    hidden = torch.randn(N, D, generator=g, dtype=torch.float64) * scale
    table = torch.randn(V, D, generator=g, dtype=torch.float64)
    return hidden.to(dtype), table.to(dtype), torch.randint(0, V, (N,), generator=g)


def chunks_of_rows(monkeypatch: pytest.MonkeyPatch, rows: int, V: int) -> None:
    """Chunks of so many rows of fp32 logits."""
    for name in ("CHUNK_BYTES", "CPU_BYTES"):
        monkeypatch.setattr(logits, name, rows * 4 * V)


@pytest.mark.parametrize("softcap", [30.0, 50.0, None])
@pytest.mark.parametrize("trains_table", [True, False])
@pytest.mark.parametrize("N,V,D,scale", [(1, 3, 8, 1.0), (63, 101, 48, 0.3), (257, 1000, 31, 2.0)])
@pytest.mark.parametrize("rows_per_chunk", [1, 7, 1000])
def test_cross_entropy_and_its_gradients(ops, softcap, trains_table, N, V, D, scale, rows_per_chunk, monkeypatch):
    chunks_of_rows(monkeypatch, rows_per_chunk, V)
    hidden, table, target = case(N, V, D, scale=scale)
    weight = torch.rand(N)
    truth_h, truth_t = hidden.double().requires_grad_(), table.double().requires_grad_()
    truth = reference.linear_cross_entropy(truth_h, truth_t, target, softcap)
    (truth * weight).sum().backward()
    hidden.requires_grad_()
    table.requires_grad_(trains_table)
    loss = ops.linear_cross_entropy(hidden, table, target, softcap)
    (loss * weight).sum().backward()
    assert relative_error(loss, truth) < 1e-5
    assert relative_error(hidden.grad, truth_h.grad) < 1e-5
    if trains_table:
        assert relative_error(table.grad, truth_t.grad) < 1e-5


@pytest.mark.parametrize("softcap", [30.0, 50.0, None])
@pytest.mark.parametrize("trains_table", [True, False])
@pytest.mark.parametrize("rows_per_chunk", [7, 1000])
def test_without_targets_the_loss_is_the_log_sum(softcap, trains_table, rows_per_chunk, monkeypatch):
    N, V, D = 63, 101, 48
    chunks_of_rows(monkeypatch, rows_per_chunk, V)
    hidden, table, target = case(N, V, D)
    rest = softcap, target, torch.linspace(0.0, 12.0, N)
    truth_h, truth_t = hidden.double().requires_grad_(), table.double().requires_grad_()
    truth = reference.linear_cross_entropy(truth_h, truth_t, None, *rest)
    truth.sum().backward()
    hidden.requires_grad_()
    table.requires_grad_(trains_table)
    loss = in_torch.linear_cross_entropy(hidden, table, None, *rest)
    loss.sum().backward()
    assert relative_error(loss, truth) < 1e-5 and relative_error(hidden.grad, truth_h.grad) < 1e-5
    assert not trains_table or relative_error(table.grad, truth_t.grad) < 1e-5


@pytest.mark.parametrize("softcap", [30.0, 50.0, None])
@pytest.mark.parametrize("trains_table", [True, False])
@pytest.mark.parametrize("rows_per_chunk", [7, 1000])
@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_the_bonus_on_the_observed_token_and_its_gradients(
    ops, softcap, trains_table, rows_per_chunk, scale, monkeypatch
):
    N, V, D = 63, 101, 48
    chunks_of_rows(monkeypatch, rows_per_chunk, V)
    hidden, table, target = case(N, V, D, scale=scale)
    observed = torch.where(torch.arange(N) % 2 == 0, target, (target * 7 + 3) % V)
    bonus = torch.linspace(0.0, 30.0, N)
    weight = torch.rand(N)
    truth_h, truth_t = hidden.double().requires_grad_(), table.double().requires_grad_()
    truth = reference.linear_cross_entropy(truth_h, truth_t, target, softcap, observed, bonus)
    (truth * weight).sum().backward()
    hidden.requires_grad_()
    table.requires_grad_(trains_table)
    loss = ops.linear_cross_entropy(hidden, table, target, softcap, observed, bonus)
    (loss * weight).sum().backward()
    assert relative_error(loss, truth) < 1e-5
    assert relative_error(hidden.grad, truth_h.grad) < 1e-5
    if trains_table:
        assert relative_error(table.grad, truth_t.grad) < 1e-5
    assert (loss - truth).abs().max() < 2e-5  # also of rows predicted with near certainty


@pytest.mark.parametrize("softcap", [30.0, 50.0])
def test_the_bonus_of_logits_at_the_cap_stays_finite_and_exact(ops, softcap):
    hidden, table, target = case(64, 50, 16, scale=1e4)
    observed, bonus = (target + torch.arange(64) % 3) % 50, torch.linspace(0.0, 30.0, 64)
    truth = reference.linear_cross_entropy(hidden.double(), table.double(), target, softcap, observed, bonus)
    hidden.requires_grad_()
    table.requires_grad_()
    loss = ops.linear_cross_entropy(hidden, table, target, softcap, observed, bonus)
    loss.sum().backward()
    assert (loss - truth).abs().max() < 1e-4
    assert hidden.grad.isfinite().all() and table.grad.isfinite().all()


def test_a_bonus_of_zero_changes_no_bit(ops):
    hidden, table, target = case(63, 101, 48)
    without = ops.linear_cross_entropy(hidden, table, target, 30.0)
    observed = torch.randint(0, 101, (63,))
    assert torch.equal(ops.linear_cross_entropy(hidden, table, target, 30.0, observed, torch.zeros(63)), without)


@pytest.mark.parametrize("softcap", [30.0, 50.0, None])
@pytest.mark.parametrize("with_bonus", [True, False])
def test_scores_are_the_cross_entropy_and_the_argmax_of_the_same_logits(ops, softcap, with_bonus, monkeypatch):
    N, V, D = 63, 101, 48
    chunks_of_rows(monkeypatch, 7, V)
    hidden, table, target = case(N, V, D)
    observed, bonus = (target * 5 % V, torch.linspace(0.0, 30.0, N)) if with_bonus else (None, None)
    loss, argmax = ops.token_scores(hidden.requires_grad_(), table, target, softcap, observed, bonus)
    assert not loss.requires_grad
    assert relative_error(loss, ops.linear_cross_entropy(hidden, table, target, softcap, observed, bonus)) < 1e-6
    z = reference.logits(hidden, table, softcap).detach()
    if observed is not None:
        z[torch.arange(N), observed] += bonus
    assert torch.equal(argmax, z.argmax(-1))


def test_cross_entropy_at_the_cap_stays_finite(ops):
    hidden, table, target = case(4, 50, 16, scale=1e4)
    hidden.requires_grad_()
    loss = ops.linear_cross_entropy(hidden, table, target, 30.0)
    loss.sum().backward()
    assert loss.isfinite().all() and hidden.grad.isfinite().all()
    assert loss.max() <= 60.0 + 4.0


@pytest.mark.parametrize("temperature", [0.1, 0.8, 2.0])
def test_stats_and_soft_embedding_match_the_reference(ops, temperature, monkeypatch):
    chunks_of_rows(monkeypatch, 5, 203)
    hidden, table, _ = case(37, 203, 24)
    uniform = torch.rand(37)
    stats = ops.token_stats(hidden, table, 30.0, temperature, uniform)
    soft = reference.soft_embedding(hidden.double(), table.double(), 30.0, temperature)
    assert relative_error(stats.soft_embedding, soft) < 1e-5
    assert relative_error(ops.soft_embedding(hidden, table, 30.0, temperature), soft) < 1e-5
    log_p = reference.log_probabilities(hidden.double(), table.double(), 30.0, torch.full((37,), temperature))
    assert torch.allclose(stats.entropy.double(), torch.special.entr(log_p.exp()).sum(-1), atol=1e-5)
    assert torch.equal(stats.argmax, reference.logits(hidden, table, 30.0).argmax(-1))
    own = reference.log_probabilities(hidden.double(), table.double(), 30.0, torch.ones(37))
    assert torch.equal(stats.best, stats.argmax)
    assert torch.allclose(stats.best_log_probability.double(), own.amax(-1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("autocasts", [True, False])
def test_the_soft_embedding_without_gradients_has_the_same_bits(ops, autocasts):
    hidden, table, _ = case(63, 101, 48)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        with_gradients = ops.soft_embedding(hidden, table.requires_grad_(), 30.0, 0.8)
        with torch.no_grad():
            without = ops.soft_embedding(hidden, table, 30.0, 0.8)
    assert with_gradients.requires_grad and not without.requires_grad
    assert without.dtype == with_gradients.dtype and torch.equal(without, with_gradients)


@pytest.mark.parametrize("rows_per_chunk", [1, 7, 1000])
def test_the_soft_embedding_trains_its_table_with_the_logits_given(ops, rows_per_chunk, monkeypatch):
    N, V, D = 37, 203, 24
    chunks_of_rows(monkeypatch, rows_per_chunk, V)
    hidden, table, _ = case(N, V, D)
    direction = torch.randn(N, D, generator=torch.Generator().manual_seed(1))
    truth = table.double().requires_grad_()
    p = (reference.logits(hidden.double(), table.double(), 30.0) / 0.8).softmax(-1)
    ((p @ truth) * direction).sum().backward()
    hidden.requires_grad_()
    table.requires_grad_()
    soft = ops.soft_embedding(hidden, table, 30.0, 0.8)
    (soft * direction).sum().backward()
    assert relative_error(table.grad, truth.grad) < 1e-5
    assert hidden.grad is None


def test_ties_in_argmax_go_to_the_lower_id(ops):
    table = torch.ones(9, 4)
    stats = ops.token_stats(torch.ones(3, 4), table, 30.0, 1.0, torch.rand(3))
    assert stats.argmax.tolist() == [0, 0, 0]


def test_samples_follow_the_distribution(ops):
    hidden, table, _ = case(1, 6, 8, scale=0.5)
    n = 20_000
    uniform = torch.rand(n, generator=torch.Generator().manual_seed(0))
    stats = ops.token_stats(hidden.expand(n, -1), table, 30.0, 0.7, uniform)
    p = (reference.logits(hidden, table, 30.0) / 0.7).softmax(-1)[0]
    counts = torch.bincount(stats.sample, minlength=6)
    chi_square = ((counts - n * p) ** 2 / (n * p)).sum()
    assert chi_square < 20.5  # 5 degrees of freedom, p = 0.001


def test_a_sample_never_has_probability_zero(ops):
    table = torch.tensor([[-1.0], [1.0], [-1.0]]) * 30
    edges = torch.tensor([0.0, 1.0 - 2.0**-24])
    stats = ops.token_stats(torch.full((2, 1), 100.0), table, 30.0, 0.1, edges)
    assert stats.sample.tolist() == [1, 1]


def masked_case(N: int, V: int):
    """Hidden states, a table, temperatures, uniform numbers, and allowed tokens of every kind of row."""
    hidden, table, _ = case(N, V, 24)
    g = torch.Generator().manual_seed(7)
    is_allowed = torch.rand(N, V, generator=g) < torch.rand(N, 1, generator=g)
    is_allowed[0], is_allowed[1] = True, False
    is_allowed[torch.arange(N), torch.randint(0, V, (N,), generator=g)] = True
    return hidden, table, torch.linspace(0.1, 2.0, N), torch.rand(N, generator=g), is_allowed


@pytest.mark.parametrize("V", [31, 32, 203])
@pytest.mark.parametrize("rows_per_chunk", [5, 1000])
def test_stats_of_the_allowed_tokens(ops, V, rows_per_chunk, monkeypatch):
    N = 37
    chunks_of_rows(monkeypatch, rows_per_chunk, V)
    hidden, table, temperature, uniform, is_allowed = masked_case(N, V)
    allowed = in_torch.pack_allowed(is_allowed)
    stats = ops.token_stats(hidden, table, 30.0, temperature, uniform, allowed)
    log_p = reference.log_probabilities(hidden.double(), table.double(), 30.0, temperature, is_allowed)
    p = log_p.exp()
    assert torch.allclose(stats.entropy.double(), torch.special.entr(p).sum(-1), atol=1e-5)
    assert torch.equal(stats.argmax, log_p.argmax(-1))
    assert relative_error(stats.soft_embedding, p @ table.double()) < 1e-5
    its = log_p.gather(-1, stats.sample[:, None]).squeeze(-1)
    assert torch.allclose(stats.log_probability.double(), its, rtol=1e-5, atol=1e-5)
    own = reference.log_probabilities(hidden.double(), table.double(), 30.0, torch.ones(N), is_allowed)
    assert torch.allclose(stats.best_log_probability.double(), own.amax(-1), rtol=1e-5, atol=1e-6)
    assert is_allowed.gather(-1, stats.sample[:, None]).all()
    assert stats.sample[1] == is_allowed[1].nonzero().item()
    cdf = torch.nn.functional.pad(p.cumsum(-1), (1, 0))
    low, high = (cdf.gather(-1, stats.sample[:, None] + i).squeeze(-1) for i in (0, 1))
    assert (low - 1e-6 <= uniform).all() and (uniform <= high + 1e-6).all()


def test_everything_allowed_changes_no_bit(ops):
    hidden, table, temperature, uniform, is_allowed = masked_case(37, 203)
    allowed = in_torch.pack_allowed(torch.ones_like(is_allowed))
    plain = ops.token_stats(hidden, table, 30.0, temperature, uniform)
    masked = ops.token_stats(hidden, table, 30.0, temperature, uniform, allowed)
    assert all(torch.equal(a, b) for a, b in zip(plain, masked, strict=True))


@pytest.mark.parametrize("op", ["linear_cross_entropy", "soft_embedding", "token_stats", "token_scores"])
def test_no_tokens_give_empty_results(ops, op):
    hidden, table, target = case(0, 11, 8)
    rest = dict(
        linear_cross_entropy=(target, 30.0),
        soft_embedding=(30.0, 1.0),
        token_stats=(30.0, 1.0, torch.rand(0)),
        token_scores=(target, 30.0),
    )[op]
    out = getattr(ops, op)(hidden.requires_grad_(), table.requires_grad_(), *rest)
    assert all(x.shape[0] == 0 for x in (out if isinstance(out, tuple) else (out,)))
    if op in ("linear_cross_entropy", "soft_embedding"):
        out.sum().backward()
        assert (table.grad == 0).all()


class _Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """Tracks the storage that live tensors hold beyond those that existed before."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def test_a_loss_stays_within_256_mib_whatever_the_tokens(ops):
    """At V = 262,144 with a frozen table: chunks, not [tokens, V]."""
    V, D = 262_144, 8
    table = torch.randn(V, D)
    peaks = []
    for N in (128, 320):
        hidden = torch.randn(N, D, requires_grad=True)
        target = torch.randint(0, V, (N,))
        with _Peak() as tracked:
            ops.linear_cross_entropy(hidden, table, target, 30.0).sum().backward()
        peaks.append(tracked.peak - 2 * N * D * 4)
    assert 64 << 20 <= peaks[0], "the tracker missed the chunk itself"
    assert peaks[1] <= 256 << 20
    assert peaks[1] - peaks[0] < 8 << 20
