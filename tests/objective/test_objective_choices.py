"""Every choice of the objective against plain torch in fp64: losses and gradients, canvas by canvas."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.diffusion.corruption import Corruption, MaskCorruption, UniformCorruption
from blockdiff.diffusion.schedule import Cosine, Linear, Polynomial, Schedule
from blockdiff.diffusion.weight import ElboWeight
from blockdiff.errors import RecipeError
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.objective import Losses, Objective
from tests.support.oracle import TWO_LAYERS, oracle, ours, tiny_config

pytestmark = pytest.mark.quick

L, V, SEED, MASK = 8, 384, 5, 383
NOTHING = ((), ())
# Of two canvases in each of two rows: a tail of what stands before it, some places anywhere, none, and all but two.
PINNED = (((0, 1, 2), (1, 4, 7)), ((), (0, 1, 2, 4, 6, 7)))
Gradients = dict[str, Tensor]
Pins = tuple[tuple[tuple[int, ...], ...], ...]  # by row and canvas


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    """fp64; only its logits are fp32 inside the losses."""
    return ours(oracle(tiny_config(canvas_length=L, **TWO_LAYERS)))


def tokens(n: int, seed: int) -> list[int]:
    return torch.randint(3, 380, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def batch(with_weights: bool = False, pinned: Pins = (NOTHING, NOTHING)) -> Batch:
    """Two documents in one row, several canvases, coins of both kinds, high and low noise levels."""
    a, b = tokens(41, 1), tokens(25, 2)

    def canvas(sample: int, row: list[int], start: int, t: float, coin: bool, doc: int = 0) -> Canvas:
        clean = [*row[start : start + L], *[1] * L][:L]
        weight, pins = 1 / (3 + start) if with_weights else 1.0, pinned[sample][start in (31, 22)]
        return Canvas(clean, start, doc, t=t, coin=coin, address=(2, sample, start), weight=weight, pinned=pins)

    weights = [0.0 if column % 3 == 0 else 0.5 + column / 10 for column in range(41)] if with_weights else None
    rows = [
        CleanRow(a, [canvas(0, a, 12, 0.6, True), canvas(0, a, 31, 0.2, False, 18)], 0, (0, 18), weights),
        CleanRow(b, [canvas(1, b, 17, 0.9, False), canvas(1, b, 22, 0.4, True)], 1),
    ]
    return lay_out(rows, L, pad_id=0)


@dataclass(frozen=True)
class Plain:
    """The same choices, spelt out in torch on whole fp64 logits, one document and one canvas at a time."""

    schedule: Schedule
    corruption: Corruption
    factor: str = "1"
    only_corrupted: bool = False
    leave_one_out: bool = False

    def losses(
        self, model: DiffusionGemma, encoder: DiffusionGemma, batch: Batch, pinned: Pins = (NOTHING, NOTHING)
    ) -> Losses:
        """The canvas and AR sums, encoded by `encoder` and denoised by `model`."""
        alpha_BC = self.schedule.alpha(batch.t_BC)
        noisy_BCL, is_corrupted_BCL = self.corruption.corrupt(batch.canvas_BCL, alpha_BC, batch.address_BC3, SEED)
        for b, c in product(range(2), range(2)):
            for place in pinned[b][c]:
                noisy_BCL[b, c, place], is_corrupted_BCL[b, c, place] = batch.canvas_BCL[b, c, place], False
        canvas_sum, ar_sum = torch.zeros(2, dtype=torch.float64).unbind()
        for b, row in enumerate(batch.tokens_BS):
            for doc in sorted(set(batch.doc_start_BS[b].tolist()) - {-1}):
                columns = (batch.doc_start_BS[b] == doc).nonzero()[:, 0]
                hidden = model.encode(row[columns][None]).hidden[0]
                nll = F.cross_entropy(fp64_logits(model, hidden)[:-1], row[columns][1:], reduction="none")
                weight = batch.ar_weight_BS[b, columns[:-1]] * batch.is_ar_scored_BS[b, columns[:-1]]
                ar_sum = ar_sum + (nll * weight).sum()
            for c in range(batch.start_BC.shape[1]):
                before = row[int(batch.doc_start_BC[b, c]) : int(batch.start_BC[b, c])]
                noisy, t = noisy_BCL[b, c], batch.t_BC[b, c].double()
                prefix, soft = encoder.encode(before[None]), None
                if batch.coin_BC[b, c]:
                    with torch.no_grad():
                        first = model.unembed(model.denoise(noisy[None], prefix))
                    soft = model.soft_embedding(first)
                z = fp64_logits(model, model.denoise(noisy[None], prefix, soft)[0])
                if self.leave_one_out:
                    alpha = self.schedule.alpha(t)
                    z = z + torch.log(1 + alpha * V / (1 - alpha)) * F.one_hot(noisy, V)
                nll = F.cross_entropy(z, batch.canvas_BCL[b, c], reduction="none")
                nll = nll * torch.tensor([place not in pinned[b][c] for place in range(L)])
                if self.only_corrupted:
                    nll = nll * is_corrupted_BCL[b, c]
                known = {"t": t, "tokens": batch.canvas_BCL[b, c], "is_corrupted": is_corrupted_BCL[b, c]}
                canvas_sum = canvas_sum + (nll * eval(self.factor, known)).sum() * batch.weight_BC[b, c]
        return {"canvas": canvas_sum, "ar": ar_sum}


def fp64_logits(model: DiffusionGemma, hidden: Tensor) -> Tensor:
    cap = model.vocabulary.softcap
    return cap * torch.tanh(hidden @ model.vocabulary.table.T / cap)


def gradients(model: DiffusionGemma, loss: Tensor) -> Gradients:
    model.zero_grad(set_to_none=True)
    loss.backward(retain_graph=True)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: Losses, truth: Losses, model: DiffusionGemma) -> None:
    assert got.keys() == truth.keys()
    for loss, exact in truth.items():
        mine = got[loss]
        assert mine.item() == pytest.approx(exact.item(), rel=1e-6)
        mine_by_name, exact_by_name = gradients(model, mine), gradients(model, exact)
        assert set(exact_by_name) <= set(mine_by_name)
        for name, gradient in mine_by_name.items():
            expected = exact_by_name.get(name, torch.zeros_like(gradient))
            assert (gradient - expected).norm() <= 1e-5 * expected.norm(), name


class ByToken:
    """A weight that looks at tokens and noise."""

    def weigh(self, schedule: Schedule, t_BC: Tensor, tokens_BCL: Tensor, is_corrupted_BCL: Tensor) -> Tensor:
        return t_BC[..., None] + tokens_BCL % 3 + 2.0 * is_corrupted_BCL


class ByCanvas:
    """A weight that forgets the positions."""

    def weigh(self, schedule: Schedule, t_BC: Tensor, tokens_BCL: Tensor, is_corrupted_BCL: Tensor) -> Tensor:
        return t_BC


UNIFORM = UniformCorruption(V)
CHOICES: dict[str, tuple[Plain, dict[str, Any]]] = {
    "defaults, with weights": (Plain(Linear(), UNIFORM), {}),
    "elbo, linear": (Plain(Linear(), UNIFORM, "1 / t"), {"weight": ElboWeight()}),
    "elbo, polynomial": (Plain(Polynomial(3.0), UNIFORM, "3 / t"), {"weight": ElboWeight()}),
    "elbo with a limit": (Plain(Linear(), UNIFORM, "min(1 / t, 2.0)"), {"weight": ElboWeight(2.0)}),
    "one's own weight": (Plain(Linear(), UNIFORM, "t + tokens % 3 + 2 * is_corrupted"), {"weight": ByToken()}),
    "corrupted positions": (Plain(Linear(), UNIFORM, only_corrupted=True), {"positions": "corrupted"}),
    "masks": (Plain(Linear(), MaskCorruption(MASK)), {}),
    "masked elbo": (
        Plain(Linear(), MaskCorruption(MASK), "1 / t", only_corrupted=True),
        {"weight": ElboWeight(), "positions": "corrupted"},
    ),
    "leave one out": (Plain(Linear(), UNIFORM, leave_one_out=True), {"prediction": "leave_one_out"}),
    "all of them": (
        Plain(Cosine(), UNIFORM, "min(1.5707963 / (1.5707963 * t).tan(), 3)", True, True),
        {"weight": ElboWeight(3.0), "positions": "corrupted", "prediction": "leave_one_out"},
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_losses_and_gradients_are_those_of_the_formula(model, name):
    plain, options = CHOICES[name]
    given = batch(with_weights=True)
    objective = Objective(model, plain.schedule, plain.corruption, SEED, **options)
    assert_same(objective(given), plain.losses(model, model, given), model)


@pytest.mark.parametrize("sweep", [False, True])
@pytest.mark.parametrize("name", ["defaults, with weights", "one's own weight", "masked elbo", "all of them"])
def test_pinned_places_are_seen_clean_and_have_no_loss(model, name, sweep):
    plain, options = CHOICES[name]
    given = batch(with_weights=True, pinned=PINNED)
    objective = Objective(model, plain.schedule, plain.corruption, SEED, sweep=sweep, **options)
    assert_same(objective(given), plain.losses(model, model, given, PINNED), model)


def test_pinned_places_are_in_no_count_and_in_no_figure(model):
    given = batch(pinned=PINNED)
    counts = [[5, 5], [8, 2]]
    assert given.is_scored_BCL.sum(-1).tolist() == counts and given.canvas_count() == 20
    noisy = replace(given, t_BC=torch.ones_like(given.t_BC))
    measured = Objective(model, Linear(), MaskCorruption(MASK), SEED).evaluate(noisy)
    for column in (measured.is_corrupted_BCL, measured.loss_BCL, measured.signal_loss_BCL, measured.factor_BCL):
        assert column.count_nonzero(-1).tolist() == counts
    assert (
        Objective(model, Linear(), UNIFORM)(given)["canvas"] != Objective(model, Linear(), UNIFORM)(batch())["canvas"]
    )


def test_stop_gradient_trains_the_canvas_loss_as_if_another_model_had_encoded(model):
    given = batch()
    objective = Objective(model, Linear(), UNIFORM, SEED, stop_gradient=True)
    plain = Plain(Linear(), UNIFORM).losses(model, copy.deepcopy(model), given)
    assert_same(objective(given), plain, model)
    stopped = gradients(model, objective(given)["canvas"])
    flowing = gradients(model, Objective(model, Linear(), UNIFORM, SEED)(given)["canvas"])
    assert any(not torch.allclose(stopped[name], flowing[name]) for name in stopped)


def test_counts_are_of_all_scored_positions_whatever_has_a_loss(model):
    given = batch()
    assert given.canvas_count() == 4 * L and given.ar_count() == 17 + 22 + 24
    nothing = replace(given, t_BC=torch.zeros_like(given.t_BC))
    objective = Objective(model, Linear(), UNIFORM, SEED, positions="corrupted")
    losses = objective(nothing)
    assert losses["canvas"].item() == 0.0
    assert all(not g.any() for g in gradients(model, losses["canvas"]).values())


def test_a_weight_without_positions_is_refused(model):
    shapes = r"\[2, 2\]; it should return \[2, 2, \d+\] or \[2, 2, 1\]"
    with pytest.raises(RecipeError, match=rf"^objective\.weight: ByCanvas.*{shapes}"):
        Objective(model, Linear(), UNIFORM, SEED, weight=ByCanvas())(batch())


def test_a_weight_that_is_no_tensor_is_refused(model):
    class One:
        def weigh(self, *_):
            return 1.0

    with pytest.raises(RecipeError, match=r"^objective\.weight: One.*float.*\[2, 2, \d+\]"):
        Objective(model, Linear(), UNIFORM, SEED, weight=One())(batch())


def test_leave_one_out_is_refused_where_its_bonus_is_no_posterior(model):
    with pytest.raises(RecipeError, match=r"^objective\.prediction: leave_one_out .*posterior"):
        Objective(model, Linear(), MaskCorruption(MASK), prediction="leave_one_out")


def test_the_signal_of_leave_one_out_is_made_without_the_bonus(model):
    given = batch()
    signals: list[Tensor] = []
    hook = model.self_conditioning.register_forward_pre_hook(lambda _, inputs: signals.append(inputs[1]))
    for prediction in ("posterior", "leave_one_out"):
        Objective(model, Linear(), UNIFORM, SEED, prediction=prediction)(given)
    hook.remove()
    assert torch.equal(signals[1], signals[3])


# -- token by token ------------------------------------------------------------------------------------------


EVALUATED = {
    "defaults": (UNIFORM, {}),
    "leave one out": (UNIFORM, {"prediction": "leave_one_out"}),
    "masked elbo": (MaskCorruption(MASK), {"weight": ElboWeight(), "positions": "corrupted"}),
}


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_is_training_token_by_token(model, name):
    """Summed up by coin, factors included, it gives the training losses of batches with all coins off, on and mixed."""
    corruption, options = EVALUATED[name]
    objective = Objective(model, Linear(), corruption, SEED, **options)
    given = batch(with_weights=True)
    measured = objective.evaluate(given)
    for coin_BC in (torch.zeros_like(given.coin_BC), torch.ones_like(given.coin_BC), given.coin_BC):
        losses = objective(replace(given, coin_BC=coin_BC))
        loss_BCL = measured.signal_loss_BCL.where(coin_BC[..., None], measured.loss_BCL)
        canvas_sum = (measured.factor_BCL.double() * loss_BCL).sum().item()
        assert canvas_sum == pytest.approx(losses["canvas"].item(), rel=1e-6)
    ar_sum = (given.ar_weight_BS.double() * measured.ar_loss_BS).sum().item()
    assert ar_sum == pytest.approx(losses["ar"].item(), rel=1e-6)
    assert not measured.ar_loss_BS[~given.is_ar_scored_BS].any()
    noise = corruption.corrupt(given.canvas_BCL, Linear().alpha(given.t_BC), given.address_BC3, SEED)
    assert torch.equal(measured.is_corrupted_BCL, noise[1])


def test_evaluation_counts_the_argmax_of_each_pass_and_ignores_the_coin(model):
    given = batch()
    objective = Objective(model, Linear(), UNIFORM, SEED)
    measured = objective.evaluate(given)
    flipped = objective.evaluate(replace(given, coin_BC=~given.coin_BC))
    assert all(torch.equal(a, b) for a, b in zip(measured, flipped, strict=True))
    noisy_BCL, _ = UNIFORM.corrupt(given.canvas_BCL, Linear().alpha(given.t_BC), given.address_BC3, SEED)
    for b, c in ((0, 0), (0, 1), (1, 0), (1, 1)):
        doc, start = int(given.doc_start_BC[b, c]), int(given.start_BC[b, c])
        prefix = model.encode(given.tokens_BS[b, doc:start][None])
        noisy, clean = noisy_BCL[b, c][None], given.canvas_BCL[b, c]
        first = model.unembed(model.denoise(noisy, prefix))
        second = model.unembed(model.denoise(noisy, prefix, model.soft_embedding(first)))
        assert torch.equal(measured.is_correct_BCL[b, c], first[0].argmax(-1) == clean)
        assert torch.equal(measured.signal_is_correct_BCL[b, c], second[0].argmax(-1) == clean)
        hidden = model.encode(given.tokens_BS[b, doc:start][None]).hidden[0, :-1]
        hits = model.unembed(hidden).argmax(-1) == given.tokens_BS[b, doc + 1 : start]
        assert torch.equal(measured.ar_is_correct_BS[b, doc : start - 1], hits)


def test_a_hit_is_a_hit(model):
    """A random model never predicts the truth, so the truth is made what it predicts."""
    objective = Objective(model, Linear(), UNIFORM, SEED)
    given = batch()
    given = replace(given, t_BC=torch.ones_like(given.t_BC))  # the canvas then does not depend on its clean tokens
    noisy_BCL, _ = UNIFORM.corrupt(given.canvas_BCL, 0 * given.t_BC, given.address_BC3, SEED)
    prefix = model.encode(given.tokens_BS[1, :17][None])
    predicted = model.unembed(model.denoise(noisy_BCL[1, 0][None], prefix))[0].argmax(-1)
    canvas_BCL = given.canvas_BCL.clone()
    canvas_BCL[1, 0, :5] = predicted[:5]
    canvas_BCL[1, 0, 5:] = (predicted[5:] + 1) % V
    measured = objective.evaluate(replace(given, canvas_BCL=canvas_BCL))
    assert measured.is_correct_BCL[1, 0].tolist() == [True] * 5 + [False] * 3


def test_evaluation_takes_three_passes_without_gradients_and_leaves_the_mode_as_it_was(model):
    given, objective = batch(), Objective(model, Linear(), UNIFORM, SEED)
    passes: list[tuple[bool, bool, int]] = []
    hook = model.layers[0].register_forward_pre_hook(
        lambda module, inputs: passes.append((torch.is_grad_enabled(), module.training, inputs[0].shape[:2].numel()))
    )
    objective.train()
    measured = objective.evaluate(given)
    hook.remove()
    assert objective.training and model.layers[0].training
    model.eval()
    clean, canvases = given.tokens_BS.numel(), given.canvas_BCL.numel()
    assert passes == [(False, False, clean), (False, False, canvases), (False, False, canvases)]
    assert not any(field.requires_grad for field in measured)


def test_evaluation_of_absent_canvases_and_of_none_at_all(model):
    objective = Objective(model, Linear(), UNIFORM, SEED)
    a, b = tokens(20, 3), tokens(30, 4)
    some = lay_out([CleanRow(a, []), CleanRow(b, [Canvas(b[9 : 9 + L], 9, t=0.5, address=(0, 1, 0))])], L, pad_id=0)
    alone = lay_out([CleanRow(b, [Canvas(b[9 : 9 + L], 9, t=0.5, address=(0, 1, 0))])], L, pad_id=0)
    measured, expected = objective.evaluate(some), objective.evaluate(alone)
    assert not measured.loss_BCL[0].any() and not measured.factor_BCL[0].any()
    torch.testing.assert_close(measured.signal_loss_BCL[1], expected.signal_loss_BCL[0])
    none = objective.evaluate(lay_out([CleanRow(a, [])], L, pad_id=0))
    assert not none.loss_BCL.any() and none.ar_loss_BS.any()


class WritesInPlace:
    """Uniform noise, and a weight of the noise level, that write into all tensors that they are given."""

    def corrupt(self, canvas_BCL: Tensor, alpha_BC: Tensor, address_BC3: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        noisy_BCL, is_corrupted_BCL = UniformCorruption(V).corrupt(canvas_BCL, alpha_BC, address_BC3, seed)
        address_BC3.zero_()
        return canvas_BCL.copy_(noisy_BCL), is_corrupted_BCL

    def weigh(self, schedule: Schedule, t_BC: Tensor, canvas_BCL: Tensor, is_corrupted_BCL: Tensor) -> Tensor:
        canvas_BCL.zero_()
        is_corrupted_BCL.zero_()
        return t_BC.mul_(2)[..., None]


class Doubled:
    def weigh(self, schedule: Schedule, t_BC: Tensor, canvas_BCL: Tensor, is_corrupted_BCL: Tensor) -> Tensor:
        return 2 * t_BC[..., None]


def test_parts_that_write_into_their_arguments_change_neither_targets_nor_times(model):
    own, same = WritesInPlace(), batch()
    mine = Objective(model, Linear(), own, SEED, weight=own, positions="corrupted")
    plain = Objective(model, Linear(), UniformCorruption(V), SEED, weight=Doubled(), positions="corrupted")
    given = batch()
    assert {name: x.item() for name, x in mine(given).items()} == {name: x.item() for name, x in plain(same).items()}
    for one, other in zip(mine.evaluate(given), plain.evaluate(same), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(given.canvas_BCL, same.canvas_BCL) and torch.equal(given.t_BC, same.t_BC)


def test_autocast_leaves_an_fp64_model_alone(model):
    """As it leaves torch's own operations on fp64."""
    objective = Objective(model, Linear(), UniformCorruption(V), SEED)
    with torch.autocast("cpu"):
        found = objective(batch())
    assert {name: x.item() for name, x in found.items()} == {name: x.item() for name, x in objective(batch()).items()}
