"""The sight of a canvas: changing what it must not see changes nothing, changing what it sees does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from blockdiff.models.diffusion_gemma import DiffusionGemma
from tests.support.backbone import (
    EXACT,
    L,
    close,
    differs,
    packed_batch,
    run_packed,
    tokens,
)
from tests.support.closeness import relative_error
from tests.support.oracle import TWO_LAYERS, oracle, ours, tiny_config

pytestmark = pytest.mark.usefixtures("without_gradients")


def canvas_hidden(mine: DiffusionGemma, **changes: Tensor) -> Tensor:
    return run_packed(mine, replace(packed_batch(), **changes))[1]


def changed(tokens_BS: Tensor, row: int, columns: slice) -> Tensor:
    out = tokens_BS.clone()
    out[row, columns] = 3 + (out[row, columns] + 5) % 370
    return out


@pytest.mark.quick
@pytest.mark.parametrize(
    "what,row,canvas,columns",
    [
        ("its own clean tokens", 0, 0, slice(5, 5 + L)),
        ("its own clean tokens", 0, 1, slice(5 + L, 5 + 2 * L)),
        ("its own clean tokens", 0, 2, slice(5 + 3 * L, None)),
        ("everything after its start", 0, 1, slice(5 + L, None)),
        ("the document before", 1, 2, slice(0, 30)),
        ("the document before", 1, 3, slice(0, 30)),
        ("the document after", 1, 0, slice(30, None)),
        ("the document after", 1, 1, slice(30, None)),
        ("padding", 2, 0, slice(18, None)),
        ("another row", 0, 1, slice(0, 0)),
    ],
)
def test_a_canvas_never_sees(mine, what, row, canvas, columns):
    batch = packed_batch()
    others = changed(batch.tokens_BS, row, columns)
    if what == "another row":
        others[1:] = changed(changed(batch.tokens_BS, 1, slice(None)), 2, slice(None))[1:]
    before, after = canvas_hidden(mine), canvas_hidden(mine, tokens_BS=others)
    close(after[row, canvas], before[row, canvas], EXACT)


@pytest.mark.quick
@pytest.mark.parametrize("row,canvas", [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 0)])
def test_a_canvas_never_sees_another_canvas(mine, row, canvas):
    batch = packed_batch()
    noisy = tokens(*batch.canvas_BCL.shape, seed=77)
    noisy[row, canvas] = batch.canvas_BCL[row, canvas]
    before, after = canvas_hidden(mine), canvas_hidden(mine, canvas_BCL=noisy)
    close(after[row, canvas], before[row, canvas], EXACT)
    others = torch.ones(before.shape[:2], dtype=torch.bool)
    others[row, canvas] = False
    differs(after[others], before[others])


@pytest.mark.parametrize("row,canvas", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3), (2, 0)])
def test_a_canvas_sees_all_of_its_document_before_it_and_all_of_itself(mine, row, canvas):
    batch = packed_batch()
    before = canvas_hidden(mine)[row, canvas]
    first, start = int(batch.doc_start_BC[row, canvas]), int(batch.start_BC[row, canvas])
    for column in {first, start - 1}:
        after = canvas_hidden(mine, tokens_BS=changed(batch.tokens_BS, row, slice(column, column + 1)))
        assert all(relative_error(after[row, canvas, j], before[j]) > 1e-6 for j in (0, L - 1))
    for j in (0, L - 1):
        noisy = batch.canvas_BCL.clone()
        noisy[row, canvas, j] = 3 + (noisy[row, canvas, j] + 5) % 370
        after = canvas_hidden(mine, canvas_BCL=noisy)[row, canvas]
        assert all(relative_error(after[i], before[i]) > 1e-6 for i in (0, L - 1))


@pytest.mark.parametrize("unseen", [1, 3, 10])
def test_a_sliding_layer_sees_window_minus_one_prefix_tokens_for_every_query(unseen):
    """Two layers: a sliding one, and a full one made blind to the prefix by dropping its attention."""
    mine = ours(oracle(tiny_config(**TWO_LAYERS)))
    mine.layers[1].attention.o_proj.weight.zero_()
    prompt, canvas = tokens(1, 40), tokens(1, L, seed=1)
    before = mine.denoise(canvas, mine.encode(prompt))
    oldest = 40 - 15
    hidden = mine.denoise(canvas, mine.encode(changed(prompt, 0, slice(oldest - unseen, oldest))))
    close(hidden, before, EXACT)
    hidden = mine.denoise(canvas, mine.encode(changed(prompt, 0, slice(oldest, oldest + 1))))
    assert all(relative_error(hidden[0, j], before[0, j]) > 1e-6 for j in range(L))


@pytest.mark.quick
def test_encode_is_causal(mine):
    prompt = tokens(1, 40)
    before = mine.encode(prompt).hidden
    after = mine.encode(changed(prompt, 0, slice(25, 26))).hidden
    close(after[:, :25], before[:, :25], EXACT)
    assert all(relative_error(after[0, i], before[0, i]) > 1e-6 for i in range(25, 40))
