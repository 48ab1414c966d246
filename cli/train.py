"""`blockdiff train`: a recipe becomes a run directory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli import options


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A YAML recipe, or the name of a packaged one, such as quickstart.")
    ],
    set_: options.Overrides = None,
    output: options.RunDirectory = None,
    resume: options.Resume = False,
    overwrite: options.ReplaceRun = False,
) -> None:
    """Train a model as a recipe says.

    The run directory gets recipe.yaml, metrics.jsonl, checkpoints/step-N, model
    and curves.png. Several processes: `accelerate launch -m blockdiff train
    ...`.
    """
    if output == "":
        raise typer.BadParameter("is empty; name a directory", param_hint="--output")
    if resume and overwrite:
        raise typer.BadParameter("--resume goes on with a run and --overwrite replaces it; give one of them")
    from blockdiff.parallel.signals import Stopped
    from blockdiff.terminal import quiet, say
    from blockdiff.training.trainer import Trainer

    trainer = Trainer(recipe, list(set_ or []), output, resume, overwrite=overwrite)
    quiet()
    try:
        trainer.fit()
    except Stopped as stopped:
        if int(os.environ.get("RANK", "0")) == 0:
            where = output if output is not None else trainer.directory
            say(f"{stopped}; `--resume --output {where}` goes on from there")
        raise typer.Exit(stopped.exit_code) from None
