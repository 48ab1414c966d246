"""`Collator`: examples become the tensors of a batch, with their canvases, noise levels and coins.

Every draw is addressed by sample, epoch, optimiser step or slot, so nothing here depends on rank, world size,
micro-batch or a restart.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from blockdiff.canvas import Batch, Canvas, CleanRow, cut, fill, lay_out, narrow_length
from blockdiff.data.canvas_choice import CanvasChoice, RandomCanvases
from blockdiff.data.example import Example
from blockdiff.data.image_file import image_name
from blockdiff.data.images import ImageReader
from blockdiff.data.messages import ImageSource
from blockdiff.diffusion.schedule import TimeDraw
from blockdiff.errors import DataError, RecipeError
from blockdiff.images import PlacedImage
from blockdiff.seeding import Stream, uniform


class CanvasColumns(NamedTuple):
    """The columns [start, end) of an example's canvas, and the indices of its pinned tokens."""

    start: int
    end: int
    pinned: Sequence[int] = ()


@dataclass(frozen=True)
class Collator:
    """Makes batches of examples: chooses canvases, draws noise levels and coins, and lays out tensors.

    fill_id: the token that fills canvases up.
    canvases: the choice of the canvases of each example.
    coin_probability: the probability that a canvas gets the self-conditioning signal.
    scores_ar: score next-token pairs; otherwise columns that no canvas sees are left out.
    normalisation: losses are means over scored tokens (weight 1), or over examples (weight 1 / scored positions of the
        example in this optimiser step, as in Google's recipe).
    ar_scope: score all next-token pairs, or those whose target is in a response.
    reader: reads the images of examples.
    are_blocks: canvases are a drafter's blocks. One begins at each token of a response except the last; its first token
        and fill are not scored, and neither are next tokens.
    aligned: canvases begin at multiples of their length from the document's start. Tokens before the response in its
        first canvas are pinned.
    """

    canvas_length: int
    pad_id: int
    fill_id: int
    seed: int
    time: TimeDraw
    canvases: CanvasChoice = field(default=RandomCanvases(1))
    coin_probability: float = 0.5
    scores_ar: bool = True
    normalisation: Literal["token", "example"] = "token"
    ar_scope: Literal["all", "response"] = "all"
    reader: ImageReader | None = None
    are_blocks: bool = False
    aligned: bool = False

    def __call__(
        self,
        examples: Sequence[Example],
        *,
        epoch: int | Sequence[int],
        step: int,
        slots: Sequence[int],
        total_slots: int,
    ) -> Batch:
        """Return the batch of examples at `slots` of the global batch, which has `total_slots` rows.

        epoch: one number, or one per example. Canvas choice and coin are addressed by (epoch, sample, canvas), noise
        levels by (step, slot, number of the canvas among the chosen).
        """
        rows = self.rows(examples, epoch=epoch, step=step, slots=slots, total_slots=total_slots)
        return self.lay_out(rows)

    def lay_out(self, rows: Sequence[CleanRow]) -> Batch:
        """Return the batch of rows, packed or not."""
        batch = lay_out(rows, self.canvas_length, self.pad_id)
        if self.are_blocks:
            batch = replace(batch, is_scored_BCL=batch.is_scored_BCL & ~batch.is_fill_BCL)
        if not self.scores_ar or self.are_blocks:
            batch = replace(batch, is_ar_scored_BS=torch.zeros_like(batch.is_ar_scored_BS))
        return batch

    def rows(
        self,
        examples: Sequence[Example],
        *,
        epoch: int | Sequence[int],
        step: int,
        slots: Sequence[int],
        total_slots: int,
    ) -> list[CleanRow]:
        """Return a row per example with its canvases and their draws. Arguments and addresses are those of the batch.

        Raises DataError for an image that cannot be read or has changed since the row was encoded.
        """
        if not examples:
            return []
        epochs = [epoch] * len(examples) if isinstance(epoch, int) else list(epoch)
        examples = [self._answered(example, epoch) for example, epoch in zip(examples, epochs, strict=True)]
        pieces = [
            [piece for span in example.responses for piece in self._pieces(example, span)] for example in examples
        ]
        samples = [example.sample_id for example in examples]
        chosen = self.canvases.choose([len(each) for each in pieces], self.seed, epochs, samples)
        flat = [(row, canvas, rank) for row, canvases in enumerate(chosen) for rank, canvas in enumerate(canvases)]
        row_N, canvas_N, rank_N = torch.tensor(flat, dtype=torch.int64).reshape(-1, 3).unbind(1)
        epoch_N, slot_N = torch.tensor(epochs)[row_N], torch.tensor(list(slots))[row_N]
        sample_N = torch.tensor(samples)[row_N]
        coin_N = uniform(self.seed, Stream.COIN, (epoch_N, sample_N, canvas_N), 1)[:, 0] < self.coin_probability
        t_N = self._times(self.time.draw(self.seed, step, slot_N, rank_N, total_slots), len(flat))
        canvases_of: list[list[Canvas]] = [[] for _ in examples]
        scored = [sum(self._scored(pieces[row][canvas]) for canvas in canvases) for row, canvases in enumerate(chosen)]
        for (row, canvas, _), t, coin in zip(flat, t_N.tolist(), coin_N.tolist(), strict=True):
            start, end, pinned = pieces[row][canvas]
            example = examples[row]
            tokens = fill(example.tokens[start:end], self.canvas_length, self.fill_id)
            address = (epochs[row], example.sample_id, canvas)
            weight = 1.0 if self.normalisation == "token" else 1 / scored[row]
            laid = Canvas(
                tokens, start, content=end - start, t=t, coin=coin, address=address, weight=weight, pinned=pinned
            )
            canvases_of[row].append(self._as_read(laid) if example.slots else laid)
        result = []
        for example, canvases, images in zip(examples, canvases_of, self._images(examples), strict=True):
            seen, weights = self._seen(example, canvases), self._ar_weights(example)
            images = [image for image in images if image.end <= len(seen)]
            result.append(CleanRow(seen, canvases, example.sample_id, ar_weights=weights, images=images))
        return result

    def _times(self, t_N: torch.Tensor, count: int) -> torch.Tensor:
        """Return the drawn noise levels. Raises RecipeError unless they are `count` numbers from 0 to 1."""
        problem = None
        if not isinstance(t_N, torch.Tensor) or t_N.shape != (count,):
            shape = f"shape {[*t_N.shape]}" if isinstance(t_N, torch.Tensor) else f"a {type(t_N).__name__}"
            problem = f"{shape} for {count} canvases; it should return a tensor of one time each"
        elif (outside := ~((t_N >= 0) & (t_N <= 1))).any():
            problem = f"t = {float(t_N[outside][0]):g}; it should return times from 0 to 1"
        if problem is not None:
            raise RecipeError(f"objective.time: {type(self.time).__name__}.draw() returned {problem}")
        return t_N

    def _answered(self, example: Example, epoch: int) -> Example:
        """Fill each slot of a decision with a label. If several have a weight, one is drawn in every epoch."""
        if all(len(slot.tokens) == 1 for slot in example.slots):
            return example
        tokens, u = (
            list(example.tokens),
            uniform(self.seed, Stream.ANSWER, (epoch, example.sample_id), len(example.slots)),
        )
        for slot, drawn in zip(example.slots, u.reshape(-1).tolist(), strict=True):
            label = bisect(list(accumulate(slot.weights)), drawn * sum(slot.weights), hi=len(slot.tokens) - 1)
            tokens[slot.column] = slot.tokens[label]
        return replace(example, tokens=tokens)

    def _pieces(self, example: Example, response: tuple[int, int]) -> list[CanvasColumns]:
        """The canvases of a response. Of a decision all tokens are pinned except its slots."""
        pieces = self._cut(response)
        if not example.slots:
            return pieces
        slots = {slot.column for slot in example.slots}
        pinned = [
            [index for index in range(self.canvas_length) if start + index not in slots] for start, _, _ in pieces
        ]
        return [piece._replace(pinned=indices) for piece, indices in zip(pieces, pinned, strict=True)]

    def _as_read(self, canvas: Canvas) -> Canvas:
        """Return the canvas of a decision as it is read: its slots are noise, and it is as narrow as its answers."""
        length = self.canvas_length if self.aligned else narrow_length(canvas.content or 0, self.canvas_length)
        return replace(canvas, t=1.0, length=length)

    def _cut(self, response: tuple[int, int]) -> list[CanvasColumns]:
        """The canvases of a response, or a drafter's blocks, whose first token is pinned."""
        start, end = response
        if not self.are_blocks:
            pieces = cut(response, self.canvas_length, self.aligned)
            return [CanvasColumns(*columns, range(max(0, start - columns[0]))) for columns in pieces]
        return [CanvasColumns(column, min(column + self.canvas_length, end), (0,)) for column in range(start, end - 1)]

    def _scored(self, piece: CanvasColumns) -> int:
        """The number of scored positions of a canvas or block."""
        length = piece.end - piece.start if self.are_blocks else self.canvas_length
        return length - len(piece.pinned)

    def begin(self, examples: Sequence[Example]) -> None:
        """Begin to read the images of examples, before `rows` needs them."""
        if self.reader is not None:
            with suppress(DataError):  # which `rows` raises again
                self.reader.begin(self._sources(examples))

    def _sources(self, examples: Sequence[Example]) -> list[ImageSource]:
        reader = self.reader
        assert reader is not None, "nothing encodes images without a reader"
        return [reader.located(image.source, example.where) for example in examples for image in example.images]

    def _images(self, examples: Sequence[Example]) -> list[list[PlacedImage]]:
        """The images of every example with their columns."""
        result: list[list[PlacedImage]] = [[] for _ in examples]
        if not any(example.images for example in examples):
            return result
        reader, sources = self.reader, self._sources(examples)
        assert reader is not None
        images = iter(zip(sources, reader.read_all(sources), strict=True))
        for example, placed in zip(examples, result, strict=True):
            for known in example.images:
                source, image = next(images)
                if isinstance(image, DataError):
                    raise DataError(f"{example.where}: {image}")
                if image.digest != known.digest:
                    raise DataError(
                        f"{example.where}: {image_name(source)} has changed since the row was encoded; put the image "
                        "back, or encode the rows again by setting another data.cache"
                    )
                placed.append(PlacedImage(image, known.column))
        return result

    def _seen(self, example: Example, canvases: Sequence[Canvas]) -> Sequence[int]:
        """The clean tokens that a loss or a canvas needs."""
        return example.tokens if self.scores_ar else example.tokens[: max(canvas.start for canvas in canvases)]

    def _ar_weights(self, example: Example) -> list[float] | None:
        """The weight of the next-token pair at each column; None if all are 1."""
        is_plain = self.ar_scope == "all" and self.normalisation == "token"
        is_plain = is_plain and not (example.images or example.excluded)
        if not self.scores_ar or is_plain:
            return None
        pairs = len(example.tokens) - 1
        spans = example.responses if self.ar_scope == "response" else [(1, pairs + 1)]
        # Placeholders need no prediction: their columns follow from the image.
        placeholders = {image.column + part for image in example.images for part in range(image.tokens)}
        excluded = placeholders.union(*(range(start, end) for start, end in example.excluded))
        targets = [column for start, end in spans for column in range(max(start, 1), end) if column not in excluded]
        columns = [target - 1 for target in targets]
        weights = [0.0] * (pairs + 1)
        for column in columns:
            weights[column] = 1.0 if self.normalisation == "token" else 1 / len(columns)
        return weights

    def canvas_tokens(self, length: int) -> int:
        """An estimate of the canvas positions of an example of `length` tokens, to divide work among ranks."""
        return self.canvas_length * self.canvases.most(max(1, length // (1 if self.are_blocks else self.canvas_length)))
