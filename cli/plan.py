"""`blockdiff plan`: the memory of a training or a sampling, before anything is loaded."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from blockdiff.cli import options
from blockdiff.terminal import say_out

GIB = 2**30


def plan(
    target: Annotated[str, typer.Argument(metavar="RECIPE|MODEL", help="A recipe, a checkpoint or a hub id.")],
    set_: options.Overrides = None,
    gpus: Annotated[
        int, typer.Option(min=1, metavar="N", help="Processes that train together, with one GPU each.")
    ] = 1,
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=0.001, metavar="GIB", help="Memory of each GPU; without it, that of the device here."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Length of the longest row, or of a sampled prefix.")
    ] = None,
    image_tokens: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Tokens of a row's images; without it, the most that one image has."),
    ] = None,
    quantize: options.Quantize = None,
    as_json: options.AsJson = False,
    device: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=options.DEVICE, help="cuda (Triton) or cpu (C and torch).")
    ] = "cuda",
) -> None:
    """Say how much memory training or sampling takes at its peak, and what to change where it does not fit.

    A recipe is planned for training, a model for sampling. Nothing is loaded: a
    layer of each kind is run on shapes, and the data of a recipe need not be
    there. The exit code is 1 if the memory is known and not enough.
    """
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"{device!r} is neither cuda nor cpu", param_hint="--device")
    is_recipe = options.is_recipe(target, set_)
    if quantize is not None and is_recipe:
        raise typer.BadParameter(f"a recipe says it itself; --set model.quantize={quantize}", param_hint="--quantize")
    if image_tokens is not None and not is_recipe:
        raise typer.BadParameter("is for the recipe of a training; leave it out", param_hint="--image-tokens")
    limit = _memory_here(device) if gpu_memory is None else int(gpu_memory * GIB)
    if is_recipe:
        lines, report = _training(target, set_ or [], gpus, limit, tokens, image_tokens, device)
    else:
        lines, report = _sampling(target, limit, tokens or 1000, device, quantize)
    if limit is None:
        lines.append("no GPU is here to compare with; --gpu-memory GIB says whether it fits one")
    say_out(json.dumps(report, indent=1) if as_json else "\n".join(lines))
    raise typer.Exit(1 if report["fits"] is False else 0)


def _memory_here(device: str) -> int | None:
    """Return the memory in bytes of this machine's first device of a kind (cuda, cpu); None if there is none."""
    import torch

    from blockdiff.memory import total_bytes

    return None if device == "cuda" and not torch.cuda.is_available() else total_bytes(device)


def _training(
    target: str,
    overrides: list[str],
    gpus: int,
    limit: int | None,
    tokens: int | None,
    image_tokens: int | None,
    device: str,
) -> tuple[list[str], dict[str, Any]]:
    """Plan the memory of a training. Returns the lines to print, and JSON values.

    limit: bytes of each GPU (None: unknown); tokens, image_tokens: of the longest row (None: from the recipe). In the
    JSON values `fits` is None without a limit. If the training does not fit, both also name changes with which it
    fits, if any are known.
    """
    from blockdiff.training.kinds.kind import kind_of
    from blockdiff.training.plan import training as plans
    from blockdiff.training.plan.fitting import what_fits
    from blockdiff.training.recipe_checks import refuse
    from blockdiff.training.recipe_files import read_recipe
    from blockdiff.training.starting_model import decided

    recipe, _ = decided(read_recipe(target, overrides, needs_data=False))
    refuse(recipe, gpus)
    if image_tokens is not None and recipe.model.images == "none":
        raise typer.BadParameter("the recipe takes no images (model.images: none)", param_hint="--image-tokens")
    base = kind_of(recipe).planned_start(recipe)
    arguments: dict[str, Any] = {"ranks": gpus, "device": device, "tokens": tokens, "image_tokens": image_tokens}
    memory = plans.plan_training(recipe, base=base, **arguments)
    fits = None if limit is None else memory.fits(limit)
    report: dict[str, Any] = {
        "fits": fits,
        "limit": limit,
        "bytes": memory.total,
        "parts": memory.parts,
        "host": memory.host,
    }
    sizes = ("rows", "tokens", "canvases", "image_tokens", "numbers", "trained")
    report |= {name: getattr(memory, name) for name in sizes}
    lines = [*plans.lines(memory, limit)]
    if limit is None or fits:
        return lines, report
    lines.append(f"what breaks: {plans.breaking(memory, limit)}")
    solution = what_fits(recipe, limit, base, **arguments)
    if solution is None:
        lines.append("no change of the recipe that is known here makes it fit; take more GPUs, or larger ones")
        return lines, report
    changes, smaller = solution
    words = " ".join(f"--set '{change}'" for change in changes)
    host = sum(smaller.host.values())
    on_host = f", and {plans.size(host)} on the host" if host else ""
    lines.append(f"what fits: {words}  ({plans.size(smaller.total)}{on_host})")
    return lines, report | {"changes": list(changes), "bytes_with_changes": smaller.total}


def _sampling(
    target: str, limit: int | None, tokens: int, device: str, quantize: str | None
) -> tuple[list[str], dict[str, Any]]:
    """Plan the memory of sampling. Returns the lines to print, and JSON values.

    limit: bytes of the device (None: unknown); tokens: length of a row, to count the rows that fit. In the JSON values
    `fits` is None without a limit, else whether at least one row fits.
    """
    from blockdiff import checkpoint
    from blockdiff.checkpoint.opening import model_files
    from blockdiff.checkpoint.stored import form_below
    from blockdiff.errors import CheckpointError
    from blockdiff.memory import size
    from blockdiff.training.plan.sampling import plan_sampling
    from blockdiff.training.plan.training import spare

    files = model_files(target, with_weights=False)
    config = checkpoint.read_config(files.weights)
    if config.is_drafter:
        raise CheckpointError(f"{target} is a drafter, which samples nothing alone; plan the recipe that trains it")
    if quantize is None and files.adapter is not None:
        quantize = form_below(files.adapter)
    memory = plan_sampling(config, device=device, quantize=quantize, adapter=files.adapter)
    lines = [
        f"weights in {', '.join([*memory.forms, 'bf16']):<16}{size(memory.weights):>12}",
        f"cache of 1,000 tokens      {size(memory.cache):>12} a row",
        f"a denoising step           {size(memory.step[0]):>12}, and {size(memory.step[1])} for each further row",
    ]
    if memory.images:
        lines.insert(1, f"weights of the image side  {size(memory.images):>12}, from the first image on")
    report: dict[str, Any] = {"fits": None, "limit": limit, "weights": memory.weights, "image_side": memory.images}
    report |= {
        "cache_of_1000_tokens": memory.cache,
        "step_of_a_row": memory.step[0],
        "step_of_a_further_row": memory.step[1],
    }
    if limit is not None:
        rows = memory.rows(limit, tokens)
        lines.append(
            f"rows of {tokens:,} tokens that fit into {size(limit)}, {size(spare(limit))} of it left free: {rows:,}"
        )
        report |= {"fits": rows > 0, "tokens": tokens, "rows": rows}
    return lines, report
