"""Images in rows of tokens: an image as the model's processor has cut it, where it stands, and the images of a call.

Nothing here reads files or runs a tower: `data` makes `ImageInput`s, and a model makes features of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockdiff.errors import BlockdiffError


@dataclass(frozen=True, eq=False)
class ImageInput:
    """An image as a model's image processor has cut it.

    values: the arguments of the family's image side, by transformers' names, without a batch dimension and without
    padding. For DiffusionGemma: `pixel_values` [patches, 3 * p * p] and `image_position_ids` [patches, 2]. For MiniMax
    M3: `pixel_values` [patches, ...] and `image_grid_thw` [3].
    tokens: the number of its placeholders in a row.
    digest: sha256 of its pixels and the processor's settings; images with the same digest are the same.
    """

    values: Mapping[str, Tensor]
    tokens: int
    digest: bytes

    @property
    def nbytes(self) -> int:
        """The size of its tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.values.values())

    def map(self, change: Callable[[Tensor], Tensor]) -> ImageInput:
        """Apply a function to each tensor, for example to move it to a device."""
        return replace(self, values={name: change(x) for name, x in self.values.items()})

    def to(self, device: torch.device | str) -> ImageInput:
        """Copy it to a device."""
        return self.map(lambda x: x.to(device))


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image in a row of tokens: its placeholders are the columns [column, column + image.tokens)."""

    image: ImageInput
    column: int

    @property
    def end(self) -> int:
        """The column after the last placeholder."""
        return self.column + self.image.tokens


def runs_of(images: Iterable[PlacedImage]) -> list[tuple[int, int]]:
    """The columns [first, end) of each run of placeholders of a row; adjacent images are one run.

    Raises BlockdiffError for images that overlap.
    """
    runs: list[tuple[int, int]] = []
    for placed in sorted(images, key=lambda each: each.column):
        if runs and placed.column < runs[-1][1]:
            raise BlockdiffError(f"two images overlap at column {placed.column} of a row; place them apart")
        if runs and placed.column == runs[-1][1]:
            runs[-1] = (runs[-1][0], placed.end)
        else:
            runs.append((placed.column, placed.end))
    return runs


def run_end(images: Iterable[PlacedImage], column: int) -> int:
    """Return the end of the run of images that contains `column`; `column` itself outside a run or at its start.

    A call must not end inside a run.
    """
    return next((end for first, end in runs_of(images) if first < column < end), column)


def images_between(images: Sequence[PlacedImage], first: int, end: int) -> list[PlacedImage]:
    """Return the images in the columns [first, end) of a row, with columns counted from `first`.

    Raises BlockdiffError if `first` or `end` is inside a run of images.
    """
    for cut in (first, end):
        if (whole := run_end(images, cut)) != cut:
            raise BlockdiffError(f"column {cut} is inside a run of images; a call must go on to column {whole}")
    return [replace(each, column=each.column - first) for each in images if first <= each.column < end]


@dataclass(frozen=True, eq=False)
class RowImages:
    """The images of the rows of a call: each distinct image once, and the positions of their features.

    inputs: the images. row_N, column_N: the row and column of each of N placeholders. source_N: the index of its
    feature among the features of all inputs, concatenated. run_BS2: the first and the end column of each token's run; a
    token outside images is a run of its own. features_MD: the features of all inputs (None: not computed yet).
    """

    inputs: tuple[ImageInput, ...]
    row_N: Tensor
    column_N: Tensor
    source_N: Tensor
    run_BS2: Tensor
    features_MD: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[Sequence[PlacedImage]], width: int) -> RowImages | None:
        """Return the images of rows of `width` columns; None if no row has any."""
        if not any(rows):
            return None
        inputs = {placed.image.digest: placed.image for images in rows for placed in images}
        starts, total = dict[bytes, int](), 0
        for digest, image in inputs.items():
            starts[digest], total = total, total + image.tokens
        row, column, source = list[Tensor](), list[Tensor](), list[Tensor]()
        run_BS2 = _runs_of_one(len(rows), width)
        for b, images in enumerate(rows):
            for first, end in runs_of(images):
                if first < 0 or end > width:
                    raise BlockdiffError(f"an image ends at column {end} of a row of {width}; the row must hold it all")
                run_BS2[b, first:end] = torch.tensor([first, end])
            for placed in images:
                count, start = placed.image.tokens, starts[placed.image.digest]
                row.append(torch.full((count,), b))
                column.append(torch.arange(placed.column, placed.end))
                source.append(torch.arange(start, start + count))
        return cls(tuple(inputs.values()), torch.cat(row), torch.cat(column), torch.cat(source), run_BS2)

    @classmethod
    def nowhere(cls, image: ImageInput, rows: int, width: int) -> RowImages:
        """Return an image that is in no row. Its features are computed and not used."""
        none = torch.zeros(0, dtype=torch.int64)
        return cls((image,), none, none, none, _runs_of_one(rows, width))

    def map(self, change: Callable[[Tensor], Tensor]) -> RowImages:
        """Apply a function to each tensor, for example to move it to a device."""
        inputs = tuple(each.map(change) for each in self.inputs)
        features = None if self.features_MD is None else change(self.features_MD)
        row_N, column_N, source_N = change(self.row_N), change(self.column_N), change(self.source_N)
        return RowImages(inputs, row_N, column_N, source_N, change(self.run_BS2), features)

    def to(self, device: torch.device | str) -> RowImages:
        """Copy it to a device."""
        return self.map(lambda x: x.to(device))

    def select(self, rows: Tensor) -> RowImages:
        """Select the images of some rows. rows: distinct int64 indices."""
        place_B = torch.full_like(self.run_BS2[:, 0, 0], -1)
        place_B[rows] = torch.arange(len(rows), device=rows.device)
        is_kept_N = place_B[self.row_N] >= 0
        indices = place_B[self.row_N][is_kept_N], self.column_N[is_kept_N], self.source_N[is_kept_N]
        return RowImages(self.inputs, *indices, self.run_BS2[rows], self.features_MD)

    def first_columns(self, columns: int) -> RowImages:
        """Select the images in the first `columns` columns of each row."""
        is_kept_N = self.column_N < columns
        indices = self.row_N[is_kept_N], self.column_N[is_kept_N], self.source_N[is_kept_N]
        return RowImages(self.inputs, *indices, self.run_BS2[:, :columns].clamp(max=columns), self.features_MD)

    def with_features(self, features_MD: Tensor) -> RowImages:
        """Return the images with the features of `inputs`, concatenated [sum of their tokens, D]."""
        return replace(self, features_MD=features_MD)

    def into(self, x_BTD: Tensor) -> Tensor:
        """Return embeddings in which the placeholders' are replaced by the features."""
        assert self.features_MD is not None, "features are computed before the call"
        features_ND = self.features_MD[self.source_N].to(x_BTD.dtype)
        return x_BTD.index_put((self.row_N, self.column_N), features_ND)


def _runs_of_one(rows: int, width: int) -> Tensor:
    """The runs [rows, width, 2] of tokens without images: each token is a run."""
    column = torch.arange(width)
    return torch.stack([column, column + 1], -1).repeat(rows, 1, 1)
