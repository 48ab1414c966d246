"""`blockdiff plot`: curves of one run, or of several compared, as a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli import options
from blockdiff.terminal import say_out


def plot(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories of `blockdiff train`.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The PNG to write.")],
    overwrite: options.Overwrite = False,
) -> None:
    """Draw the losses, accuracies, steps per canvas and speed of one run or of several.

    Several runs share every panel, each in its own colour. A run may still be
    going on.
    """
    from blockdiff.plots.curves import draw_comparison

    if output.suffix.lower() != ".png":
        raise typer.BadParameter(f"{output} is no .png file", param_hint="--output")
    options.require_free(output, overwrite=overwrite)
    options.make_parent(output)
    draw_comparison(runs, output)
    say_out(f"{output}: {len(runs)} run{'s' * (len(runs) != 1)}")
