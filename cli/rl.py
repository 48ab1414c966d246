"""`blockdiff rl`: a recipe with a section `rl` becomes a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli import options
from blockdiff.cli.train import run


def rl(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML recipe with rl (recipes/README.md).")],
    set_: options.Overrides = None,
    output: options.RunDirectory = None,
    resume: options.Resume = False,
    overwrite: options.ReplaceRun = False,
) -> None:
    """Reinforce the answers of a model that earn rewards, as a recipe says.

    The rows of data.train need no response, and rl.reward judges the answers.
    The run directory is that of `blockdiff train`, and so is everything else.
    """
    run(recipe, set_, output, resume, overwrite, is_rl=True)
