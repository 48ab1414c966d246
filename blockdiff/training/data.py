"""The data of a recipe: its sources and examples, and the batches that are made of them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from itertools import chain, islice
from pathlib import Path
from typing import Any

from blockdiff.canvas import Batch
from blockdiff.checkpoint.files import find, read_json
from blockdiff.data.chat import Encoder
from blockdiff.data.collate import Collator
from blockdiff.data.dataset import TOTAL, Dataset, Watch, load_dataset
from blockdiff.data.example import Example
from blockdiff.data.images import ImageReader
from blockdiff.data.order import AnyOrder, Order, StreamOrder
from blockdiff.data.rows import Row
from blockdiff.data.sources import Source, read_rows
from blockdiff.data.statistics import Statistics
from blockdiff.data.step_batches import begin_images, heldout_batches, micro_batches
from blockdiff.data.stream import StreamedExamples
from blockdiff.data.template import asks_date
from blockdiff.errors import DataError
from blockdiff.parallel.ranks import Ranks
from blockdiff.terminal import counted
from blockdiff.training.recipe import Recipe
from blockdiff.training.run import DATA
from blockdiff.training.starting_model import StartingModel

FILL = "(fill: end-of-sequence tokens after a response, up to the end of its last canvas)"


class Ahead:
    """Prepares the micro-batches of optimiser steps in a thread, one step ahead.

    make: returns the micro-batches of a step.
    steps: the last step.
    is_pinned: copy them to pinned memory, from which a GPU copies without the host.
    """

    def __init__(self, make: Callable[[int], list[Batch]], steps: int, is_pinned: bool):
        self._make, self._steps, self._is_pinned = make, steps, is_pinned
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blockdiff-batches")
        self._next: tuple[int, Future[list[Batch]]] | None = None

    def __call__(self, step: int) -> list[Batch]:
        """Return the micro-batches of an optimiser step, on the CPU. Raises what `make` raises for this step."""
        number, future = self._next or (0, None)
        self._next = None
        batches = (future if future is not None and number == step else self._begin(step)).result()
        if step < self._steps:
            self._next = step + 1, self._begin(step + 1)
        return batches

    def _begin(self, step: int) -> Future[list[Batch]]:
        return self._thread.submit(self._prepare, step)

    def _prepare(self, step: int) -> list[Batch]:
        batches = self._make(step)
        return [batch.in_pinned_memory() for batch in batches] if self._is_pinned else batches


@dataclass(frozen=True)
class Data:
    """The training and evaluation data of a recipe, with the collator and the order that make batches of them."""

    recipe: Recipe
    encoder: Encoder
    train: Any  # `Dataset`, `StreamedExamples`, or the rows of a kind of run without examples
    heldout: Dataset | None
    prompts: Any  # the sequence of evaluation prompts
    collator: Collator
    order: AnyOrder

    def batches(self, step: int, rank: int = 0, world: int = 1, rows: int | None = None) -> list[Batch]:
        """Return one rank's micro-batches of an optimiser step, counted from 1, of at most `rows` rows (None: all)."""
        pack = self.recipe.data.pack
        batches = micro_batches(
            self.indexed, self.order, self.collator, step, micro_batch_size=rows, rank=rank, world=world, pack=pack
        )
        if step < self.steps:
            begin_images(self.indexed, self.order, self.collator, step + 1, rank, world, pack)
        return batches

    @property
    def steps(self) -> int:
        """The number of optimiser steps of the run, from `train.steps` or `train.epochs`."""
        t = self.recipe.train
        if t.steps is not None:
            return t.steps
        assert t.epochs is not None and isinstance(self.train, Dataset)  # checked by the recipe and `refuse`
        return max(1, math.ceil(round(t.epochs * len(self.train) / t.batch_size, 6)))

    @property
    def indexed(self) -> Any:
        """The training examples by index: a sequence, or a stream that can only be read in rising order."""
        return self.train.examples if isinstance(self.train, Dataset) else self.train

    def heldout_batches(self, rank: int, world: int) -> Iterator[Batch]:
        """Yield one rank's batches of the held-out examples, the same at every evaluation."""
        t = self.recipe.train
        rows = t.micro_batch_size or max(1, t.batch_size // world)
        if self.heldout is not None:
            count = self.recipe.evaluation.rows
            examples = self.heldout.examples if count is None else self.heldout.examples[:count]
            yield from heldout_batches(examples, self.collator, rows, rank=rank, world=world)

    def step_examples(self, step: int) -> dict[int, Example]:
        """The examples of an optimiser step by sample id."""
        return {example.sample_id: example for example in (self.indexed[index] for _, index in self.order(step))}

    def lines(self) -> list[str]:
        """Describe the training and held-out rows, a line per source, and notes on settings that do not suit them."""
        sets = {"data": self.train, "held out": self.heldout}
        lines = [
            line
            for name, dataset in sets.items()
            if isinstance(dataset, Dataset)
            for title, statistics in dataset.statistics
            for line in (
                f"{name:<9} {'' if title == TOTAL else title + ': '}{statistics}",
                f"          {'' if title == TOTAL else _why_dropped(statistics, self.encoder)}",
                f"          {f'left out: {statistics.bad_rows}' if statistics.bad and title != TOTAL else ''}",
                f"          {statistics.altered}",
                f"          {'' if title == TOTAL else statistics.unread_keys}",
            )
            if line.strip()
        ]
        lines += [f"          {FILL}"] if lines and self.encoder.canvas_length > 1 else []
        if not isinstance(self.train, Dataset):
            unread = self.train.unread_keys
            return [f"data      {self.train.summary}", *[f"          {unread}"] * bool(unread), *lines]
        if self.recipe.data.turns != "all" and not any(each.conversations for _, each in self.train.statistics):
            lines.append("note      data.turns has no effect: it needs conversations, and all rows are raw prompts")
        count, batch, pack = len(self.train), self.recipe.train.batch_size, self.recipe.data.pack
        if batch > count:
            times = f"about {batch / count:,.1f} times in every optimiser step"
            examples = counted(count, "example")
            lines.append(f"note      train.batch_size: {batch:,} is more than the {examples}: each is used {times}")
        longer = 0 if pack is None else int((self.train.lengths > pack).sum())
        if longer:
            long_ones = f"{counted(longer, 'example')} {'is' if longer == 1 else 'are'} longer than its {pack} tokens"
            lines.append(f"note      data.pack: {long_ones}: each is alone in its row")
        return lines

    def report(self) -> dict[str, Any]:
        """The contents of the run's data.json: the form of prompts, and counts of rows per source."""
        sets = {"train": self.train, "heldout": self.heldout}
        counts = {name: dataset.to_record() for name, dataset in sets.items() if isinstance(dataset, Dataset)}
        day = {"day": str(self.encoder.day)} if asks_date(str(self.encoder.tokenizer.chat_template)) else {}
        return {"prompts": self.train.form, **day, **counts}


def _why_dropped(statistics: Statistics, encoder: Encoder) -> str:
    """Explain why rows of a source were left out, with the first of them; empty if none was."""
    if not statistics.dropped:
        return ""
    limit, first = encoder.max_length, statistics.first_dropped
    is_one = statistics.dropped == 1
    why, remedy = f"{'has' if is_one else 'have'} no room for a canvas within", "raise it"
    if encoder.too_long == "drop":
        why, remedy = f"{'is' if is_one else 'are'} longer than", f"raise it, or write {{truncate: {limit}}},"
    return (
        f"dropped: {counted(statistics.dropped, 'row')} {why} the {limit} tokens of data.max_length, {first} the "
        f"first; {remedy} to keep them"
    )


def sources(listed: Sequence[Source], recipe: Recipe, split: str) -> list[Source]:
    """The sources in a recipe. The recipe's columns and `split` are the defaults of sources without their own."""
    columns = recipe.data.columns.model_dump(exclude_none=True)
    return [source.with_defaults(split, columns) for source in listed]


def cache_directory(setting: str) -> Path | None:
    """The directory of the token cache, by `data.cache`; None for "off".

    "auto" is `BLOCKDIFF_CACHE`, or else blockdiff/ in the user's cache directory. A user without a home directory gets
    a warning and no cache. Raises DataError if the setting is a path in the missing home directory.
    """
    if setting == "off":
        return None
    users = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "blockdiff"
    chosen = os.environ.get("BLOCKDIFF_CACHE") if setting == "auto" else setting
    directory = Path(chosen or users)
    try:
        return directory.expanduser().absolute()
    except RuntimeError:  # there is no home directory
        if chosen:
            raise DataError(
                f"data.cache: {chosen}: this user has no home directory; write the path without ~"
            ) from None
        warnings.warn(
            "tokens are not cached: this user has no home directory; set data.cache to a directory",
            stacklevel=2,
        )
        return None


def image_reader(recipe: Recipe, base: StartingModel) -> ImageReader | None:
    """The reader of the images in rows; None if the recipe has no images.

    The image processor's settings are read from the model's directory, or of a preset from its tokenizer's.
    """
    if recipe.model.images == "none":
        return None
    images, tokens = recipe.data.images, base.config.image_tokens()
    assert tokens is not None, "a model without an image side was refused before"
    settings = find(str(recipe.model.path or recipe.model.tokenizer), with_weights=False)
    return ImageReader(settings, tokens, images.root, images.anywhere, adapt=base.config.image_processor)


def first_day(run: Path | None) -> date:
    """The date that a run's chat template wrote when the run began; today for a new run (None) or one without it."""
    day = read_json(run / DATA).get("day") if run is not None and (run / DATA).is_file() else None
    return date.today() if day is None else date.fromisoformat(str(day))


def encoder(
    recipe: Recipe, base: StartingModel, stride: int, reader: ImageReader | None = None, day: date | None = None
) -> Encoder:
    """The encoder of a recipe's rows.

    stride: the distance between possible starts of canvases in a response, in tokens. day: the date that chat
    templates write (None: today).
    """
    d = recipe.data
    return Encoder(
        base.tokenizer,
        base.eos_id,
        stride,
        None if d.max_length is None else d.max_length.tokens,
        enable_thinking=d.thinking,
        turns=d.turns,
        system=d.system,
        too_long="truncate" if d.max_length is None else d.max_length.too_long,
        chat=d.chat,
        verbatim=d.template == "verbatim",
        control_tokens=d.control_tokens,
        skips_bad_rows=d.on_bad_row == "skip",
        reader=reader,
        day=day or date.today(),
        aligned=base.aligned,
    )


@dataclass(frozen=True)
class Reading:
    """Reads the rows of a run.

    cache: the directory of the token cache (None: none).
    first: a context in which one rank of each node runs before the others.
    watch: an iterator that rows pass through, to show progress.
    """

    encode: Encoder
    cache: Path | None
    first: Callable[[], AbstractContextManager[object]]
    watch: Watch

    @classmethod
    def of(cls, recipe: Recipe, encode: Encoder, ranks: Ranks | None, watch: Watch | None) -> Reading:
        """The reading of a recipe's rows. ranks: None for a single process. watch: None shows nothing."""

        def first() -> AbstractContextManager[object]:
            return nullcontext() if ranks is None else ranks.node_first("reading the data")

        return cls(encode, cache_directory(recipe.data.cache), first, watch or (lambda rows: rows))

    def examples(self, recipe: Recipe) -> tuple[Dataset | StreamedExamples, AnyOrder]:
        """Return the examples of `data.train`, and their order."""
        specs, streaming = sources(recipe.data.train, recipe, "train"), recipe.data.streaming
        if streaming is not None:
            streamed = StreamedExamples(specs, self.encode, streaming.shuffle_buffer, recipe.seed, self.watch)
            return streamed, StreamOrder(recipe.train.batch_size)
        train = load_dataset(specs, self.encode, cache=self.cache, first=self.first(), watch=self.watch)
        return train, Order(train.sizes, recipe.train.batch_size, recipe.seed, train.weights)

    def heldout(self, recipe: Recipe) -> Dataset | None:
        """Return the examples of `data.heldout`; None if the recipe has none."""
        if recipe.data.heldout is None:
            return None
        specs = sources(recipe.data.heldout, recipe, "test")
        return load_dataset(specs, self.encode, cache=self.cache, first=self.first(), watch=self.watch)

    def prompts(self, recipe: Recipe) -> list[Row]:
        """Return the first rows of `evaluation.prompts`."""
        specs = sources(recipe.evaluation.prompts or (), recipe, "test")
        rows = chain.from_iterable(read_rows(spec) for spec in specs)
        return list(self.watch(islice(rows, recipe.evaluation.prompts_count)))


def settle_template(
    recipe: Recipe, base: StartingModel, encode: Encoder, has_conversations: bool, learns: bool
) -> None:
    """Set the tokenizer's chat template to that of the conversations, if the run learns their format or names it.

    Raises DataError for a `data.template` without any conversation.
    """
    if has_conversations:
        if learns or recipe.data.template == "verbatim":
            base.tokenizer.chat_template = encode.exported_template
    elif recipe.data.template != "tokenizer":
        raise DataError(
            "data.template: has no effect, because no row is a conversation; write rows with messages, set "
            "data.chat: true, or leave data.template out"
        )
