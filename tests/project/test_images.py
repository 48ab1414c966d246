"""Images in rows of tokens: where they stand in packed rows, batches and parts of a row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from blockdiff.canvas import Canvas, CleanRow, joined, lay_out
from blockdiff.errors import BlockdiffError
from blockdiff.images import ImageInput, PlacedImage, RowImages, images_between, run_end, runs_of

pytestmark = pytest.mark.quick

A, B = (ImageInput({"pixel_values": torch.zeros(1)}, tokens, name) for tokens, name in ((2, b"a"), (3, b"b")))
PLACED = [PlacedImage(A, 1), PlacedImage(B, 3), PlacedImage(A, 8)]  # .aabbb..aa


def test_adjacent_images_are_one_run_and_no_part_of_a_row_ends_inside_it():
    assert runs_of(PLACED) == [(1, 6), (8, 10)]
    assert [run_end(PLACED, column) for column in (1, 2, 3, 6, 9)] == [1, 6, 6, 6, 10]
    assert [(each.column, each.image) for each in images_between(PLACED, 7, 10)] == [(1, A)]
    with pytest.raises(BlockdiffError, match=r"column 3 .*column 6"):
        images_between(PLACED, 0, 3)
    with pytest.raises(BlockdiffError, match=r"overlap.*column 2"):
        runs_of([*PLACED, PlacedImage(A, 2)])
    with pytest.raises(BlockdiffError, match=r"column 10 .*9"):
        RowImages.of([PLACED], 9)


def test_packed_rows_batches_and_selections_keep_each_feature_at_its_placeholder():
    row = CleanRow(range(11), [Canvas([0, 0], start=10)], images=PLACED)
    plain = CleanRow([1, 2], [Canvas([0, 0], start=2)])
    batch = lay_out([plain, joined([plain, row])], canvas_length=2, pad_id=0)
    assert batch.images is not None and lay_out([plain], 2, 0).images is None
    images = batch.to("cpu").images.with_features(torch.arange(5.0)[:, None] + 1)
    assert [each.digest for each in images.inputs] == [b"a", b"b"]  # a picture is made features of once

    def drawn(images: RowImages, width: int) -> list[list[float]]:
        return images.into(torch.zeros(len(images.run_BS2), width, 1))[..., 0].tolist()

    assert drawn(images, 13) == [[0] * 13, [0, 0, 0, 1, 2, 3, 4, 5, 0, 0, 1, 2, 0]]
    assert images.run_BS2[1].tolist() == [
        [0, 1],
        [1, 2],
        [2, 3],
        *[[3, 8]] * 5,
        [8, 9],
        [9, 10],
        *[[10, 12]] * 2,
        [12, 13],
    ]
    kept, rows = replace(batch, images=images).select(torch.tensor([[False, False], [True, True]]))
    assert rows.tolist() == [1] and drawn(kept.images, 13) == drawn(images, 13)[1:]
    assert drawn(kept.images.first_columns(5), 5) == [[0, 0, 0, 1, 2]]
