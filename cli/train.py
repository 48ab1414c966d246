"""`blockdiff train`: a recipe becomes a run directory."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockdiff.errors import RecipeError, RunError

if TYPE_CHECKING:
    from blockdiff.parallel.ranks import Ranks
    from blockdiff.training.recipe import Recipe


def train(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A YAML recipe (recipes/README.md lists the keys).")
    ],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a key (YAML value).")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The run directory.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
) -> None:
    """Train a model as a recipe says.

    The run directory gets recipe.yaml (as resolved), metrics.jsonl, checkpoints/step-N, model (Hub layout)
    and curves.png. Several processes: `accelerate launch -m blockdiff train ...`.
    """
    from blockdiff.training.recipe import read_recipe

    overrides = list(set_ or [])
    settled = read_recipe(recipe, overrides)
    where = output if output is not None else settled.output
    if where is None:
        raise RecipeError(f"{recipe}: output: missing; give --output DIR or set it in the recipe")
    run = Path(where).expanduser().absolute()
    settled = settled.model_copy(update={"output": str(run)})

    from blockdiff.parallel.ranks import from_accelerate
    from blockdiff.parallel.signals import Stopped
    from blockdiff.terminal import quiet

    quiet()
    ranks = from_accelerate(timeout=settled.train.timeout)
    try:
        with ranks.guarded("the start or the end of the run"):
            _train(settled, run, resume, ranks)
    except Stopped as stopped:
        if ranks.is_main:
            print(f"{stopped}; `--resume --output {where}` goes on from there", file=sys.stderr)
        raise typer.Exit(stopped.exit_code) from None
    finally:
        ranks.close()


def _train(recipe: Recipe, run: Path, resume: bool, ranks: Ranks) -> None:
    from blockdiff.parallel.signals import caught
    from blockdiff.training import loop, state
    from blockdiff.training.progress import Progress
    from blockdiff.training.refuse import refuse, without_effect
    from blockdiff.training.run import prepare
    from blockdiff.training.schedule import learning_rate

    t, o = recipe.train, recipe.optim
    show = Progress(t.steps, is_shown=ranks.is_main)
    refuse(recipe, ranks.world)
    for line in without_effect(recipe):
        show.line(f"note      {line}")
    found = state.enter(run, resume, ranks)
    try:
        parts = prepare(recipe, run, ranks, show)
    except BaseException:
        if ranks.is_main:
            _leave_nothing(run)
        raise
    start = 0
    if found is not None:
        start = state.restore(
            found, parts.model, parts.optimiser, parts.facts, ema=parts.ema, ranks=ranks
        )
        if start > t.steps:
            raise RunError(f"{run}: already at step {start}, past train.steps = {t.steps}; raise train.steps to go on")
        show.line(f"resumed   {found}")
    elif resume:
        show.line(f"resumed   nothing: {run} has no checkpoint, so this starts at step 0")
    logged = parts.begin(start if found is not None else None)
    try:
        with caught(speaks=ranks.is_main) as signals, show.running(start):
            reached = loop.train(
                parts.objective,
                parts.optimiser,
                partial(learning_rate, o.schedule, peak=o.lr, steps=t.steps, warmup_steps=o.warmup_steps),
                parts.batches,
                parts.options(),
                ranks,
                log=parts.record,
                evaluate=parts.evaluate if parts.data.heldout is not None else None,
                sample=parts.sample if parts.data.prompts else None,
                save=parts.save,
                on_step=show.step,
                after_step=parts.after_step,
                is_best=parts.is_best,
                should_stop=parts.should_stop,
                is_stopping=signals.is_stopping,
                logged=logged,
                start=start,
                seconds=max((record.get("seconds", 0.0) for record in logged), default=0.0),
            )
        with ranks.main_first("exporting the model"):
            if ranks.is_main:
                parts.finish(reached)
    finally:
        parts.close()


def _leave_nothing(run: Path) -> None:
    """A run that failed before its first step leaves no empty directory that would refuse the next try."""
    for directory in (run / "checkpoints", run):
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
