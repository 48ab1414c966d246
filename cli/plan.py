"""`blockdiff plan`: the memory of a training or a sampling, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli import options

GIB = 2**30


def plan(
    target: Annotated[str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe, a checkpoint or a hub id.")],
    set_: options.Overrides = None,
    gpus: Annotated[int, typer.Option(min=1, help="Processes that train together, one GPU each.")] = 1,
    gpu_memory: Annotated[float | None, typer.Option(min=0.001, help="GiB of each, to compare with.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Of the longest row, or of a sampled prefix.")] = None,
    quantize: options.Quantize = None,
    device: Annotated[str, typer.Option(help="cuda (Triton's kernels) or cpu (native ones).")] = "cuda",
    tflops: Annotated[float, typer.Option(min=0.001, help="TFLOP/s of a GPU, to estimate seconds.")] = 400.0,
    bandwidth: Annotated[float, typer.Option(min=0.001, help="TB/s that a GPU reads and writes, likewise.")] = 3.0,
    network: Annotated[float, typer.Option(min=0.001, help="GB/s that a GPU receives from others, likewise.")] = 100.0,
) -> None:
    """Say how much memory each part takes at the peak, and what to change where it does not fit (exit code 1).

    Nothing is loaded or allocated: a layer of each kind is run on shapes. A recipe is planned for training, a model
    for sampling. The data of a recipe need not be there.
    """
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"{device!r} is neither cuda nor cpu", param_hint="--device")
    if quantize is not None and Path(target).suffix in (".yaml", ".yml"):
        raise typer.BadParameter("a recipe says it itself; --set model.quantize=fp8", param_hint="--quantize")
    if set_ and Path(target).suffix not in (".yaml", ".yml"):
        raise typer.BadParameter("only a recipe (a .yaml file) has keys to set", param_hint="--set")
    limit = None if gpu_memory is None else int(gpu_memory * GIB)
    if Path(target).suffix in (".yaml", ".yml"):
        rates = tflops * 1e12, bandwidth * 1e12, network * 1e9
        fits = _training(target, set_ or [], gpus, limit, tokens, device, rates)
    else:
        fits = _sampling(target, limit, tokens or 1000, device, quantize)
    raise typer.Exit(0 if fits else 1)


def _training(
    target: str,
    overrides: list[str],
    gpus: int,
    limit: int | None,
    tokens: int | None,
    device: str,
    rates: tuple[float, float, float],
) -> bool:
    from blockdiff.training.plan import training as plans
    from blockdiff.training.plan.changes import what_fits
    from blockdiff.training.plan.work import Rates
    from blockdiff.training.recipe_checks import refuse
    from blockdiff.training.recipe_files import read_recipe
    from blockdiff.training.starting_model import read_starting_model, with_objective_of_base

    recipe, _ = with_objective_of_base(read_recipe(target, overrides, needs_data=False))
    refuse(recipe, gpus)
    base, reached = read_starting_model(recipe), Rates(*rates)
    made = plans.plan_training(recipe, ranks=gpus, device=device, tokens=tokens, base=base)
    for line in plans.lines(made, limit):
        print(line)
    if device == "cuda":
        print(plans.time_line(made, reached))
    if limit is None or made.total <= limit:
        return True
    print(f"what breaks: {plans.breaking(made, limit)}")
    found = what_fits(recipe, limit, base, ranks=gpus, device=device, tokens=tokens)
    if found is None:
        print("no change of the recipe that is known here makes it fit; take more GPUs, or GPUs with more memory")
        return False
    changes, smaller = found
    words = " ".join(f"--set '{change}'" for change in changes)
    print(f"what fits: {words}  ({plans.size(smaller.total)})")
    return False


def _sampling(target: str, limit: int | None, tokens: int, device: str, quantize: str | None) -> bool:
    from blockdiff import checkpoint
    from blockdiff.checkpoint.adapters import apart_from_adapter
    from blockdiff.checkpoint.fp8 import form_below, is_fp8
    from blockdiff.memory import size
    from blockdiff.training.plan.sampling import plan_sampling

    directory, adapter = apart_from_adapter(target)
    config = checkpoint.read_config(directory)
    if quantize is None and adapter is not None:
        quantize = form_below(adapter)
    made = plan_sampling(config, device=device, quantize=quantize, adapter=adapter)
    print(f"weights in {'fp8 and bf16' if is_fp8(config, quantize) else 'bf16':<16}{size(made.weights):>12}")
    print(f"cache of 1,000 tokens      {size(made.cache):>12} a row")
    print(f"a denoising step           {size(made.step[0]):>12}, and {size(made.step[1])} for each further row")
    if limit is None:
        return True
    rows = made.rows(limit, tokens)
    print(f"rows of {tokens:,} tokens that fit into {size(limit)}: {rows:,}")
    return rows > 0
