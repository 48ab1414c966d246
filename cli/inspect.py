"""`blockdiff inspect`: what a model is made of, or what a recipe would train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli import options


def inspect(
    target: Annotated[str, typer.Argument(metavar="MODEL|RECIPE", help="A checkpoint, a hub id, or a recipe.")],
    set_: options.Overrides = None,
    step: Annotated[int, typer.Option(min=1, help="A recipe: the optimiser step whose batch is drawn.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="A recipe: how many rows of that batch to show.")] = 3,
) -> None:
    """Show a model: its sizes, the parts that train, its memory. For a recipe also show one batch as training draws it.

    Reads headers only: no weights are loaded.
    """
    is_recipe = Path(target).suffix in (".yaml", ".yml")
    if set_ and not is_recipe:
        raise typer.BadParameter("only a recipe (a .yaml file) has keys to set", param_hint="--set")
    if not is_recipe and (step, rows) != (1, 3):
        raise typer.BadParameter("only a recipe (a .yaml file) has batches to draw", param_hint="--step, --rows")
    from blockdiff.terminal import quiet
    from blockdiff.training.progress import Progress

    quiet()
    show = Progress(steps=0, is_shown=True)
    if not is_recipe:
        from blockdiff.cli.inspect_model import show_model

        show_model(target, show)
        return
    from blockdiff.cli.inspect_recipe import show_recipe
    from blockdiff.training.recipe_files import read_recipe

    show_recipe(read_recipe(target, set_ or ()), show, step, rows)
