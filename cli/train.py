"""`blockdiff train`: a recipe becomes a run directory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdiff.errors import RecipeError, RunError

if TYPE_CHECKING:
    from blockdiff.recipe import Recipe


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
    from blockdiff.recipe import read_recipe

    overrides = list(set_ or [])
    settled = read_recipe(recipe, overrides)
    where = output if output is not None else settled.output
    if where is None:
        raise RecipeError(f"{recipe}: output: missing; give --output DIR or set it in the recipe")
    run = Path(where).expanduser().absolute()
    settled = settled.model_copy(update={"output": str(run)})

    from blockdiff.cli.loading import quiet
    from blockdiff.training.parallel import from_accelerate
    from blockdiff.training.state import steps_saved

    quiet()
    parallel = from_accelerate()
    try:
        _train(settled, run, resume, parallel)
    except KeyboardInterrupt:
        if parallel.is_main:
            reached = max(steps_saved(run), default=0)
            print(f"stopped; `--resume --output {where}` goes on from step {reached}")
        raise
    finally:
        parallel.close()


def _train(recipe: Recipe, run: Path, resume: bool, parallel: Any) -> None:
    from blockdiff import checkpoint
    from blockdiff.cli import assemble
    from blockdiff.cli.progress import Progress
    from blockdiff.data.collate import heldout_batches, micro_batches
    from blockdiff.plots.curves import draw_curves
    from blockdiff.training import loop, optim, state
    from blockdiff.training.heldout import heldout_losses
    from blockdiff.training.metrics import FILE_NAME, MetricsLog

    show = Progress(recipe.train.steps, is_shown=parallel.is_main)
    base = assemble.basis(recipe)
    assemble.generation(recipe, base)  # refused now rather than after the training
    data = assemble.data(recipe, base)
    show.line(f"data      {data.statistics}")
    if data.heldout_statistics is not None:
        show.line(f"held out  {data.heldout_statistics}")

    found = state.enter(run, resume, parallel)
    try:
        model = assemble.model(recipe, base, parallel.device)
        objective = assemble.objective(recipe, model)
    except BaseException:
        _leave_nothing(run)
        raise
    origin = recipe.model.path or f"preset {recipe.model.preset}"
    show.line(f"model     {origin}: {assemble.what_trains(model)}; {model.dtype}".replace("torch.", ""))
    show.line(f"run       {run}: {_plan_line(recipe, len(data.train))}, {parallel.world} x {parallel.device}")

    o, t = recipe.optim, recipe.train
    optimiser = optim.adamw(objective, o.lr, o.betas, o.eps, o.weight_decay)
    known = assemble.facts(recipe, data)
    start = state.restore(found, model, optimiser, known) if found is not None else 0
    if start > t.steps:
        raise RunError(f"{run}: already at step {start}, past train.steps = {t.steps}; raise train.steps to go on")
    log = MetricsLog(run / FILE_NAME)
    seconds = 0.0
    if parallel.is_main:
        (run / "recipe.yaml").write_text(recipe.resolved(), encoding="utf-8")
        kept = log.cut(start if found is not None else -1)  # from the beginning, evaluation at step 0 comes again
        seconds = max((record.get("seconds", 0.0) for record in kept), default=0.0)
    if found is not None:
        show.line(f"resumed   {found}")
    rank, world = parallel.rank, parallel.world

    def batches(step: int) -> Any:
        return micro_batches(
            data.train,
            data.plan,
            data.collator,
            step,
            micro_batch_size=t.micro_batch_size,
            rank=rank,
            world=world,
        )

    def evaluate(step: int) -> dict[str, float]:
        rows = t.micro_batch_size or max(1, t.batch_size // world)
        held = heldout_batches(data.heldout, data.collator, rows, rank=rank, world=world)
        return heldout_losses(objective, held, parallel, t.autocast)

    def record(values: dict[str, Any]) -> None:
        log.append(values)
        show.record(values)

    def save(step: int) -> None:
        state.save(run, step, model, optimiser, known, t.keep, parallel)

    options = loop.Options(
        steps=t.steps,
        ar_weight=recipe.objective.ar_weight,
        clip=o.clip,
        autocast=t.autocast,
        log_every=t.log_every,
        eval_every=t.eval_every,
        save_every=t.save_every,
    )
    began = time.perf_counter()
    with show.running(start):
        loop.train(
            objective,
            optimiser,
            optim.WarmupCosine(o.lr, t.steps, o.warmup_steps, o.final_lr_ratio).lr,
            batches,
            options,
            parallel,
            log=record,
            evaluate=evaluate if data.heldout else None,
            save=save,
            on_step=show.step,
            start=start,
            seconds=seconds,
        )
    if parallel.is_main:
        settings = assemble.generation(recipe, base)
        checkpoint.save(model, run / "model", tokenizer=base.tokenizer, generation_config=settings, overwrite=True)
        draw_curves(run / FILE_NAME, run / "curves.png", title=run.name)
        took = time.perf_counter() - began
        show.line(
            f"done      {t.steps - start} optimiser steps in {took:.1f} s: {run}/model, {run}/curves.png"
        )
    parallel.barrier()


def _plan_line(recipe: Recipe, examples: int) -> str:
    t = recipe.train
    epochs = t.steps * t.batch_size / examples
    count = recipe.data.canvases
    scored = f"{count} canvas{'es' * (count != 1)}"
    return f"{t.steps} optimiser steps of {t.batch_size} rows, {scored} per row, {epochs:.1f} epochs"


def _leave_nothing(run: Path) -> None:
    """A run that failed before its first step leaves no empty directory that would refuse the next try."""
    for directory in (run / "checkpoints", run):
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
