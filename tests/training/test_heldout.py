"""Held-out figures: exact sums over batches and ranks, by noise level, with and without the signal."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import nn

from blockdiff.canvas import Canvas, CleanRow, lay_out
from blockdiff.checkpoint import init
from blockdiff.data.canvas_choice import AllCanvases
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.data.step_batches import heldout_batches
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.diffusion.weight import ElboWeight
from blockdiff.errors import RunError
from blockdiff.objective import Evaluation, Objective
from blockdiff.parallel.ranks import Ranks
from blockdiff.parallel.signals import Interrupted
from blockdiff.training.kinds.canvas_heldout import heldout
from tests.support.oracle import TWO_LAYERS, tiny_config

pytestmark = pytest.mark.quick

ALONE = Ranks(torch.device("cpu"))
L = 4


def row(sample: int, canvases: int = 2) -> CleanRow:
    """A row whose canvases have their own noise levels, coins and lengths."""
    tokens = [2, *((3 * sample + i) % 9 + 3 for i in range(10))]
    made = [
        Canvas(
            tokens[start : start + L],
            start,
            length=L - (sample + k) % 2,
            t=((sample * 2 + k) * 0.17) % 1.0,
            coin=(sample + k) % 3 == 0,
            address=(-1, sample, k),
            weight=1.0 / (1 + sample),
            content=2 + sample % 3,
        )
        for k, start in enumerate((1, 5)[:canvases])
    ]
    return CleanRow(tokens, made, sample_id=sample)


class Known(nn.Module):
    """An objective whose losses are known: whole quarters made of the address, so that every sum is exact."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.was_training: set[bool] = set()

    def canvas_count(self, batch):
        return batch.canvas_count()

    def evaluate(self, batch):
        self.was_training.add(self.inner.training)
        assert not torch.is_grad_enabled()
        column = torch.arange(L)
        base_BCL = batch.address_BC3[..., 1:2] * 10 + batch.address_BC3[..., 2:] * 5 + column
        is_corrupted_BCL = base_BCL % 3 == 0
        place_BS = batch.sample_id_B[:, None] + torch.arange(batch.tokens_BS.shape[1])
        return Evaluation(
            is_corrupted_BCL,
            base_BCL * 0.25,
            base_BCL % 2 == 0,
            base_BCL * 0.5 + 1,
            base_BCL % 4 != 0,
            place_BS * 0.25,
            place_BS % 5 == 0,
            batch.weight_BC[..., None] * batch.is_scored_BCL * 2.0,
        )


def by_hand(rows: list[CleanRow], noise_levels: int) -> dict:
    """The same figures position after position, from the rows."""
    sums: dict = defaultdict(lambda: [0, 0.0])

    def add(name, value, count=1.0):
        sums[name][0] += count
        sums[name][1] += value

    for each in rows:
        for canvas in each.canvases:
            level = min(int(canvas.t * noise_levels), noise_levels - 1)
            for column in range(canvas.length):
                base = canvas.address[1] * 10 + canvas.address[2] * 5 + column
                part = "corrupted" if base % 3 == 0 else "kept"
                values = {
                    "loss": base * 0.5 + 1,
                    "accuracy": base % 4 != 0,
                    "loss_no_signal": base * 0.25,
                    "accuracy_no_signal": base % 2 == 0,
                }
                for name, value in values.items():
                    add(f"heldout_{part}_{name}", value)
                    add((level, f"{part}_{name}"), value)
                at_coin = "" if canvas.coin else "_no_signal"
                add("heldout_canvas_loss", values["loss" + at_coin])
                add("heldout_canvas_accuracy", values["accuracy" + at_coin])
                if column < canvas.content:
                    add("heldout_response_accuracy", values["accuracy" + at_coin])
                add("heldout_weighted_loss", 2 * canvas.weight * values["loss" + at_coin], canvas.weight)
        for column in range(len(each.tokens) - 1):
            add("heldout_ar_loss", (each.sample_id + column) * 0.25)
            add("heldout_ar_accuracy", (each.sample_id + column) % 5 == 0)
    return {name: (count, total / count) for name, (count, total) in sums.items()}


ROWS = [row(0), row(1), row(2, canvases=1), row(3), row(4, canvases=0), row(5), row(6)]
PARTS = [ROWS[:3], ROWS[3:4], ROWS[4:5], ROWS[5:]]


def batches(parts):
    return [lay_out(part, L, pad_id=0) for part in parts]


@pytest.mark.parametrize("noise_levels", [1, 3, 5])
def test_every_figure_is_the_mean_counted_by_hand(noise_levels):
    record = heldout(Known(), batches(PARTS), ALONE, noise_levels=noise_levels)
    expected = by_hand(ROWS, noise_levels)
    levels = record.pop("heldout_levels")
    assert set(record) == {name for name in expected if isinstance(name, str)}
    for name, value in record.items():
        assert value == pytest.approx(expected[name][1], rel=1e-6 if name == "heldout_weighted_loss" else 1e-12), name
    assert [(level["t_from"], level["t_to"]) for level in levels] == [
        (round(i / noise_levels, 6), round((i + 1) / noise_levels, 6)) for i in range(noise_levels)
    ]
    for number, level in enumerate(levels):
        for part in ("corrupted", "kept"):
            count, _ = expected.get((number, f"{part}_loss"), (0, None))
            assert level[f"{part}_count"] == count
        got = {name: value for name, value in level.items() if "loss" in name or "accuracy" in name}
        own = {name[1]: mean for name, (_, mean) in expected.items() if name[0] == number}
        assert got == pytest.approx(own, rel=1e-12)


def test_how_the_batches_are_cut_changes_nothing():
    expected = heldout(Known(), batches(PARTS), ALONE)
    for parts in ([ROWS], [[each] for each in ROWS], [ROWS[:5], ROWS[5:]]):
        assert heldout(Known(), batches(parts), ALONE) == expected


def test_ranks_with_uneven_batches_or_none_get_the_figures_of_one_process():
    together, sent = threading.Barrier(3), [torch.empty(0)] * 3

    class Rank(Ranks):
        """One of three ranks, each in a thread of its own."""

        def sum(self, values):
            sent[self.rank] = values
            together.wait(timeout=600)
            return torch.stack(sent).sum(0)

        def at_own_pace(self, doing):
            return ALONE.at_own_pace(doing)

    shares = [batches(PARTS[:3]), batches(PARTS[3:]), []]

    def of_rank(rank):
        return heldout(Known(), shares[rank], Rank(ALONE.device, rank, 3))

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(of_rank, range(3)))
    assert ranks == [heldout(Known(), batches(PARTS), ALONE)] * 3


def test_a_mean_of_nothing_is_left_out():
    record = heldout(Known(), batches([ROWS[4:5]]), ALONE, noise_levels=2)
    assert set(record) == {"heldout_ar_loss", "heldout_ar_accuracy", "heldout_levels"}
    assert record["heldout_levels"][1] == {"t_from": 0.5, "t_to": 1.0, "kept_count": 0, "corrupted_count": 0}
    batch = batches([ROWS[:1]])[0]
    silent = replace(batch, is_ar_scored_BS=torch.zeros_like(batch.is_ar_scored_BS))
    assert "heldout_ar_loss" not in heldout(Known(), [silent], ALONE)


def test_t_of_one_is_in_the_last_level():
    canvas = replace(row(0).canvases[0], t=1.0, length=L)
    record = heldout(Known(), [lay_out([CleanRow([2, 3, 4, 5, 6], [canvas])], L, pad_id=0)], ALONE)
    assert [level["corrupted_count"] + level["kept_count"] for level in record["heldout_levels"]] == [0, 0, 0, 0, L]


@pytest.mark.parametrize(
    ("field", "part"), [("ar_loss_BS", "AR"), ("loss_BCL", "canvas"), ("signal_loss_BCL", "canvas")]
)
def test_a_loss_that_is_not_finite_is_an_error_that_says_which(field, part):
    class Broken(Known):
        def evaluate(self, batch):
            measured = super().evaluate(batch)
            return measured._replace(**{field: getattr(measured, field) * float("nan")})

    with pytest.raises(RunError, match=f"held-out {part} loss"):
        heldout(Broken(), batches(PARTS), ALONE)


def test_modes_come_back_as_they_were():
    objective = Known()
    heldout(objective, batches(PARTS), ALONE)
    assert objective.was_training == {False} and objective.training and objective.inner.training


# --- the objective itself ---------------------------------------------------------------------------------


EXAMPLES = [Example(n, [2, *range(3 + n, 20 + 2 * n)], [(4, 18 + n)]) for n in range(7)]


def collator(**options):
    return Collator(8, pad_id=0, fill_id=1, seed=5, time=StratifiedTime(1e-4), canvases=AllCanvases(), **options)


@pytest.fixture(scope="module")
def objective():
    config = tiny_config(canvas_length=8, **TWO_LAYERS)
    model = init(config, seed=3, dtype="float64", device="cpu", kernels="torch")
    return Objective(model, Linear(), UniformCorruption(model.vocab_size), seed=11)


def heldout_of(objective, batch_size, world=1, **options):
    """The figures of all ranks' batches as one process sums them."""
    make = collator(**options)
    each = [heldout_batches(EXAMPLES, make, batch_size, rank=rank, world=world) for rank in range(world)]
    return heldout(objective, [batch for of_rank in each for batch in of_rank], ALONE)


def close(got, expected, rel):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if name == "heldout_levels":
            for mine, other in zip(got[name], value, strict=True):
                assert mine == pytest.approx(other, rel=rel)
        else:
            assert got[name] == pytest.approx(value, rel=rel), name


def test_the_noise_of_an_example_does_not_depend_on_batch_size_or_world_size(objective):
    expected = heldout_of(objective, 7)
    assert heldout_of(objective, 7) == expected
    close(heldout_of(objective, 2), expected, rel=1e-6)
    close(heldout_of(objective, 3, world=3), expected, rel=1e-6)


def test_the_canvas_loss_is_that_of_training(objective):
    record = heldout_of(objective, 7)
    (batch,) = heldout_batches(EXAMPLES, collator(), 7)
    with torch.no_grad():
        losses = objective(batch)
    assert record["heldout_canvas_loss"] == pytest.approx(float(losses["canvas"]) / batch.canvas_count(), rel=1e-6)
    assert record["heldout_weighted_loss"] == pytest.approx(record["heldout_canvas_loss"], rel=1e-9)
    assert record["heldout_ar_loss"] == pytest.approx(float(losses["ar"]) / batch.ar_count(), rel=1e-6)


def test_a_batch_without_canvases_has_an_ar_loss_only(objective):
    record = heldout(objective, batches([ROWS[4:5]]), ALONE)
    assert set(record) == {"heldout_ar_loss", "heldout_ar_accuracy", "heldout_levels"}
    assert not any(level["corrupted_count"] or level["kept_count"] for level in record["heldout_levels"])


def test_a_weight_changes_the_weighted_loss_only(objective):
    plain = heldout_of(objective, 7)
    weighted = Objective(objective.model, Linear(), UniformCorruption(384), seed=11, weight=ElboWeight())
    record = heldout_of(weighted, 7)
    (batch,) = heldout_batches(EXAMPLES, collator(), 7)
    with torch.no_grad():
        loss = float(weighted(batch)["canvas"]) / batch.canvas_count()
    assert record.pop("heldout_weighted_loss") == pytest.approx(loss, rel=1e-6)
    assert loss != pytest.approx(plain.pop("heldout_weighted_loss"), rel=0.1)
    assert record == plain


def test_the_weighted_loss_may_be_a_mean_over_corrupted_tokens(objective):
    choices = {"positions": "corrupted", "divisor": "corrupted"}
    mean = Objective(objective.model, Linear(), UniformCorruption(384), seed=11, **choices)
    (batch,) = heldout_batches(EXAMPLES, collator(coin_probability=0.0), 7)
    measured, record = mean.evaluate(batch), heldout(mean, [batch], ALONE)
    is_counted_BCL = measured.is_corrupted_BCL & batch.is_scored_BCL
    expected = measured.loss_BCL[is_counted_BCL].double().mean().item()
    assert mean.canvas_count(batch) == is_counted_BCL.sum() < batch.canvas_count()
    assert record["heldout_weighted_loss"] == pytest.approx(expected, rel=1e-6)
    assert record["heldout_corrupted_loss_no_signal"] == pytest.approx(expected, rel=1e-6)
    split = [mean.canvas_count(part) for part in heldout_batches(EXAMPLES, collator(coin_probability=0.0), 2)]
    assert sum(split) == mean.canvas_count(batch)


def test_everything_is_corrupted_at_the_noisy_end_and_nothing_at_the_clean_one(objective):
    first, *_, last = heldout_of(objective, 7)["heldout_levels"]
    assert first["kept_count"] > 3 * first["corrupted_count"]
    assert last["corrupted_count"] > 3 * last["kept_count"]


def test_a_model_that_copies_knows_the_kept_tokens_and_only_guesses_the_others(objective):
    class Copies(nn.Module):
        """Its argmax is the token it sees; with the signal it is the truth."""

        canvas_count = objective.canvas_count

        def evaluate(self, batch):
            real = objective.evaluate(batch)
            noisy_BCL, is_corrupted_BCL = objective.corruption.corrupt(
                batch.canvas_BCL, objective.schedule.alpha(batch.t_BC), batch.address_BC3, objective.seed
            )
            assert torch.equal(real.is_corrupted_BCL, is_corrupted_BCL)
            return real._replace(
                is_correct_BCL=noisy_BCL == batch.canvas_BCL,
                signal_is_correct_BCL=torch.ones_like(is_corrupted_BCL),
            )

    record = heldout(Copies(), heldout_batches(EXAMPLES, collator(), 7), ALONE)
    assert record["heldout_kept_accuracy_no_signal"] == 1.0
    assert record["heldout_corrupted_accuracy_no_signal"] < 0.05
    assert record["heldout_kept_accuracy"] == record["heldout_corrupted_accuracy"] == 1.0
    assert all(math.isfinite(value) for name, value in record.items() if name != "heldout_levels")


def test_a_signal_is_looked_for_between_batches():
    objective, read = Known(), []

    def asked():
        return 15 * (len(read) == 2)

    def watched():
        for batch in batches(PARTS):
            read.append(batch)
            yield batch

    with pytest.raises(Interrupted):
        heldout(objective, watched(), replace(ALONE, is_stopping=asked))
    assert len(read) == 2 and objective.training
