"""The largest micro-batch of rows that a plan of the memory runs on shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from blockdiff.canvas import Batch, Canvas, CleanRow, lay_out
from blockdiff.data.canvas_choice import CanvasChoice
from blockdiff.images import PlacedImage
from blockdiff.models.model import BlockDiffusionModel


def worst_batch(
    model: BlockDiffusionModel,
    tokens: int,
    rows: int,
    canvases: CanvasChoice | None,
    stride: int,
    image_sizes: Sequence[int] = (),
) -> Batch:
    """Rows of `tokens` tokens: a prompt of one canvas, then the chosen canvases, `stride` tokens from one to the next.

    canvases: their choice (None: rows have none). image_sizes: the tokens of each image of a row; they stand at its
    beginning. Several images are not all equally large, so that the smaller ones are filled up, and the tower has to
    tell what is filling.
    """
    L = model.canvas_length
    images = [list[PlacedImage]() for _ in range(rows)]
    for number, width in enumerate(image_sizes):
        assert model.image_side is not None
        large, small = (model.image_side.blank(n) for n in (width, max(1, width - 1)))
        for row, of_row in enumerate(images):
            image = replace(small if row or number else large, digest=b"%d %d" % (row, number))
            of_row.append(PlacedImage(image, sum(image_sizes[:number])))
    if canvases is None or not model.denoises:
        return lay_out([CleanRow([0] * tokens, [], images=of_row) for of_row in images], L, pad_id=0)
    count = max(1, (tokens - 1) // stride)
    chosen: Sequence[int] = canvases.choose([count], 0, [0], [0])[0]
    start = max(1, tokens - count * stride)
    placed = [Canvas([0] * L, start + number * stride, t=0.5, coin=True, address=(0, 0, number)) for number in chosen]
    return lay_out([CleanRow([0] * tokens, placed, images=of_row) for of_row in images], L, pad_id=0)
