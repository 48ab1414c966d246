"""`blockdiff inspect`: what a model is made of, or what a recipe would train on."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from blockdiff.cli import options


def inspect(
    target: Annotated[str, typer.Argument(metavar="MODEL|RECIPE", help="A checkpoint, a hub id, or a recipe.")],
    set_: options.Overrides = None,
    step: Annotated[int, typer.Option(min=1, metavar="N", help="Of a recipe: draw the batch of optimiser step N.")] = 1,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Of a recipe: show N rows of that batch.")] = 3,
    as_json: options.AsJson = False,
) -> None:
    """Show the sizes, trained parts and memory of a model; for a recipe also one batch as training draws it.

    No weights are loaded; those that blockdiff wrote are checked by digest.
    """
    is_recipe = options.is_recipe(target, set_)
    if not is_recipe and (step, rows) != (1, 3):
        raise typer.BadParameter("only a recipe (a .yaml file) has batches to draw", param_hint="--step, --rows")
    from blockdiff.terminal import quiet, say_out
    from blockdiff.training.progress import Progress

    quiet()
    show = Progress(steps=0, is_shown=not as_json)
    if not is_recipe:
        from blockdiff.cli.inspect_model import show_model

        summary = show_model(target, show)
    else:
        from blockdiff.cli.inspect_recipe import show_recipe
        from blockdiff.training.recipe_files import read_recipe

        summary = show_recipe(read_recipe(target, set_ or ()), show, step, rows)
    if as_json:
        say_out(json.dumps(summary, indent=1))
