"""Cutting, filling, laying out and thinning canvases."""

from __future__ import annotations

import pytest
import torch

from blockdiff.canvas import Canvas, CleanRow, cut, fill, joined, lay_out

pytestmark = pytest.mark.quick


def example_batch():
    first = CleanRow(
        tokens=[2, 11, 12, 13, 14, 15, 2, 21, 22],
        doc_starts=(0, 6),
        canvases=[
            Canvas([22, 1], start=8, doc_start=6, t=0.75, coin=True, address=(3, 70, 2)),
            Canvas([12, 13], start=2, t=0.25, coin=False, address=(3, 70, 0)),
            Canvas([14, 15], start=4, t=0.5, coin=True, address=(3, 70, 1)),
        ],
        sample_id=70,
    )
    second = CleanRow(tokens=[2, 31], canvases=[Canvas([31, 1], start=1, address=(3, 71, 0))], sample_id=71)
    return lay_out([first, second], canvas_length=2, pad_id=0)


def test_a_response_is_cut_into_whole_canvases_and_a_rest():
    assert cut((3, 13), 4) == [(3, 7), (7, 11), (11, 13)]
    assert cut((3, 11), 4) == [(3, 7), (7, 11)]
    assert cut((3, 4), 4) == [(3, 4)]
    assert cut((3, 3), 4) == []


def test_the_fill_makes_the_last_canvas_whole():
    assert fill([7, 8], 4, fill_id=1) == [7, 8, 1, 1]
    assert fill([7, 8], 2, fill_id=1) == [7, 8]


def test_positions_restart_with_each_document_and_padding_is_marked():
    batch = example_batch()
    assert batch.tokens_BS.tolist() == [[2, 11, 12, 13, 14, 15, 2, 21, 22], [2, 31, 0, 0, 0, 0, 0, 0, 0]]
    assert batch.positions_BS.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2], [0, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert batch.doc_start_BS.tolist() == [[0] * 6 + [6] * 3, [0, 0] + [-1] * 7]


def test_no_next_token_pair_crosses_a_document_or_touches_padding():
    is_scored = example_batch().is_ar_scored_BS.long().tolist()
    assert is_scored == [[1, 1, 1, 1, 1, 0, 1, 1, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0]]


def test_canvases_are_sorted_by_document_and_start():
    batch = example_batch()
    assert batch.start_BC.tolist() == [[2, 4, 8], [1, 0, 0]]
    assert batch.doc_start_BC.tolist() == [[0, 0, 6], [0, 0, 0]]
    assert batch.length_BC.tolist() == [[2, 2, 2], [2, 0, 0]]
    assert batch.canvas_BCL.tolist() == [[[12, 13], [14, 15], [22, 1]], [[31, 1], [0, 0], [0, 0]]]
    assert batch.address_BC3[0].tolist() == [[3, 70, 0], [3, 70, 1], [3, 70, 2]]


def test_counts_are_of_scored_positions():
    batch = example_batch()
    assert batch.canvas_count() == 8
    assert batch.ar_count() == 8
    short = lay_out([CleanRow([2, 5, 6], [Canvas([5, 6, 0], start=1, length=2)])], canvas_length=3, pad_id=0)
    assert short.is_scored_BCL.tolist() == [[[True, True, False]]]
    assert short.canvas_count() == 2


def test_pinned_places_are_not_scored_wherever_they_are():
    first = CleanRow([2, 5, 6, 7, 8, 9], [Canvas([8, 9, 1], start=4, pinned=[1]), Canvas([5, 6, 7], 1, pinned=(0, 2))])
    second = CleanRow([2, 5], [Canvas([5, 1, 1], start=1, length=2, pinned={0})])
    apart, packed = (lay_out(rows, canvas_length=3, pad_id=0) for rows in ([first, second], [joined([first, second])]))
    expected = [[False, True, False], [True, False, True], [False, True, False]]
    assert apart.is_scored_BCL[apart.length_BC > 0].tolist() == expected
    assert packed.is_scored_BCL[0].tolist() == expected
    assert apart.is_pinned_BCL[1].tolist() == [[True, False, False], [False] * 3]
    assert apart.canvas_count() == packed.canvas_count() == 4
    assert apart.select(apart.start_BC == 4)[0].is_pinned_BCL.tolist() == [[[False, True, False]]]


def test_counts_are_sums_of_weights():
    row = CleanRow(
        [2, 5, 6, 7],
        [Canvas([6, 7], start=2, weight=0.5), Canvas([5, 6], start=1, weight=0.125)],
        ar_weights=[0.25, 0.0, 0.5, 9.0],  # the last token of a document has no pair
    )
    batch = lay_out([row, CleanRow([2, 5], [])], canvas_length=2, pad_id=0)
    assert batch.weight_BC[0].tolist() == [0.125, 0.5]
    assert batch.canvas_count() == 2 * 0.125 + 2 * 0.5
    assert batch.is_ar_scored_BS.tolist() == [[True, False, True, False], [True, False, False, False]]
    assert batch.ar_count() == 0.25 + 0.5 + 1.0


def test_joined_rows_keep_their_documents_canvases_and_weights():
    first = CleanRow([2, 5, 6], [Canvas([6, 1], start=2, t=0.5, address=(0, 7, 0))], sample_id=7)
    second = CleanRow([2, 8, 9, 4], [Canvas([8, 9], start=1, weight=0.5)], sample_id=8, ar_weights=[0.0, 1.0, 0.5, 0.0])
    both = joined([first, second])
    assert both.tokens == [2, 5, 6, 2, 8, 9, 4] and both.doc_starts == [0, 3] and both.sample_id == 7
    assert [(c.start, c.doc_start, c.t, c.weight, c.address) for c in both.canvases] == [
        (2, 0, 0.5, 1.0, (0, 7, 0)),
        (4, 3, 0.0, 0.5, (0, 0, 0)),
    ]
    batch = lay_out([both], canvas_length=2, pad_id=0)
    assert batch.positions_BS.tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert batch.is_ar_scored_BS.long().tolist() == [[1, 1, 0, 0, 1, 1, 0]]
    assert batch.ar_weight_BS[batch.is_ar_scored_BS].tolist() == [1.0, 1.0, 1.0, 0.5]
    twice = joined([both, first])
    assert twice.doc_starts == [0, 3, 7] and [c.start for c in twice.canvases] == [2, 4, 9]
    assert joined([first]).ar_weights is None


def test_a_row_without_tokens_is_a_row_of_padding():
    batch = lay_out([CleanRow((), (), doc_starts=())], canvas_length=2, pad_id=5)
    assert batch.tokens_BS.tolist() == [[5]] and batch.doc_start_BS.tolist() == [[-1]]
    assert batch.canvas_count() == batch.ar_count() == 0


def test_keeping_the_coin_canvases_drops_rows_without_any():
    batch = example_batch()
    kept, rows = batch.select(batch.coin_BC)
    assert rows.tolist() == [0]
    assert kept.start_BC.tolist() == [[4, 8]]
    assert kept.canvas_BCL.tolist() == [[[14, 15], [22, 1]]]
    assert kept.t_BC.tolist() == [[0.5, 0.75]]
    assert kept.coin_BC.all()
    assert torch.equal(kept.tokens_BS, batch.tokens_BS[:1])
    assert kept.sample_id_B.tolist() == [70]


def test_keeping_unequal_numbers_leaves_absent_canvases_empty():
    batch = example_batch()
    is_kept = torch.tensor([[True, False, True], [True, True, True]])
    kept, rows = batch.select(is_kept)
    assert rows.tolist() == [0, 1]
    assert kept.length_BC.tolist() == [[2, 2], [2, 0]]
    assert kept.start_BC.tolist() == [[2, 8], [1, 0]]
    assert kept.canvas_count() == 6
    assert kept.address_BC3[1].tolist() == [[3, 71, 0], [0, 0, 0]]


def test_keeping_nothing_gives_an_empty_batch():
    batch = example_batch()
    kept, rows = batch.select(torch.zeros_like(batch.coin_BC))
    assert rows.tolist() == []
    assert kept.canvas_BCL.shape == (0, 0, 2)
    assert kept.canvas_count() == 0 and kept.ar_count() == 0


def test_moving_a_batch_moves_every_tensor():
    batch = example_batch()
    moved = batch.to("meta")
    tensors = [x for name, x in vars(moved).items() if x is not None and name != "host"]
    assert {x.device.type for x in tensors} == {"meta"} and moved.host is batch
