"""`blockdiff plan`: whether a training or a sampling fits into memory, before anything is loaded."""

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
    device: Annotated[str, typer.Option(help="cuda (Triton's kernels) or cpu (native ones).")] = "cuda",
    tflops: Annotated[float, typer.Option(min=0.001, help="TFLOP/s of a device, to estimate seconds.")] = 400.0,
) -> None:
    """Say how much memory each part takes at the peak, and what to change where it does not fit (exit code 1).

    Nothing is loaded or allocated: the step is run on tensors without memory. A recipe is planned for training, a model
    for sampling.
    """
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"{device!r} is neither cuda nor cpu", param_hint="--device")
    limit = None if gpu_memory is None else int(gpu_memory * GIB)
    if Path(target).suffix in (".yaml", ".yml"):
        fits = _training(target, set_ or [], gpus, limit, tokens, device, tflops)
    else:
        fits = _sampling(target, limit, tokens or 1000, device)
    raise typer.Exit(0 if fits else 1)


def _training(
    target: str, overrides: list[str], gpus: int, limit: int | None, tokens: int | None, device: str, tflops: float
) -> bool:
    from blockdiff.training import plan as plans
    from blockdiff.training.build import read_base
    from blockdiff.training.recipe import read_recipe
    from blockdiff.training.refuse import refuse

    recipe = read_recipe(target, overrides)
    refuse(recipe, gpus)
    base = read_base(recipe)
    made = plans.plan_training(recipe, ranks=gpus, device=device, tokens=tokens, base=base)
    for line in plans.lines(made, limit):
        print(line)
    seconds = made.flops / tflops / 1e12
    print(f"about {seconds:.3g} s a step at {tflops:g} TFLOP/s (an estimate from the products alone)")
    if limit is None or made.total <= limit:
        return True
    largest = max(made.parts, key=lambda name: made.parts[name])
    print(f"the largest part: {largest}")
    found = plans.what_fits(recipe, limit, base, ranks=gpus, device=device, tokens=tokens)
    if found is None:
        print("no change of the recipe that is known here makes it fit; take GPUs with more memory or shorter rows")
        return False
    changes, smaller = found
    words = " ".join(f"--set '{change}'" for change in changes)
    print(f"what fits: {words}  ({plans.size(smaller.total)})")
    return False


def _sampling(target: str, limit: int | None, tokens: int, device: str) -> bool:
    from blockdiff import checkpoint
    from blockdiff.memory import size
    from blockdiff.training.plan import plan_sampling

    made = plan_sampling(checkpoint.read_config(target), device=device)
    print(f"weights in bf16            {size(made.weights):>12}")
    print(f"cache of 1,000 tokens      {size(made.cache):>12} a row")
    print(f"a denoising step           {size(made.step[0]):>12}, and {size(made.step[1])} for each further row")
    if limit is None:
        return True
    rows = made.rows(limit, tokens)
    print(f"rows of {tokens:,} tokens that fit into {size(limit)}: {rows:,}")
    return rows > 0
