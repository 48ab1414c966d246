"""Schedules, time draws, corruption and weights, each against its definition."""

import math
from dataclasses import replace

import pytest
import torch

from blockdiff.diffusion.corruption import MaskCorruption, UniformCorruption
from blockdiff.diffusion.prediction import leave_one_out_bonus
from blockdiff.diffusion.schedule import Cosine, Linear, LogitNormalTime, Polynomial, StratifiedTime, UniformTime
from blockdiff.diffusion.weight import ElboWeight, NoWeight

pytestmark = pytest.mark.quick

SCHEDULES = [Linear(), Cosine(), Polynomial(), Polynomial(0.5), Polynomial(3.7)]
TIMES = [UniformTime(), StratifiedTime()]
ALL_TIMES = [*TIMES, LogitNormalTime(mean=0.5, std=2.0)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_keep_everything_at_0_and_nothing_at_1(schedule):
    for dtype in (torch.float32, torch.float64):
        assert schedule.alpha(torch.tensor([0.0, 1.0], dtype=dtype)).tolist() == [1.0, 0.0]
    t = torch.linspace(0, 1, 101)
    assert (schedule.alpha(t).diff() <= 0).all() and schedule.alpha(t[50]) < 1
    torch.testing.assert_close(schedule.noise(t), 1 - schedule.alpha(t))
    assert (schedule.noise(torch.tensor([1e-6], dtype=torch.float64)) > 0).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_derivative_is_that_of_alpha(schedule):
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    numeric = (schedule.alpha(t + 1e-6) - schedule.alpha(t - 1e-6)) / 2e-6
    torch.testing.assert_close(schedule.derivative(t), numeric, rtol=1e-7, atol=1e-8)
    t.requires_grad_()
    (exact,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.derivative(t), exact, rtol=1e-12, atol=1e-12)


def test_the_cosine_schedule_is_the_published_one():
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(Cosine().alpha(t), 1 - torch.cos(math.pi / 2 * (1 - t)))


def test_a_polynomial_keeps_one_minus_a_power_of_t():
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(Polynomial(3).alpha(t), 1 - t * t * t)
    torch.testing.assert_close(Polynomial(1).alpha(t), Linear().alpha(t))
    with pytest.raises(ValueError, match="power"):
        Polynomial(0.0)


@pytest.mark.parametrize("time", TIMES)
def test_times_are_uniform_between_the_margins(time):
    total = 8
    slots, ranks = torch.arange(total), torch.zeros(total, dtype=torch.int64)
    t = torch.stack([time.draw(3, step, slots, ranks, total) for step in range(500)])
    assert t.dtype == torch.float32 and t.min() >= time.low and t.max() <= time.high
    for column in (t[:, 0], t[:, 5], t.flatten()):
        counts = torch.histc(column, 10, 0, 1)
        share = column.numel() / 10
        assert ((counts - share) ** 2 / share).sum() < 9 + 5 * math.sqrt(18)
    narrow = torch.cat([type(time)(low=0.3, high=0.8).draw(3, step, slots, ranks, total) for step in range(50)])
    assert 0.3 <= narrow.min() < 0.32 and 0.78 < narrow.max() <= 0.8


@pytest.mark.parametrize("time", ALL_TIMES)
def test_canvases_of_an_example_may_have_one_time_that_other_examples_do_not_have(time):
    slots, ranks = torch.arange(4).repeat_interleave(3), torch.arange(3).repeat(4)
    apart = time.draw(3, 1, slots, ranks, 4).view(4, 3)
    together = replace(time, per="example").draw(3, 1, slots, ranks, 4).view(4, 3)
    assert torch.equal(together, apart[:, :1].expand(4, 3)) and len(together.unique()) == 4
    assert len(apart.unique()) == 12


@pytest.mark.parametrize("mean, std", [(0.0, 1.0), (-1.0, 0.5), (0.8, 2.0)])
def test_logit_normal_times_have_their_distribution(mean, std):
    total, time = 8, LogitNormalTime(mean=mean, std=std)
    slots, ranks = torch.arange(total), torch.zeros(total, dtype=torch.int64)
    t = torch.stack([time.draw(3, step, slots, ranks, total) for step in range(500)])
    assert t.dtype == torch.float32
    for column in (t[:, 0], t[:, 5], t.flatten()):
        logits = torch.logit(column.double().sort().values)
        expected = torch.distributions.Normal(mean, std).cdf(logits)
        observed = (torch.arange(len(expected)) + 0.5) / len(expected)
        assert (expected - observed).abs().max() < 1.63 / math.sqrt(len(expected))  # Kolmogorov-Smirnov, 1 %


def test_logit_normal_times_stay_within_the_margins():
    slots = torch.arange(512)
    wide = LogitNormalTime(mean=0.0, std=30.0, low=0.25, high=0.75).draw(3, 0, slots, torch.zeros_like(slots), 512)
    assert wide.min() == 0.25 and wide.max() == 0.75
    narrow = LogitNormalTime(mean=1.0, std=1e-6).draw(3, 0, slots, torch.zeros_like(slots), 512)
    assert (narrow - 1 / (1 + math.exp(-1.0))).abs().max() < 1e-5
    with pytest.raises(ValueError, match="std"):
        LogitNormalTime(std=0.0)


def test_logit_normal_times_take_one_canvas_from_each_quantile():
    total, time = 16, LogitNormalTime(mean=0.3, std=1.4)
    slots, ranks = torch.arange(total), torch.zeros(total, dtype=torch.int64)
    t = time.draw(5, 7, slots, ranks, total).double()
    quantile = torch.distributions.Normal(0.3, 1.4).cdf(torch.logit(t))
    assert (quantile * total).floor().sort().values.tolist() == list(range(total))


def test_stratified_times_put_one_canvas_of_each_rank_into_each_part():
    total, time = 16, StratifiedTime(low=0.0, high=1.0)
    slots = torch.arange(total).repeat(3)
    ranks = torch.arange(3).repeat_interleave(total)
    for step in (-1, 0, 7):
        t = time.draw(5, step, slots, ranks, total).view(3, total)
        assert ((t * total).floor().long().sort(dim=1).values == torch.arange(total)).all()
    first = [time.draw(5, step, slots[:1], ranks[:1], total).item() for step in range(200)]
    assert len({int(x * total) for x in first}) == total  # the parts go round: slot 0 is not always clean


@pytest.mark.parametrize("time", ALL_TIMES)
def test_times_do_not_depend_on_how_the_global_batch_is_split(time):
    total = 8
    slots, ranks = torch.arange(total), torch.tensor([0, 1, 2, 0, 0, 3, 1, 0])
    whole = time.draw(1, 42, slots, ranks, total)
    for world in (1, 2, 4, 8):
        shares = [time.draw(1, 42, slots[r::world], ranks[r::world], total) for r in range(world)]
        together = torch.empty(total)
        for r, share in enumerate(shares):
            together[r::world] = share
        assert torch.equal(together, whole)
    assert not torch.equal(time.draw(1, 43, slots, ranks, total), whole)
    assert not torch.equal(time.draw(2, 42, slots, ranks, total), whole)


def a_canvas(rows=3, canvases=2, length=16, vocab=50):
    generator = torch.Generator().manual_seed(0)
    canvas_BCL = torch.randint(0, vocab, (rows, canvases, length), generator=generator)
    samples = torch.arange(rows)[:, None].expand(rows, canvases)
    numbers = torch.arange(canvases).expand(rows, canvases)
    return canvas_BCL, torch.stack((torch.zeros_like(samples), samples + 10, numbers), -1)


def test_t_0_gives_the_data_and_t_1_only_noise():
    canvas_BCL, address_BC3 = a_canvas(length=4096)
    corruption = UniformCorruption(50)
    noisy, is_corrupted = corruption.corrupt(canvas_BCL, torch.ones(3, 2), address_BC3, 0)
    assert torch.equal(noisy, canvas_BCL) and not is_corrupted.any()
    noisy, is_corrupted = corruption.corrupt(canvas_BCL, torch.zeros(3, 2), address_BC3, 0)
    assert is_corrupted.all()
    counts = torch.bincount(noisy.flatten(), minlength=50).double()
    share = noisy.numel() / 50
    assert len(counts) == 50 and ((counts - share) ** 2 / share).sum() < 49 + 5 * math.sqrt(98)
    assert abs((noisy == canvas_BCL).double().mean() - 1 / 50) < 5 * math.sqrt(1 / 50 / noisy.numel())


def test_the_share_of_replaced_tokens_is_one_minus_alpha_for_each_canvas():
    canvas_BCL, address_BC3 = a_canvas(length=8192)
    alpha_BC = torch.tensor([[0.1, 0.9], [0.5, 0.25], [0.0, 1.0]])
    noisy, is_corrupted = UniformCorruption(50).corrupt(canvas_BCL, alpha_BC, address_BC3, 0)
    assert (is_corrupted.float().mean(-1) - (1 - alpha_BC)).abs().max() < 5 * 0.5 / math.sqrt(8192)
    assert torch.equal(noisy[~is_corrupted], canvas_BCL[~is_corrupted])
    # The replacement may be the true token, so fewer tokens differ than were replaced.
    assert 0 < (is_corrupted & (noisy == canvas_BCL)).sum() < is_corrupted.sum() / 10


def test_mask_corruption_replaces_by_the_mask_token_where_uniform_noise_would():
    canvas_BCL, address_BC3 = a_canvas(length=8192)
    alpha_BC = torch.tensor([[0.1, 0.9], [0.5, 0.25], [0.0, 1.0]])
    noisy, is_corrupted = MaskCorruption(77).corrupt(canvas_BCL, alpha_BC, address_BC3, 0)
    assert torch.equal(noisy == 77, is_corrupted)
    assert torch.equal(noisy[~is_corrupted], canvas_BCL[~is_corrupted])
    assert is_corrupted[2, 0].all() and not is_corrupted[2, 1].any()
    assert torch.equal(is_corrupted, UniformCorruption(50).corrupt(canvas_BCL, alpha_BC, address_BC3, 0)[1])


@pytest.mark.parametrize("corruption", [UniformCorruption(50), MaskCorruption(7)])
def test_corruption_does_not_depend_on_batch_neighbours(corruption):
    canvas_BCL, address_BC3 = a_canvas()
    alpha_BC = torch.full((3, 2), 0.5)
    whole = corruption.corrupt(canvas_BCL, alpha_BC, address_BC3, 9)
    for rows in ([2], [1, 0]):
        part = corruption.corrupt(canvas_BCL[rows], alpha_BC[rows], address_BC3[rows], 9)
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole, strict=True))
    column = corruption.corrupt(canvas_BCL[:, 1:], alpha_BC[:, 1:], address_BC3[:, 1:], 9)
    assert torch.equal(column[0], whole[0][:, 1:])
    other = corruption.corrupt(canvas_BCL, alpha_BC, address_BC3 + torch.tensor([1, 0, 0]), 9)
    assert not torch.equal(other[0], whole[0])


def in_t(weight, schedule, t):
    """A weight that looks at nothing but t: [*] in, [*] out."""
    nothing = torch.zeros(*t.shape, 4, dtype=torch.int64)
    return weight.weigh(schedule, t, nothing, nothing.bool())[..., 0]


def test_no_weight_is_one_everywhere():
    weight = in_t(NoWeight(), Cosine(), torch.tensor([[0.0, 0.5, 1.0]], dtype=torch.float64))
    assert weight.dtype == torch.float32 and weight.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_elbo_weight_is_minus_the_slope_of_alpha_over_what_is_lost(schedule):
    t = torch.linspace(1e-4, 1, 300, dtype=torch.float64).requires_grad_()
    alpha = schedule.alpha(t)
    (slope,) = torch.autograd.grad(alpha.sum(), t)
    weight = in_t(ElboWeight(), schedule, t.detach().float())
    assert weight.dtype == torch.float32
    # 1 - alpha by subtraction has lost its digits at small t
    has_digits = (1 - alpha).detach() > 1e-9
    assert has_digits.sum() > 250
    expected = -slope / (1 - alpha).detach()
    torch.testing.assert_close(weight[has_digits].double(), expected[has_digits], rtol=1e-5, atol=1e-7)
    if isinstance(schedule, Polynomial):
        torch.testing.assert_close(weight.double(), schedule.power / t.detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_elbo_weight_is_finite_at_0_and_keeps_its_limit(schedule):
    t = torch.tensor([0.0, 1e-8, 1e-4, 0.3, 1.0])
    assert in_t(ElboWeight(), schedule, t).isfinite().all()
    assert torch.equal(in_t(ElboWeight(limit=3.0), schedule, t), in_t(ElboWeight(), schedule, t).clamp(max=3.0))
    assert (in_t(ElboWeight(), schedule, t).diff() <= 1e-6).all()
    with pytest.raises(ValueError, match="limit"):
        ElboWeight(0.0)


def test_the_elbo_weight_makes_the_expected_loss_of_a_guess_its_entropy():
    """A model that gives every true token probability p has NLL -log p; so must the weighted masked loss have."""
    t = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    for schedule in SCHEDULES:
        masked_share = 1 - schedule.alpha(t)
        bound = (in_t(ElboWeight(), schedule, t).double() * masked_share * -math.log(0.3)).mean()
        assert bound.item() == pytest.approx(-math.log(0.3), rel=1e-2)


def test_the_leave_one_out_bonus_turns_the_others_prediction_into_the_posterior():
    """Bayes by hand: p(x | x_t, others) is proportional to p(x | others) q(x_t | x)."""
    V, observed = 7, 3
    others = torch.rand(V, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(0)
    t = torch.tensor([[0.01, 0.3, 0.5, 0.9, 1.0]])
    for schedule in SCHEDULES:
        bonus = leave_one_out_bonus(schedule, t, V)
        for alpha, b in zip(schedule.alpha(t.double())[0].tolist(), bonus[0].tolist(), strict=True):
            likelihood = torch.full((V,), (1 - alpha) / V, dtype=torch.float64)
            likelihood[observed] += alpha
            posterior = others * likelihood / (others * likelihood).sum()
            logits = others.log()
            logits[observed] += b
            torch.testing.assert_close(logits.softmax(0), posterior, rtol=1e-5, atol=0)


def test_the_leave_one_out_bonus_is_0_at_1_and_finite_at_0():
    bonus = leave_one_out_bonus(Linear(), torch.tensor([[1.0, 0.5, 0.0]]), 262144)
    assert bonus.dtype == torch.float32
    assert bonus[0].tolist() == pytest.approx([0.0, math.log(1 + 262144), math.log(262144e10)], abs=1e-3)
    for schedule in SCHEDULES:
        assert (leave_one_out_bonus(schedule, torch.linspace(0, 1, 99)[None], 262144) < 40).all()
