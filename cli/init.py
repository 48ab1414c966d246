"""`blockdiff init`: random weights in Hub layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli import options
from blockdiff.errors import CheckpointError


def init(
    preset: Annotated[
        str, typer.Argument(metavar="PRESET", help="A preset's name (recipes/presets) or the path of one.")
    ],
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where to write it; must not hold a checkpoint yet.")
    ],
    seed: Annotated[int, typer.Option(min=0, max=options.MAX_SEED, help="The same seed gives the same weights.")] = 0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    tokenizer: Annotated[str | None, typer.Option(help="A directory or hub id to copy it from.")] = None,
) -> None:
    """Write a model with random weights in Hub layout."""
    if dtype not in ("float32", "bfloat16"):
        raise typer.BadParameter(f"{dtype!r} is neither float32 nor bfloat16", param_hint="--dtype")
    if (directory / "config.json").exists():
        raise CheckpointError(f"{directory}: holds a checkpoint already; name another directory or remove it")
    from blockdiff import checkpoint
    from blockdiff.checkpoint.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    model = checkpoint.init(preset, seed=seed, dtype=dtype)
    checkpoint.save(model, directory, tokenizer=loaded)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"{directory}: {preset}, {count:,} parameters, {dtype}, seed {seed}")
    if loaded is None:
        print("no tokenizer in it; give one with --tokenizer DIR before sampling")
