"""Packing lays the same examples out in fewer rows: same draws, same losses, same gradients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise, permutations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from blockdiff.canvas import Batch
from blockdiff.checkpoint import init
from blockdiff.data.canvas_choice import AllCanvases, RandomCanvases
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.data.order import Order
from blockdiff.data.packing import best_fit, deal
from blockdiff.data.step_batches import micro_batches
from blockdiff.diffusion.corruption import UniformCorruption
from blockdiff.diffusion.schedule import Linear, StratifiedTime
from blockdiff.diffusion.weight import ElboWeight
from blockdiff.models.diffusion_gemma import DiffusionGemma
from blockdiff.objective import Objective
from blockdiff.parallel.ranks import Ranks
from tests.support.forked import run_ranks
from tests.support.oracle import TWO_LAYERS, oracle, ours, tiny_config, widen_routers
from tests.support.packed_ranks import everything

L, V = 8, 384
STEP = 3


def example(sample: int) -> Example:
    """5 to 60 tokens (the window is 16), one or two responses."""
    length = 5 + (7 * sample * sample) % 56
    tokens = [2, *torch.randint(3, 380, (length - 1,), generator=torch.Generator().manual_seed(sample)).tolist()]
    responses = [(2, length // 2), (length // 2 + 1, length)] if sample % 3 == 0 and length > 12 else [(2, length)]
    return Example(sample, tokens, responses)


EXAMPLES = [example(sample) for sample in range(24)]
ORDER = Order(24, 13, seed=1)


def collator(**options) -> Collator:
    return Collator(L, 0, 1, 3, StratifiedTime(), **options)


# -- which examples share a row ------------------------------------------------------------------------------


def test_the_longest_go_first_each_into_the_fullest_row_with_room():
    #       6 | 5 | 4+6=10 | 3+5=8 | 2+8=10 | 1: with room 5 (row of 5) beside room 1 none fits better
    assert best_fit([2, 5, 6, 3, 4, 1], 10) == [[2, 4], [0, 1, 3], [5]]
    assert best_fit([3, 3, 3], 3) == [[0], [1], [2]]
    assert best_fit([], 10) == []


def test_rows_hold_every_example_once_and_overflow_only_by_a_single_long_one():
    lengths = [len(each.tokens) for each in EXAMPLES]
    for capacity in (10, 33, 64, 500):
        rows = best_fit(lengths, capacity)
        assert sorted(chain(*rows)) == list(range(24))
        assert all(len(row) == 1 or sum(lengths[i] for i in row) <= capacity for row in rows)
        # no two rows would fit into one
        loads = sorted(sum(lengths[i] for i in row) for row in rows)
        assert len(loads) < 2 or loads[0] + loads[1] > capacity


def test_best_fit_needs_few_rows():
    lengths = torch.randint(1, 100, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    fewest = -(-sum(lengths) // 128)
    assert fewest <= len(best_fit(lengths, 128)) <= 11 / 9 * fewest + 1


def test_work_is_dealt_out_evenly():
    work = [9, 7, 6, 5, 5, 4, 3, 1]
    ranks = deal(work, 3)
    assert sorted(chain(*ranks)) == list(range(8))
    loads = sorted(sum(work[i] for i in rank) for rank in ranks)
    assert loads[-1] <= 4 / 3 * sum(work) / 3 and loads[-1] - loads[0] <= 2
    assert deal([5], 3) == [[0], [], []]


# -- the same batch, laid out otherwise ----------------------------------------------------------------------


def by_address(batches: list[Batch]) -> dict[tuple[int, ...], tuple]:
    """Everything drawn or copied for a canvas, and the tokens of its document before it."""
    found = {}
    for batch in batches:
        for b, c in (batch.length_BC > 0).nonzero().tolist():
            doc, start = int(batch.doc_start_BC[b, c]), int(batch.start_BC[b, c])
            key = tuple(batch.address_BC3[b, c].tolist())
            assert key not in found
            found[key] = (
                batch.canvas_BCL[b, c].tolist(),
                start - doc,
                batch.tokens_BS[b, doc:start].tolist(),
                float(batch.t_BC[b, c]),
                bool(batch.coin_BC[b, c]),
                float(batch.weight_BC[b, c]),
            )
    return found


def scored_pairs(batches: list[Batch]) -> list[tuple[int, int, int, float]]:
    """(position, token, next token, weight) of every scored pair, in some order."""
    pairs = []
    for batch in batches:
        for b, s in batch.is_ar_scored_BS.nonzero().tolist():
            token, following = batch.tokens_BS[b, s : s + 2].tolist()
            pairs.append((int(batch.positions_BS[b, s]), token, following, float(batch.ar_weight_BS[b, s])))
    return sorted(pairs)


OPTIONS = [
    {},
    {"canvases": AllCanvases()},
    {"normalisation": "example", "ar_scope": "response", "canvases": RandomCanvases(2)},
]


class Measured(list):
    """Examples whose lengths are known without reading them."""

    @property
    def lengths(self):
        return torch.tensor([len(each.tokens) for each in EXAMPLES]).numpy()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("world, size", [(1, None), (1, 2), (2, None), (4, 1)])
def test_packed_rows_hold_the_same_examples_with_the_same_draws(options, world, size):
    make = collator(**options)
    whole = micro_batches(EXAMPLES, ORDER, make, STEP)
    for examples in (EXAMPLES, Measured(EXAMPLES)):
        parts = [
            micro_batches(examples, ORDER, make, STEP, pack=80, micro_batch_size=size, rank=rank, world=world)
            for rank in range(world)
        ]
        packed = list(chain(*parts))
        assert by_address(packed) == by_address(whole) and scored_pairs(packed) == scored_pairs(whole)
        rows = sum(len(batch.tokens_BS) for batch in packed)
        assert rows <= 13 / 2 and all(batch.tokens_BS.shape[1] <= 80 for batch in packed)
        assert size is None or all(len(batch.tokens_BS) <= size for batch in packed)
        assert sum(b.canvas_count() for b in packed) == pytest.approx(sum(b.canvas_count() for b in whole), rel=1e-6)


def test_ranks_get_about_the_same_work():
    order = Order(24, 24, seed=1)
    work = [
        sum(int((b.doc_start_BS >= 0).sum() + b.length_BC.sum()) for b in batches)
        for batches in (micro_batches(EXAMPLES, order, collator(), 1, pack=64, rank=rank, world=3) for rank in range(3))
    ]
    assert max(work) <= 1.1 * min(work)


def test_an_example_longer_than_a_packed_row_has_one_to_itself():
    batches = micro_batches(EXAMPLES, Order(24, 24, seed=1), collator(), 1, pack=20, micro_batch_size=1)
    wide = [batch for batch in batches if batch.tokens_BS.shape[1] > 20]
    assert wide and all((batch.doc_start_BS == 0).all() for batch in wide)


@pytest.mark.parametrize("pack", [None, 64])
def test_rows_of_one_micro_batch_have_similar_sizes(pack):
    batches = micro_batches(EXAMPLES, ORDER, collator(canvases=AllCanvases()), STEP, micro_batch_size=2, pack=pack)
    sizes = [sorted(((batch.doc_start_BS >= 0).sum(1) + batch.length_BC.sum(1)).tolist()) for batch in batches]
    assert len(sizes) > 1 and all(after[-1] <= before[0] for before, after in pairwise(sizes))


def test_examples_are_read_once_and_in_order():
    """A stream only goes forward."""

    class Forward(list):
        def __init__(self, items):
            super().__init__(items)
            self.read: list[int] = []

        def __getitem__(self, place):
            assert not self.read or place > self.read[-1]
            self.read.append(place)
            return super().__getitem__(place)

    class InOrder:
        batch_size = 12

        def __call__(self, step):
            return [(0, (step - 1) * 12 + i) for i in range(12)]

    for pack, size in [(None, None), (None, 2), (64, 2)]:
        stream = Forward(EXAMPLES)
        for step in (1, 2):
            micro_batches(stream, InOrder(), collator(), step, pack=pack, micro_batch_size=size)
        assert stream.read == list(range(24))
    own = Forward(EXAMPLES)
    own.lengths = [len(each.tokens) for each in EXAMPLES]
    micro_batches(own, InOrder(), collator(), 1, pack=64, rank=1, world=2)
    assert len(own.read) < 12  # with lengths known, a rank reads its own examples only


# -- losses and gradients ------------------------------------------------------------------------------------


SMALL = tiny_config(canvas_length=L, **TWO_LAYERS)


@pytest.fixture(scope="module")
def model() -> DiffusionGemma:
    return ours(oracle(SMALL))


def sums_and_gradients(objective: Objective, batches: list[Batch]) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses as the loop makes them, both sums over counts, and the gradients of their sum."""
    objective.zero_grad(set_to_none=True)
    canvas_count, ar_count = (sum(getattr(b, name)() for b in batches) for name in ("canvas_count", "ar_count"))
    means = torch.zeros(2, dtype=torch.float64)
    for batch in batches:
        losses = objective(batch)
        pair = torch.stack([losses["canvas"].double() / canvas_count, losses["ar"].double() / ar_count])
        pair.sum().backward()
        means += pair.detach()
    return means, {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}


OBJECTIVES = [{}, {"weight": ElboWeight(5.0), "positions": "corrupted", "prediction": "leave_one_out"}]


def layouts(objective: Objective, choice: int) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Sums and gradients of a step without packing, packed, and packed in micro-batches of two rows."""
    make, order = collator(**(OPTIONS[2] if choice else {})), Order(24, 9, seed=1)
    for pack, size in ((None, None), (80, None), (80, 2)):
        batches = micro_batches(EXAMPLES, order, make, STEP, pack=pack, micro_batch_size=size)
        assert pack is None or sum(len(batch.tokens_BS) for batch in batches) <= 5
        yield sums_and_gradients(objective, batches)


def assert_equal_layouts(objective: Objective, choice: int, tolerance: float) -> None:
    unpacked, *packed = layouts(objective, choice)
    for means, gradients in packed:
        assert ((means - unpacked[0]).abs() <= tolerance * unpacked[0]).all()
        assert gradients.keys() == unpacked[1].keys()
        for name, expected in unpacked[1].items():
            assert (gradients[name] - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.quick
@pytest.mark.parametrize("choice", range(2))
def test_losses_and_gradients_are_those_of_the_unpacked_run(choice):
    """In fp32, from the weights a training starts with."""
    model = init(SMALL, seed=3, device="cpu", kernels="torch")
    widen_routers(model)
    objective = Objective(model, Linear(), UniformCorruption(V), 5, **OBJECTIVES[choice])
    assert_equal_layouts(objective, choice, 1e-5)


@pytest.mark.parametrize("choice", range(2))
def test_packing_changes_nothing_but_rounding(model, choice):
    objective = Objective(model, Linear(), UniformCorruption(V), 5, **OBJECTIVES[choice])
    assert_equal_layouts(objective, choice, 1e-10)


@pytest.mark.quick
def test_documents_of_a_packed_row_do_not_see_each_other(model):
    """Changing one example changes nothing of another's losses, token by token."""
    objective = Objective(model, Linear(), UniformCorruption(V), 5)
    [batch] = micro_batches(EXAMPLES, ORDER, collator(), STEP, pack=400)
    doc = int(batch.doc_start_BS[0].unique()[2])
    other = replace(batch, tokens_BS=torch.where(batch.doc_start_BS == doc, (batch.tokens_BS + 5) % V, batch.tokens_BS))
    one, two = objective.evaluate(batch), objective.evaluate(other)
    is_own_BC, is_own_BS = batch.doc_start_BC == doc, batch.doc_start_BS == doc
    assert is_own_BC.any()
    for field in ("loss_BCL", "signal_loss_BCL"):
        a, b = getattr(one, field), getattr(two, field)
        torch.testing.assert_close(a[~is_own_BC], b[~is_own_BC], rtol=1e-6, atol=1e-6)
        assert not torch.allclose(a[is_own_BC], b[is_own_BC])
    torch.testing.assert_close(one.ar_loss_BS[~is_own_BS], two.ar_loss_BS[~is_own_BS], rtol=1e-6, atol=1e-6)


# -- ranks without rows --------------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_rank_without_rows_gets_padding_that_counts_nothing_and_trains_nothing(model):
    parts = [micro_batches(EXAMPLES, ORDER, collator(), STEP, pack=1000, rank=rank, world=3) for rank in range(3)]
    assert [len(part) for part in parts] == [1, 1, 1]
    assert [batch.canvas_count() > 0 for [batch] in parts] == [True, False, False]
    [nothing] = parts[2]
    assert nothing.canvas_count() == nothing.ar_count() == 0.0 and nothing.sample_id_B.tolist() == [-1]
    objective = Objective(model, Linear(), UniformCorruption(V), 5)
    losses = objective(nothing)
    assert (losses["canvas"].item(), losses["ar"].item()) == (0.0, 0.0)
    objective.zero_grad(set_to_none=True)
    (losses["canvas"] + losses["ar"]).backward()
    trained = [p for p in objective.parameters() if p.requires_grad]
    assert all(p.grad is None or not p.grad.any() for p in trained)


def test_two_processes_of_which_one_gets_nothing_train_as_one_does(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    everything(Ranks(torch.device("cpu")), one)
    run_ranks(2, everything, two)
    alone, first, second = (
        json.loads((where / f"{rank}.json").read_text()) for where, rank in ((one, 0), (two, 0), (two, 1))
    )
    assert (alone["rows"], first["rows"], second["rows"]) == ([1, 2, 6], [1, 1, 3], [0, 1, 3])
    for got, expected in zip(first["records"], alone["records"], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    expected, *ranks = (load_file(file) for file in (one / "0.safetensors", *sorted(two.glob("*.safetensors"))))
    for tensors in ranks:
        for name, tensor in expected.items():
            assert (tensors[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


@pytest.mark.quick
def test_joining_does_not_depend_on_the_order_of_slots():
    """Rows list their examples by slot, so how they were found leaves no trace."""
    for lengths in permutations([5, 4, 3, 2]):
        assert all(row == sorted(row) for row in best_fit(lengths, 7))
