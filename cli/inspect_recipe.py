"""The lines that `blockdiff inspect` prints about a recipe: model, data, and one batch as training draws it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import typer
from rich.text import Text

from blockdiff.canvas import Batch
from blockdiff.checkpoint.tokenizer import sequence_decoder
from blockdiff.cli.inspect_model import show_shape
from blockdiff.data.example import Example, ExampleImage
from blockdiff.data.image_file import decoded, image_bytes, image_name
from blockdiff.data.images import ImageReader
from blockdiff.terminal import counted, printable
from blockdiff.training.kinds.kind import Drawn, kind_of
from blockdiff.training.plan.rank import cut_to_rank, kept_bytes
from blockdiff.training.plan.training import weight_dtypes
from blockdiff.training.progress import Progress
from blockdiff.training.recipe import Recipe
from blockdiff.training.recipe_checks import refuse, without_effect
from blockdiff.training.starting_model import decided

LEGEND = "prompt dim; canvases coloured; corrupted tokens reversed; fill underlined; pinned tokens bold"
OF_BLOCKS = "prompt dim; blocks of the drafter coloured; its masks reversed"
GLOSSARY = (
    "t: the noise level, from 0 (clean) to 1 (all noise)",
    "signal: the model's first prediction, fed back into the canvases for which the coin is drawn (self-conditioning)",
)
Words = Callable[[Sequence[int]], list[str]]  # token ids in a row -> the text shown for each
SIDE = 32  # pixels of the longer side of a shown image
CANVAS_COLOURS = ("cyan", "green", "yellow", "magenta", "blue")


@dataclass(frozen=True)
class Shown:
    """A batch with its noise, and its examples by sample id."""

    drawn: Drawn
    examples: Mapping[int, Example]

    @property
    def batch(self) -> Batch:
        """The batch."""
        return self.drawn.batch


def show_recipe(recipe: Recipe, show: Progress, step: int, rows: int) -> dict[str, Any]:
    """Print a recipe's starting model, its data, and `rows` rows of the batch of optimiser step `step`.

    Returns the same as JSON values. Raises the errors that training raises before it reads weights, and
    typer.BadParameter if the run has fewer than `step` steps.
    """
    recipe, note = decided(recipe)
    refuse(recipe)
    kind = kind_of(recipe)
    base = kind.start(recipe)
    objective = kind.without_weights(recipe, base)
    needs = kept_bytes(cut_to_rank(objective, recipe), recipe, recipe.parallel.experts, *weight_dtypes(recipe, base))
    model = show_shape(
        objective.model, recipe.model.path or f"preset {recipe.model.preset} (random weights)", show, needs
    )
    data = kind.read_data(recipe, base, watch=show.reading)
    if step > data.steps:
        raise typer.BadParameter(f"{step} is past the end: the run has {data.steps} steps", param_hint="--step")
    if note:
        show.line(f"objective {note}")
    for line in ("", *data.lines(), *(f"note      {each}" for each in without_effect(recipe, data.steps)), ""):
        show.line(line)
    if (sizes_and_lines := kind.show_step(recipe, data, step, rows)) is not None:
        sizes, lines = sizes_and_lines
        for line in lines:
            show.line(line)
        return {"model": model, "data": data.report(), "batch": sizes}
    batch, examples = data.batches(step)[0], data.step_examples(step)
    reader = data.collator.reader
    shown = Shown(kind.drawn(recipe, base, batch), examples)
    ar = kind.losses(objective).get("ar")
    numbers = summary(shown, step, 0 if ar is None else ar.weight)
    for line in summary_lines(numbers):
        show.line(line)
    words = token_words(base.tokenizer)
    for row in range(min(rows, len(batch.tokens_BS)) if show.is_shown else 0):
        for text in row_texts(shown, row, words):
            show.console.print(text)
        for column, source in row_images(shown, row).items():
            if reader is not None:
                show.console.print(image_text(reader, column, *source, is_terminal=show.console.is_terminal))
    return {"model": model, "data": data.report(), "batch": numbers}


def token_words(tokenizer: Any) -> Words:
    """Return a function from consecutive token ids to the text shown for each.

    Special tokens are in brackets, and a line break is ⏎. Characters that span tokens are kept whole.
    """
    decode, special = sequence_decoder(tokenizer), set(tokenizer.all_special_ids)
    special |= {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    size = len(tokenizer)

    def words(ids: Sequence[int]) -> list[str]:
        return [
            f"‹{printable(text.removeprefix('<').removesuffix('>'))}›"
            if token in special or token >= size
            else printable(text.replace("\n", "⏎"))
            for token, text in zip(ids, decode(ids), strict=True)
        ]

    return words


def summary(shown: Shown, step: int, ar_weight: float) -> dict[str, Any]:
    """Return counts of the batch of optimiser step `step`: rows, padding, canvases, scored positions and others.

    ar_weight: the weight of the next-token loss. A batch without noise (a drafter's) has fewer counts.
    """
    batch, is_present_BC = shown.batch, shown.batch.length_BC > 0
    padding, scored = int((batch.doc_start_BS < 0).sum()), int(batch.is_scored_BCL.sum())
    corrupted = int((shown.drawn.is_corrupted_BCL & batch.is_scored_BCL).sum())
    coins, pairs = int((batch.coin_BC & is_present_BC).sum()), int(batch.is_ar_scored_BS.sum())
    rows, columns = batch.tokens_BS.shape
    numbers = {
        "step": step,
        "rows": rows,
        "columns": columns,
        "padding": padding,
        "canvases" if shown.drawn.has_noise else "blocks": int(is_present_BC.sum()),
        "scored": scored,
        "images": 0 if batch.images is None else len(batch.images.inputs),
    }
    if not shown.drawn.has_noise:
        return numbers
    return numbers | {
        "with_signal": coins,
        "fill": int((batch.is_scored_BCL & batch.is_fill_BCL).sum()),
        "pinned": int(batch.is_pinned_BCL.sum()),
        "corrupted": corrupted,
        "ar_pairs": pairs,
        "ar_weight": ar_weight,
    }


def summary_lines(numbers: Mapping[str, Any]) -> list[str]:
    """Return the lines for the counts of `summary`, and a legend of the colours in the rows below."""
    rows = counted(numbers["rows"], "row")
    first = "batch of optimiser step {step}: {0}, {columns} columns, {padding} of them padding".format(rows, **numbers)
    if (blocks := numbers.get("blocks")) is not None:
        return [first, f"  {counted(blocks, 'block')}; {numbers['scored']} positions scored", f"  {OF_BLOCKS}"]
    canvases = counted(numbers["canvases"], "canvas")
    return [
        first,
        f"  {canvases}, "
        + "{with_signal} with self-conditioning; "
        "{scored} positions scored, {fill} of them fill; {corrupted} corrupted".format(**numbers)
        + f"; {numbers['pinned']} pinned" * (numbers["pinned"] > 0),
        "  {ar_pairs} next-token pairs scored, weight {ar_weight:g}".format(**numbers),
        *[f"  {counted(numbers['images'], 'different image')}"] * (numbers["images"] > 0),
        f"  {LEGEND}",
        *(f"  {line}" for line in GLOSSARY),
    ]


def example_starts(shown: Shown, row: int) -> dict[int, Example]:
    """Return the examples of a row by the column where each begins; a packed row has several."""
    batch, count = shown.batch, int((shown.batch.length_BC[row] > 0).sum())
    samples = batch.address_BC3[row, :count, 1].tolist()
    return dict(zip(batch.doc_start_BC[row, :count].tolist(), map(shown.examples.__getitem__, samples), strict=True))


def row_images(shown: Shown, row: int) -> dict[int, tuple[ExampleImage, str]]:
    """Return the images of a row by the column of their first placeholder, each with the location of its example."""
    doc_starts = shown.batch.doc_start_BS[row].tolist()
    return {
        start + image.column: (image, example.where)
        for start, example in example_starts(shown, row).items()
        for image in example.images
        if start in doc_starts[start + image.column :][:1]  # images after the last canvas may be left out
    }


def image_text(reader: ImageReader, column: int, image: ExampleImage, where: str, is_terminal: bool) -> Text:
    """Describe an image in words, and at a terminal also by a small picture with two pixels per character.

    where: the location of its example, to which the path of its file may be relative.
    """
    source = reader.located(image.source, where)
    picture = decoded(image_bytes(source), image_name(source)).convert("RGB")
    width, height = picture.size
    text = Text(f"  image at column {column}: {printable(image_name(image.source))}, {width} x {height}, ")
    text.append(f"{image.tokens} tokens")
    if is_terminal:
        picture.thumbnail((SIDE, SIDE))
        pixels, (width, height) = picture.tobytes(), picture.size
        for y in range(0, height - 1, 2):
            text.append("\n  ")
            for x in range(width):
                upper, lower = (pixels[3 * (row * width + x) :][:3].hex() for row in (y, y + 1))
                text.append("▀", style=f"#{upper} on #{lower}")
    return text


def row_texts(shown: Shown, row: int, words: Words) -> list[Text]:
    """Return the lines for a row of the batch: its examples' locations, its clean tokens, and each noisy canvas."""
    batch, count = shown.batch, int((shown.batch.length_BC[row] > 0).sum())
    examples, images = example_starts(shown, row).values(), row_images(shown, row)
    origins = [each.where + ", cut at max_length" * each.is_truncated for each in examples]
    clean, canvases = Text("  "), []
    styles: dict[int, str] = {}
    for canvas in range(count):
        cell, colour = (row, canvas), CANVAS_COLOURS[canvas % len(CANVAS_COLOURS)]
        start, pinned = int(batch.start_BC[cell]), batch.is_pinned_BCL[cell].tolist()
        pairs = zip(batch.is_fill_BCL[cell].tolist(), pinned, strict=True)
        styles |= {start + offset: colour for offset, pair in enumerate(pairs) if not any(pair)}
        scored, corrupted = int(batch.is_scored_BCL[cell].sum()), int(shown.drawn.is_corrupted_BCL[cell].sum())
        fill = int((batch.is_scored_BCL[cell] & batch.is_fill_BCL[cell]).sum())
        text = Text(
            f"  block at column {start}: {scored} scored\n  "
            if not shown.drawn.has_noise
            else f"  canvas at column {start}: t {float(batch.t_BC[cell]):.3f}, {scored} scored, "
            f"{corrupted} corrupted, {fill} fill, {'with' if batch.coin_BC[cell] else 'no'} signal\n  "
        )
        marks = [
            colour
            + " reverse" * is_corrupted
            + (" underline" * is_fill + " bold" * is_pinned if shown.drawn.has_noise else "")
            for is_corrupted, is_fill, is_pinned in zip(
                *(x[cell].tolist() for x in (shown.drawn.is_corrupted_BCL, batch.is_fill_BCL, batch.is_pinned_BCL)),
                strict=True,
            )
        ]
        # Tokens of one style are decoded together; a character across a kept and a corrupted token would be broken.
        for style, group in groupby(zip(shown.drawn.noisy_BCL[cell].tolist(), marks, strict=True), key=itemgetter(1)):
            text.append("".join(words([token for token, _ in group])), style=style)
        canvases.append(text)
    hidden = {start + part for start, (image, _) in images.items() for part in range(image.tokens)}
    columns = [column for column, start in enumerate(batch.doc_start_BS[row].tolist()) if start >= 0]
    for column, word in zip(columns, words(batch.tokens_BS[row, columns].tolist()), strict=True):
        if column in images:
            clean.append(f"‹image of {images[column][0].tokens} tokens›", style="bold")
        elif column not in hidden:
            clean.append(word, style=styles.get(column, "dim"))
    return [Text(printable(f"\nrow {row}: " + "; ".join(origins))), clean, *canvases]
