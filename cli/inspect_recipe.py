"""What `blockdiff inspect` prints of a recipe: model, data, and one batch as training draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blockdiff.checkpoint.tokenizer import decoder
from blockdiff.cli.inspect_model import parts, show_config, show_parts
from blockdiff.models.family import family_of
from blockdiff.plots.moments import visible
from blockdiff.training.build import corruption_of, read_origin, trains_routers
from blockdiff.training.data import read_data

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console
    from rich.text import Text

    from blockdiff.canvas import Batch
    from blockdiff.data.chat import Example
    from blockdiff.training.recipe import Recipe

CANVAS_COLOURS = ("cyan", "green", "yellow", "magenta", "blue")


def show_recipe(recipe: Recipe, console: Console, step: int, rows: int) -> None:
    """Print the model a recipe starts from, its data, and the batch of optimiser step `step`."""
    origin = read_origin(recipe)
    shapes = _hub_tensors(origin.config)
    show_config(origin.config, console, recipe.model.path or f"preset {recipe.model.preset} (random weights)")
    show_parts(parts(shapes, family_of(origin.config)), origin.config, console)
    console.print(f"router: {'trained' if trains_routers(recipe) else 'frozen'}")
    console.print()
    data = read_data(recipe, origin)
    for line in data.lines():
        console.print(line)
    batch = data.batches(step)[0]
    alpha = recipe.objective.schedule.alpha(batch.t_BC)
    corruption = corruption_of(recipe, origin)
    noisy_BCL, is_corrupted_BCL = corruption.corrupt(batch.canvas_BCL, alpha, batch.address_BC3, recipe.seed)
    is_present_BC = batch.length_BC > 0
    examples = data.examples_of(step)
    content_BC = content_lengths(batch, examples)
    corrupted = int((is_corrupted_BCL & batch.is_scored_BCL).sum())
    coins = int((batch.coin_BC & is_present_BC).sum())
    scored = int(batch.is_scored_BCL.sum())
    console.print()
    console.print(
        f"batch of optimiser step {step}: {len(batch.tokens_BS)} rows, {batch.tokens_BS.shape[1]} columns, "
        f"{int((batch.doc_start_BS < 0).sum())} of them padding"
    )
    console.print(
        f"  {int(is_present_BC.sum())} canvases, {coins} with self-conditioning; "
        f"{scored} positions scored, {scored - int(content_BC.sum())} of them fill; {corrupted} corrupted"
    )
    pairs = int(batch.is_ar_scored_BS.sum())
    ar = recipe.objective.ar_loss
    console.print(f"  {pairs} next-token pairs scored, weight {0 if ar is None else ar.weight:g}")
    decode = decoder(origin.tokenizer)
    console.print("  " + "; ".join(LEGEND))
    for row in range(min(rows, len(batch.tokens_BS))):
        samples = dict.fromkeys(batch.address_BC3[row, is_present_BC[row], 1].tolist())  # several in a packed row
        cut = {sample: ", cut at max_length" if examples[sample].is_truncated else "" for sample in samples}
        console.print()
        console.print(f"row {row}: " + "; ".join(examples[sample].where + cut[sample] for sample in samples))
        console.print(row_text(batch, row, content_BC, decode))
        for canvas in range(int(is_present_BC[row].sum())):
            console.print(canvas_text(batch, (row, canvas), noisy_BCL, is_corrupted_BCL, content_BC, decode))


LEGEND = ("prompt dim", "canvases coloured", "corrupted tokens reversed", "fill underlined")


def content_lengths(batch: Batch, examples: Mapping[int, Example]) -> torch.Tensor:
    """How many tokens of each canvas [B, C] are the response's own; the rest of a present one is fill."""
    L = batch.canvas_BCL.shape[-1]
    lengths_BC = torch.zeros_like(batch.length_BC)
    for row, canvas in (batch.length_BC > 0).nonzero().tolist():
        start = int(batch.start_BC[row, canvas] - batch.doc_start_BC[row, canvas])
        responses = examples[int(batch.address_BC3[row, canvas, 1])].responses
        end = next(end for begin, end in responses if begin <= start < end)
        lengths_BC[row, canvas] = min(L, end - start)
    return lengths_BC


def row_text(batch: Batch, row: int, content_BC: torch.Tensor, decode: Callable[[int], str]) -> Text:
    """The clean row: what no drawn canvas covers dim, each canvas in its colour."""
    from rich.text import Text

    colours: dict[int, str] = {}
    for canvas, length in enumerate(content_BC[row].tolist()):
        start = int(batch.start_BC[row, canvas])
        colours |= dict.fromkeys(range(start, start + length), _colour(canvas))
    text = Text("  ")
    for column, token in enumerate(batch.tokens_BS[row].tolist()):
        if batch.doc_start_BS[row, column] >= 0:
            text.append(_shown(decode(token)), style=colours.get(column, "dim"))
    return text


def _colour(canvas: int) -> str:
    return CANVAS_COLOURS[canvas % len(CANVAS_COLOURS)]


def canvas_text(
    batch: Batch,
    at: tuple[int, int],
    noisy_BCL: torch.Tensor,
    is_corrupted_BCL: torch.Tensor,
    content_BC: torch.Tensor,
    decode: Callable[[int], str],
) -> Text:
    """One canvas as the model gets it: its facts, then its noisy tokens, corrupted ones marked."""
    from rich.text import Text

    start, t, content = int(batch.start_BC[at]), float(batch.t_BC[at]), int(content_BC[at])
    scored, corrupted = int(batch.is_scored_BCL[at].sum()), int(is_corrupted_BCL[at].sum())
    coin = "with" if bool(batch.coin_BC[at]) else "no"
    text = Text(
        f"  canvas at column {start}: t {t:.3f}, {scored} scored, {corrupted} corrupted, "
        f"{scored - content} fill, {coin} signal\n  "
    )
    for place, token in enumerate(noisy_BCL[at].tolist()):
        style = _colour(at[1])
        style += " reverse" if bool(is_corrupted_BCL[(*at, place)]) else ""
        style += " underline" if place >= content else ""
        text.append(_shown(decode(token)), style=style)
    return text


def _shown(text: str) -> str:
    """Special tokens stay readable between letters; a line break shows as a sign."""
    return f"‹{visible(text)}›" if text.startswith("<") and len(text) > 2 else text.replace("\n", "⏎")


def _hub_tensors(config: object) -> list[tuple[str, tuple[int, ...], str]]:
    """(Hub name, shape, dtype) of a model that is not there yet."""
    from blockdiff.checkpoint import empty

    names = family_of(config).names
    state = empty(config).state_dict()
    return [(str(names.to_hub(name)), tuple(tensor.shape), "F32") for name, tensor in state.items()]
