"""The largest micro-batch of rows, which a memory plan runs on shapes."""

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
    """Return rows of `tokens` tokens: a prompt of one canvas, then the chosen canvases, `stride` tokens apart.

    canvases: their choice (None: rows have none). image_sizes: the tokens of each image of a row, at its beginning.
    Only the first image of the first row is that large; the others are one token smaller, so that they are padded and
    the image tower has to mask the padding.
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
