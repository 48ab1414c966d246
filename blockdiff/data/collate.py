"""The batches of an optimiser step: its examples, the canvases of them that are run, their noise levels and coins.

Every draw is addressed by sample, epoch, optimiser step or slot, so nothing here depends on rank, world size,
micro-batch or a restart.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

from blockdiff.canvas import PADDING_ROW, Batch, Canvas, CleanRow, cut, fill, joined, lay_out, narrow_length
from blockdiff.data.example import Example
from blockdiff.data.image_file import image_name
from blockdiff.data.images import ImageReader
from blockdiff.data.messages import ImageSource
from blockdiff.data.order import AnyOrder
from blockdiff.data.packing import best_fit, deal
from blockdiff.diffusion.schedule import TimeDraw
from blockdiff.errors import DataError, RecipeError
from blockdiff.images import PlacedImage
from blockdiff.seeding import Stream, uniform

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HELDOUT_STEP = -1  # epoch and optimiser step by which held-out draws are addressed, so that they never change
Numbers = Sequence[int]  # one per example


class CanvasChoice(Protocol):
    """The choice of the canvases of each example that an optimiser step scores."""

    def choose(self, counts: Numbers, seed: int, epochs: Numbers, samples: Numbers) -> list[list[int]]:
        """For examples of so many canvases the numbers of those to run, in order; addressed by (epoch, sample id)."""

    def most(self, count: int) -> int:
        """The number of canvases to run of an example that has `count`."""


class _Range:
    """A choice that is the same in every epoch."""

    def kept(self, count: int) -> range:
        """The canvases to run of an example that has `count`."""
        return range(count)

    def choose(self, counts: Numbers, seed: int, epochs: Numbers, samples: Numbers) -> list[list[int]]:
        """The same canvases in every epoch."""
        return [list(self.kept(count)) for count in counts]

    def most(self, count: int) -> int:
        """The number of canvases to run of an example that has `count`."""
        return len(self.kept(count))


@dataclass(frozen=True)
class AllCanvases(_Range):
    """All canvases of an example are run."""


@dataclass(frozen=True)
class NoCanvases(_Range):
    """No canvas: of a causal model, which learns next tokens alone."""

    def kept(self, count: int) -> range:
        """No canvas."""
        return range(0)


@dataclass(frozen=True)
class FirstCanvases(_Range):
    """The first `count` canvases, or all where an example has fewer."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"the number of canvases must be at least 1, got {self.count}")

    def kept(self, count: int) -> range:
        """The first ones."""
        return range(min(self.count, count))


@dataclass(frozen=True)
class LastCanvases(FirstCanvases):
    """The last `count` canvases, or all where an example has fewer."""

    def kept(self, count: int) -> range:
        """The last ones."""
        return range(max(0, count - self.count), count)


@dataclass(frozen=True)
class RandomCanvases(FirstCanvases):
    """`count` canvases, or all where an example has fewer, drawn anew in every epoch."""

    def choose(self, counts: Numbers, seed: int, epochs: Numbers, samples: Numbers) -> list[list[int]]:
        """The canvases with the smallest random keys; nothing is drawn where no example has more than `count`."""
        if max(counts) <= self.count:
            return super().choose(counts, seed, epochs, samples)
        address = (torch.tensor(epochs), torch.tensor(samples))
        keys = uniform(seed, Stream.CANVAS_CHOICE, address, max(counts)).tolist()
        return [
            sorted(sorted(range(count), key=of_example.__getitem__)[: self.count])
            for count, of_example in zip(counts, keys, strict=True)
        ]


class Piece(NamedTuple):
    """The columns [start, end) of an example's canvas, and the places of the canvas that are pinned."""

    start: int
    end: int
    pinned: Sequence[int] = ()


@dataclass(frozen=True)
class Collator:
    """Makes a `Batch` of examples: chooses canvases, draws noise levels and coins, lays everything out.

    `canvases` says which canvases of each example are run; they are filled up with `fill_id`. `coin_probability` is
    the chance that a canvas gets the self-conditioning signal. `ar_scope` says which next-token pairs are scored: all,
    or those whose target lies in a response. Without `scores_ar` none is, and columns that no canvas sees are left out.
    `normalisation` says what the losses are means over: scored tokens (a position weighs 1) or examples (a position
    weighs 1 / scored positions of its example in this optimiser step, as in Google's recipe). `reader` reads the images
    of examples. `are_blocks`: canvases are a drafter's blocks, which begin at any token of a response but its last, and
    of which neither that token nor the fill is scored; next tokens are not. `aligned`: canvases begin at multiples of
    their length, counted from the document's start; what stands before a response in its first canvas is pinned.
    """

    canvas_length: int
    pad_id: int
    fill_id: int
    seed: int
    time: TimeDraw
    canvases: CanvasChoice = RandomCanvases(1)
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
        """The batch of `examples`, which stand at `slots` of the global batch of `total_slots` rows.

        `epoch` is one number or one per example. Canvas choice and coin are addressed by (epoch, sample,
        canvas), noise levels by (step, slot, rank of the canvas among the chosen).
        """
        rows = self.rows(examples, epoch=epoch, step=step, slots=slots, total_slots=total_slots)
        return self.lay_out(rows)

    def lay_out(self, rows: Sequence[CleanRow]) -> Batch:
        """The tensors of rows, packed or not."""
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
        """One row per example with its canvases and everything drawn for them; addressed as the batch.

        Raises DataError for an image that cannot be read, or is no longer the one that the example was made with.
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
            made = Canvas(
                tokens, start, content=end - start, t=t, coin=coin, address=address, weight=weight, pinned=pinned
            )
            canvases_of[row].append(self._as_read(made) if example.slots else made)
        result = []
        for example, canvases, images in zip(examples, canvases_of, self._images(examples), strict=True):
            seen, weights = self._seen(example, canvases), self._ar_weights(example)
            images = [image for image in images if image.end <= len(seen)]
            result.append(CleanRow(seen, canvases, example.sample_id, ar_weights=weights, images=images))
        return result

    def _times(self, t_N: torch.Tensor, count: int) -> torch.Tensor:
        """The times that were drawn; RecipeError unless they are `count` numbers from 0 to 1."""
        wrong = None
        if not isinstance(t_N, torch.Tensor) or t_N.shape != (count,):
            shape = f"shape {[*t_N.shape]}" if isinstance(t_N, torch.Tensor) else f"a {type(t_N).__name__}"
            wrong = f"{shape} for {count} canvases; return a tensor of one time each"
        elif (outside := ~((t_N >= 0) & (t_N <= 1))).any():
            wrong = f"t = {float(t_N[outside][0]):g}; return times from 0 to 1"
        if wrong is not None:
            raise RecipeError(f"objective.time: {type(self.time).__name__} drew {wrong}")
        return t_N

    def _answered(self, example: Example, epoch: int) -> Example:
        """The example with a label in each slot, drawn anew in every epoch where several have a weight."""
        if all(len(slot.tokens) == 1 for slot in example.slots):
            return example
        tokens, u = (
            list(example.tokens),
            uniform(self.seed, Stream.ANSWER, (epoch, example.sample_id), len(example.slots)),
        )
        for slot, drawn in zip(example.slots, u.reshape(-1).tolist(), strict=True):
            place = bisect(list(accumulate(slot.weights)), drawn * sum(slot.weights), hi=len(slot.tokens) - 1)
            tokens[slot.column] = slot.tokens[place]
        return replace(example, tokens=tokens)

    def _pieces(self, example: Example, response: tuple[int, int]) -> list[Piece]:
        """The canvases of a response; of a decision all is pinned but the slots."""
        pieces = self._cut(response)
        if not example.slots:
            return pieces
        slots = {slot.column for slot in example.slots}
        pinned = [
            [place for place in range(self.canvas_length) if start + place not in slots] for start, _, _ in pieces
        ]
        return [piece._replace(pinned=places) for piece, places in zip(pieces, pinned, strict=True)]

    def _as_read(self, canvas: Canvas) -> Canvas:
        """Return the canvas of a decision as it is read: its slots are noise, and it is as narrow as its answers."""
        length = self.canvas_length if self.aligned else narrow_length(canvas.content or 0, self.canvas_length)
        return replace(canvas, t=1.0, length=length)

    def _cut(self, response: tuple[int, int]) -> list[Piece]:
        """The canvases of a response, or its blocks, whose first token is pinned."""
        start, end = response
        if not self.are_blocks:
            pieces = cut(response, self.canvas_length, self.aligned)
            return [Piece(*columns, range(max(0, start - columns[0]))) for columns in pieces]
        return [Piece(column, min(column + self.canvas_length, end), (0,)) for column in range(start, end - 1)]

    def _scored(self, piece: Piece) -> int:
        """The number of positions that are scored of a canvas or of a block."""
        length = piece.end - piece.start if self.are_blocks else self.canvas_length
        return length - len(piece.pinned)

    def begin(self, examples: Sequence[Example]) -> None:
        """Begin to read the images of the examples whose rows are asked for next."""
        if self.reader is not None:
            with suppress(DataError):  # which `rows` raises again
                self.reader.begin(self._sources(examples))

    def _sources(self, examples: Sequence[Example]) -> list[ImageSource]:
        reader = self.reader
        assert reader is not None, "nothing encodes images without a reader"
        return [reader.located(image.source, example.where) for example in examples for image in example.images]

    def _images(self, examples: Sequence[Example]) -> list[list[PlacedImage]]:
        """The images of every example at their places."""
        result: list[list[PlacedImage]] = [[] for _ in examples]
        if not any(example.images for example in examples):
            return result
        reader, sources = self.reader, self._sources(examples)
        assert reader is not None
        found = iter(zip(sources, reader.read_all(sources), strict=True))
        for example, placed in zip(examples, result, strict=True):
            for known in example.images:
                source, image = next(found)
                if isinstance(image, DataError):
                    raise DataError(f"{example.where}: {image}")
                if image.digest != known.digest:
                    raise DataError(
                        f"{example.where}: {image_name(source)} has changed since the row was encoded; put the image "
                        "back, or have the rows encoded anew with another data.cache"
                    )
                placed.append(PlacedImage(image, known.column))
        return result

    def _seen(self, example: Example, canvases: Sequence[Canvas]) -> Sequence[int]:
        """The clean tokens that a loss or a canvas reads."""
        return example.tokens if self.scores_ar else example.tokens[: max(canvas.start for canvas in canvases)]

    def _ar_weights(self, example: Example) -> list[float] | None:
        """The weight of each column's pair of tokens; None where all count 1."""
        is_plain = self.ar_scope == "all" and self.normalisation == "token"
        is_plain = is_plain and not (example.images or example.excluded)
        if not self.scores_ar or is_plain:
            return None
        pairs = len(example.tokens) - 1
        spans = example.responses if self.ar_scope == "response" else [(1, pairs + 1)]
        # Nothing has to predict a placeholder, whose place is known as soon as there is an image.
        placeholders = {image.column + part for image in example.images for part in range(image.tokens)}
        excluded = placeholders.union(*(range(start, end) for start, end in example.excluded))
        targets = [column for start, end in spans for column in range(max(start, 1), end) if column not in excluded]
        columns = [target - 1 for target in targets]
        weights = [0.0] * (pairs + 1)
        for column in columns:
            weights[column] = 1.0 if self.normalisation == "token" else 1 / len(columns)
        return weights

    def canvas_tokens(self, length: int) -> int:
        """Canvas positions to expect of an example of `length` tokens: for dealing out work, not for laying out."""
        return self.canvas_length * self.canvases.most(max(1, length // (1 if self.are_blocks else self.canvas_length)))


def rank_slots(rank: int, world: int, total: int) -> range:
    """The slots of a global batch of `total` rows that one of `world` ranks takes: as even as can be."""
    return range(rank * total // world, (rank + 1) * total // world)


def micro_batches(
    examples: Sequence[Example],
    order: AnyOrder,
    collator: Collator,
    step: int,
    *,
    micro_batch_size: int | None = None,
    rank: int = 0,
    world: int = 1,
    pack: int | None = None,
) -> list[Batch]:
    """This rank's part of the global batch of an optimiser step (from 1), in micro-batches on the CPU.

    `order(step)` gives (epoch, index of the example) for every slot. A micro-batch has `micro_batch_size` rows (None:
    all). With `pack`, examples share rows of at most so many tokens (`best_fit`), dealt to the ranks by their work; the
    optimiser step sees the same examples with the same draws, so losses and gradients are those of the unpacked one.
    Where `examples` have `lengths`, the tokens of each, a rank reads only its own for that. Several micro-batches are
    made of rows of similar size. A rank for which no packed row is left gets a batch of padding.
    Raises DataError when there are fewer examples than ranks.
    """
    taken, groups, example_of = _share(examples, order, collator, step, rank, world, pack)
    slots = sorted(slot for row in groups for slot in row)
    rows = collator.rows(
        [example_of(slot) for slot in slots],
        epoch=[taken[slot][0] for slot in slots],
        step=step,
        slots=slots,
        total_slots=len(taken),
    )
    row_of = dict(zip(slots, rows, strict=True))
    laid_out = [row_of[row[0]] if len(row) == 1 else joined([row_of[slot] for slot in row]) for row in groups]
    laid_out = laid_out or [PADDING_ROW]
    size = micro_batch_size or len(laid_out)
    if len(laid_out) > size:  # less padding; the largest first, so that memory peaks early
        laid_out.sort(key=lambda row: -len(row.tokens) - len(row.canvases) * collator.canvas_length)
    return [collator.lay_out(laid_out[first : first + size]) for first in range(0, len(laid_out), size)]


def begin_images(
    examples: Sequence[Example], order: AnyOrder, collator: Collator, step: int, rank: int, world: int, pack: int | None
) -> None:
    """Begin to read the images of `micro_batches` of an optimiser step, beside the one that is under way."""
    if collator.reader is not None:
        with suppress(DataError):  # which `micro_batches` raises again
            _, groups, example_of = _share(examples, order, collator, step, rank, world, pack)
            collator.begin([example_of(slot) for slot in sorted(slot for row in groups for slot in row)])


def _share(
    examples: Sequence[Example], order: AnyOrder, collator: Collator, step: int, rank: int, world: int, pack: int | None
) -> tuple[list[tuple[int, int]], list[list[int]], Callable[[int], Example]]:
    """The (epoch, index) of every slot of an optimiser step, the slots of each row of this rank, and their examples."""
    taken = order(step)
    total = len(taken)
    lengths: Sequence[int] | NDArray[np.int64] | None = getattr(examples, "lengths", None)
    if total < world:
        raise DataError(f"batch_size {total} is less than {world} processes; raise train.batch_size")

    @cache  # each is read once, in the order of the slots, for a stream goes forward only
    def example_of(slot: int) -> Example:
        return examples[taken[slot][1]]

    def length_of(slot: int) -> int:
        return len(example_of(slot).tokens) if lengths is None else int(lengths[taken[slot][1]])

    if pack is None:
        groups = [[slot] for slot in rank_slots(rank, world, total)]
    else:
        tokens = [length_of(slot) for slot in range(total)]
        packed = best_fit(tokens, pack)
        work = [sum(tokens[slot] + collator.canvas_tokens(tokens[slot]) for slot in row) for row in packed]
        groups = [packed[row] for row in deal(work, world)[rank]]
    return taken, groups, example_of


def heldout_batches(
    examples: Sequence[Example], collator: Collator, batch_size: int, *, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """This rank's part of the held-out examples; canvases, noise levels and coins are always the same."""
    slots = rank_slots(rank, world, len(examples))
    parts = [slots[start : start + batch_size] for start in range(0, len(slots), batch_size)]
    for number, part in enumerate(parts):
        rows = collator.rows(
            [examples[slot] for slot in part],
            epoch=HELDOUT_STEP,
            step=HELDOUT_STEP,
            slots=part,
            total_slots=len(examples),
        )
        if collator.reader is not None:
            collator.begin([examples[slot] for slot in chain.from_iterable(parts[number + 1 : number + 2])])
        yield collator.lay_out(rows)
