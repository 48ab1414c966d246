"""Which canvases a batch runs and what is drawn for them: by address, never by how the batch is split."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch

from blockdiff.data.canvas_choice import AllCanvases, FirstCanvases, LastCanvases, RandomCanvases
from blockdiff.data.collate import Collator
from blockdiff.data.example import Example
from blockdiff.data.order import Order
from blockdiff.data.step_batches import heldout_batches, micro_batches, rank_slots
from blockdiff.diffusion.schedule import StratifiedTime, UniformTime
from blockdiff.errors import DataError, RecipeError

pytestmark = pytest.mark.quick


def example(sample_id, prompt=3, responses=(10,), between=2):
    """Rows of unequal lengths: bos, prompt, then responses with other turns in between."""
    tokens, spans = [2, *range(100, 100 + prompt)], []
    for length in responses:
        spans.append((len(tokens), len(tokens) + length))
        tokens += [*range(200 + len(tokens), 200 + len(tokens) + length), *[50] * between]
    return Example(sample_id, tokens[: len(tokens) - between], spans)


EXAMPLES = [example(i, prompt=1 + i % 4, responses=(5 + i % 9, 3)[: 1 + i % 2]) for i in range(20)]


ONE = RandomCanvases(1)


def collator(canvases=ONE, seed=3, time=None, coin=0.5):
    return Collator(4, 0, 1, seed, time or StratifiedTime(), canvases=canvases, coin_probability=coin)


def by_address(batches):
    """address -> everything drawn or copied for that canvas."""
    found = {}
    for batch in batches:
        for b, c in (batch.length_BC > 0).nonzero().tolist():
            start, length = int(batch.start_BC[b, c]), int(batch.length_BC[b, c])
            found[tuple(batch.address_BC3[b, c].tolist())] = (
                batch.canvas_BCL[b, c].tolist(),
                start,
                length,
                batch.tokens_BS[b, :start].tolist(),
                float(batch.t_BC[b, c]),
                bool(batch.coin_BC[b, c]),
            )
    return found


@pytest.mark.parametrize("canvases", [RandomCanvases(1), RandomCanvases(2), AllCanvases()])
@pytest.mark.parametrize("time", [StratifiedTime(), UniformTime()])
def test_draws_do_not_depend_on_ranks_or_micro_batches(canvases, time):
    # Trap 5: the same global batch of 8 rows on 1, 2 and 4 ranks, and on one rank in pieces of 3.
    order, make = Order(len(EXAMPLES), 8, seed=3), collator(canvases, time=time)
    for step in (1, 2, 3):
        whole = by_address(micro_batches(EXAMPLES, order, make, step))
        assert len({draw[4] for draw in whole.values()}) == len(whole), "every canvas has its own t"
        for world, size in [(2, None), (4, None), (1, 3), (2, 1)]:
            parts = chain.from_iterable(
                micro_batches(EXAMPLES, order, make, step, micro_batch_size=size, rank=rank, world=world)
                for rank in range(world)
            )
            assert by_address(parts) == whole


def test_coins_and_canvas_choice_differ_between_ranks_and_epochs():
    examples = [example(i, responses=(40,)) for i in range(64)]
    order, make = Order(64, 64, seed=3), collator()
    choices = [
        [(a[1], a[2], draw[5]) for a, draw in by_address(micro_batches(examples, order, make, step)).items()]
        for step in (1, 2)
    ]
    first, second = (sorted(choice) for choice in choices)
    assert [sample for sample, _, _ in first] == list(range(64)) == [sample for sample, _, _ in second]
    assert first != second
    assert len({canvas for _, canvas, _ in first}) == 10
    assert 16 < sum(coin for _, _, coin in first) < 48


def test_stratified_times_cover_the_range_evenly_over_all_ranks():
    examples = [example(i) for i in range(32)]
    for step in (1, 2, 3):
        t = torch.cat(
            [
                batch.t_BC.flatten()
                for rank in range(4)
                for batch in micro_batches(
                    examples, Order(32, 16, 0), collator(), step, micro_batch_size=2, rank=rank, world=4
                )
            ]
        )
        assert (t.sort().values * 16).floor().tolist() == list(range(16))


def test_heldout_draws_are_fixed_whatever_the_batch_size():
    # Trap 5: one noise level per example, the same at every evaluation and in no batch another.
    make = collator(RandomCanvases(2))
    whole = by_address(heldout_batches(EXAMPLES, make, batch_size=20))
    again = by_address(heldout_batches(EXAMPLES, make, batch_size=20))
    small = by_address(chain(*(heldout_batches(EXAMPLES, make, 3, rank=r, world=2) for r in range(2))))
    assert whole == again == small
    assert len({draw[4] for draw in whole.values()}) == len(whole) > 20
    assert {address[0] for address in whole} == {-1}
    training = by_address(micro_batches(EXAMPLES, Order(20, 20, 3), make, 1))
    assert {a[1:]: draw[4] for a, draw in whole.items()} != {a[1:]: draw[4] for a, draw in training.items()}


def test_short_prompts_get_no_position_gap():
    # Trap 4: one end-of-prompt index for the whole batch would start every canvas at the longest prompt.
    short, long = example(0, prompt=1), example(1, prompt=9)
    batch = collator(AllCanvases())([short, long], epoch=0, step=1, slots=[0, 1], total_slots=2)
    assert batch.start_BC[:, 0].tolist() == [2, 10]
    assert batch.doc_start_BC.tolist() == [[0, 0, 0], [0, 0, 0]]
    for b, row in enumerate((short, long)):
        assert batch.positions_BS[b, : len(row.tokens)].tolist() == list(range(len(row.tokens)))
        assert batch.canvas_BCL[b, 0].tolist() == row.tokens[row.responses[0][0] :][:4]


def test_every_turn_and_every_tail_is_scored_and_the_fill_stays_out_of_the_row():
    # Trap 8: 10 + 3 response tokens in canvases of 4 are 3 + 1 canvases.
    row = example(7, prompt=2, responses=(10, 3))
    batch = collator(AllCanvases())([row], epoch=0, step=1, slots=[0], total_slots=1)
    (first, _), (second, _) = row.responses
    assert batch.start_BC[0].tolist() == [first, first + 4, first + 8, second]
    tokens = row.tokens
    assert batch.canvas_BCL[0].tolist() == [
        tokens[first : first + 4],
        tokens[first + 4 : first + 8],
        [*tokens[first + 8 : first + 10], 1, 1],
        [*tokens[second : second + 3], 1],
    ]
    assert batch.is_scored_BCL.all() and batch.canvas_count() == 16
    assert batch.tokens_BS[0].tolist() == tokens
    assert batch.ar_count() == len(tokens) - 1


def test_a_truncated_response_has_no_fill():
    row = Example(0, [2, 9, 10, 11, 12, 13, 14, 15, 16, 17], [(2, 10)], is_truncated=True)
    batch = collator(AllCanvases())([row], epoch=0, step=1, slots=[0], total_slots=1)
    assert batch.canvas_BCL.tolist() == [[[10, 11, 12, 13], [14, 15, 16, 17]]]


def test_chosen_canvases_are_a_uniform_sorted_choice_without_repeats():
    rows = [example(i, responses=(17,)) for i in range(300)]  # 5 canvases
    batch = collator(RandomCanvases(2))(rows, epoch=4, step=1, slots=range(300), total_slots=300)
    chosen = batch.address_BC3[..., 2]
    assert (chosen[:, 0] < chosen[:, 1]).all()
    assert chosen.flatten().bincount(minlength=5).tolist() == pytest.approx([120] * 5, abs=40)
    alone = collator(RandomCanvases(2))(rows[5:6], epoch=4, step=1, slots=[5], total_slots=300)
    assert torch.equal(alone.address_BC3[0], batch.address_BC3[5])
    assert torch.equal(alone.t_BC[0], batch.t_BC[5])


def test_the_choice_does_not_depend_on_longer_neighbours():
    rows = [example(0, responses=(20,)), example(1, responses=(90,))]
    both = collator()(rows, epoch=0, step=1, slots=[0, 1], total_slots=2)
    alone = collator()(rows[:1], epoch=0, step=1, slots=[0], total_slots=2)
    assert torch.equal(both.address_BC3[0], alone.address_BC3[0])


@pytest.mark.parametrize(
    "choice, expected",
    [(FirstCanvases(2), [[0, 1], [0, 1], [0]]), (LastCanvases(2), [[3, 4], [1, 2], [0]])],
)
def test_the_first_or_last_canvases_of_an_example_are_those(choice, expected):
    rows = [example(0, responses=(17,)), example(1, responses=(10,)), example(2, responses=(3,))]
    for epoch in (0, 1):
        batch = collator(choice)(rows, epoch=epoch, step=1, slots=range(3), total_slots=3)
        chosen = [
            [canvas for canvas, length in zip(row, lengths, strict=True) if length]
            for row, lengths in zip(batch.address_BC3[..., 2].tolist(), batch.length_BC.tolist(), strict=True)
        ]
        assert chosen == expected


@pytest.mark.parametrize("scope", ["all", "response"])
@pytest.mark.parametrize("canvases", [RandomCanvases(1), RandomCanvases(2), AllCanvases()])
def test_normalised_by_example_every_example_weighs_one_in_both_losses(canvases, scope):
    make = replace(collator(canvases), normalisation="example", ar_scope=scope)
    batch = make(EXAMPLES, epoch=0, step=1, slots=range(20), total_slots=20)
    per_row = (batch.weight_BC[..., None] * batch.is_scored_BCL).sum((1, 2))
    torch.testing.assert_close(per_row, torch.ones(20))
    torch.testing.assert_close((batch.ar_weight_BS * batch.is_ar_scored_BS).sum(1), torch.ones(20))
    assert batch.canvas_count() == pytest.approx(20) and batch.ar_count() == pytest.approx(20)
    for b in range(20):
        assert len(batch.weight_BC[b][batch.length_BC[b] > 0].unique()) == 1
        assert len(batch.ar_weight_BS[b][batch.is_ar_scored_BS[b]].unique()) == 1


def test_normalised_by_token_every_position_weighs_one():
    batch = collator(AllCanvases())(EXAMPLES, epoch=0, step=1, slots=range(20), total_slots=20)
    assert batch.canvas_count() == int(batch.is_scored_BCL.sum()) and (batch.weight_BC == 1).all()
    assert batch.ar_count() == sum(len(each.tokens) - 1 for each in EXAMPLES) and (batch.ar_weight_BS == 1).all()


def test_an_ar_scope_of_responses_scores_the_pairs_whose_target_is_in_one():
    row = example(7, prompt=2, responses=(4, 2))
    #     bos p p r r r r x x r r
    assert row.responses == [(3, 7), (9, 11)] and len(row.tokens) == 11
    batch = replace(collator(), ar_scope="response")([row], epoch=0, step=1, slots=[0], total_slots=1)
    assert batch.is_ar_scored_BS[0].long().tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0]
    assert batch.ar_count() == 6
    from_the_start = Example(0, [2, 5, 6], [(0, 3)])  # nothing predicts the first token of a row
    batch = replace(collator(), ar_scope="response")([from_the_start], epoch=0, step=1, slots=[0], total_slots=1)
    assert batch.is_ar_scored_BS.tolist() == [[True, True, False]]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda n: torch.full((n,), 1.5), r"returned t = 1\.5; .*times from 0 to 1"),
        (lambda n: torch.full((n,), float("nan")), "returned t = nan"),
        (lambda n: torch.zeros(n + 1), r"returned shape \[5\] for 4 canvases"),
        (lambda n: [0.5] * n, "returned a list for 4 canvases"),
    ],
    ids=["beyond 1", "no number", "too many", "a list"],
)
def test_times_of_ones_own_are_those_of_the_canvases_and_from_0_to_1(made, said):
    class Own:
        def draw(self, seed, step, slot_N, canvas_N, total):
            return made(len(slot_N))

    with pytest.raises(RecipeError, match=r"^objective\.time: Own\.draw\(\) " + said):
        collator(time=Own())(EXAMPLES[:4], epoch=0, step=1, slots=range(4), total_slots=4)


@pytest.mark.parametrize("coin, share", [(0.0, 0.0), (1.0, 1.0)])
def test_the_coin_probability_reaches_its_ends(coin, share):
    batch = collator(coin=coin)(EXAMPLES, epoch=0, step=1, slots=range(20), total_slots=20)
    assert batch.coin_BC.float().mean() == share


def test_an_epoch_shows_every_example_once_and_steps_cross_epochs():
    order = Order(examples=10, batch_size=4, seed=1)
    taken = list(chain.from_iterable(order(step) for step in range(1, 6)))
    assert [epoch for epoch, _ in taken] == [0] * 10 + [1] * 10
    first, second = taken[:10], taken[10:]
    assert sorted(i for _, i in first) == sorted(i for _, i in second) == list(range(10))
    assert [i for _, i in first] != [i for _, i in second]
    assert {epoch for epoch, _ in order(3)} == {0, 1}


def test_the_order_of_a_step_needs_no_history_and_depends_on_the_seed():
    assert Order(10, 4, seed=1)(57) == Order(10, 4, seed=1)(57)
    assert Order(10, 4, seed=1)(57) != Order(10, 4, seed=2)(57)
    assert len(Order(3, 8, seed=1)(1)) == 8


def test_slots_are_dealt_out_evenly_and_completely():
    for total, world in [(8, 1), (8, 4), (7, 3), (2, 4)]:
        dealt = [rank_slots(rank, world, total) for rank in range(world)]
        assert list(chain(*dealt)) == list(range(total))
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_fewer_rows_than_ranks_are_refused():
    with pytest.raises(DataError, match=r"train.batch_size: 2 .*3 processes"):
        micro_batches(EXAMPLES, Order(20, 2, 0), collator(), 1, rank=0, world=3)


def test_without_an_ar_loss_rows_end_where_the_last_canvas_starts():
    whole = collator()(EXAMPLES, epoch=0, step=1, slots=range(20), total_slots=20)
    cut_off = replace(collator(), scores_ar=False)(EXAMPLES, epoch=0, step=1, slots=range(20), total_slots=20)
    assert cut_off.ar_count() == 0 < whole.ar_count()
    assert cut_off.tokens_BS.shape[1] == int(cut_off.start_BC.max()) < whole.tokens_BS.shape[1]
    for b, start in enumerate(whole.start_BC.amax(1).tolist()):
        assert torch.equal(cut_off.tokens_BS[b, :start], whole.tokens_BS[b, :start])
    assert torch.equal(cut_off.canvas_BCL, whole.canvas_BCL) and torch.equal(cut_off.t_BC, whole.t_BC)
