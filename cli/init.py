"""`blockdiff init`: random weights in Hub layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli import options
from blockdiff.errors import CheckpointError


def init(
    preset: Annotated[
        str | None,
        typer.Argument(metavar="[PRESET]", help="A preset's name (recipes/presets) or the path of one."),
    ] = None,
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Where to write it; must not hold a checkpoint yet.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="MODEL", help="Make a causal model a block-diffusion one, without a PRESET."),
    ] = None,
    canvas_length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --from: the number of tokens of a canvas (256).")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="With --from: a clean token sees those before it (causal), or its whole canvas, too (blocks).",
        ),
    ] = None,
    drafter_for: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Make a drafter for a model, without a PRESET."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, metavar="N", help="With --drafter-for: its layers (5).")] = None,
    block: Annotated[
        int | None,
        typer.Option(min=2, metavar="N", help="With --drafter-for: tokens of a block, one more than it drafts (16)."),
    ] = None,
    mask_token: Annotated[
        str | None,
        typer.Option(metavar="TOKEN", help="With --drafter-for: its mask token; without it one is looked for."),
    ] = None,
    add_tokens: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --from: new tokens, one a line; MODEL may have canvases already."),
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="The same as DIR.")] = None,
    seed: options.SeedOfData = 0,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="float32 (the default) or bfloat16; with --from that of the model."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="A directory or hub id; its tokenizer is copied, a preset has its tokens."),
    ] = None,
) -> None:
    """Write a model in Hub layout: with random weights, a denoiser made of a causal model (`--from`), or a drafter."""
    if dtype not in (None, "float32", "bfloat16"):
        raise typer.BadParameter(f"{dtype!r} is neither float32 nor bfloat16", param_hint="--dtype")
    if directory is None and output is None and preset is not None:
        directory, preset = Path(preset), None
    directory = directory or output
    if directory is None or [preset, source, drafter_for].count(None) != 2:
        usage = "give PRESET DIR, --from MODEL DIR, or --drafter-for MODEL --output DIR"
        raise typer.BadParameter(usage, param_hint="PRESET DIR")
    of_canvases = {"--canvas-length": canvas_length, "--prefix": prefix}
    canvas_options = [name for name, value in of_canvases.items() if value is not None]
    if source is None and canvas_options:
        raise typer.BadParameter("a preset has its own; only --from takes another", param_hint=canvas_options[0])
    of_drafter = {"--layers": layers, "--block": block, "--mask-token": mask_token}
    if drafter_for is None and (drafter_options := [name for name, value in of_drafter.items() if value is not None]):
        raise typer.BadParameter("only --drafter-for takes it", param_hint=drafter_options[0])
    layers, block = layers or 5, block or 16
    if source is None and add_tokens is not None:
        raise typer.BadParameter("it adds to the tokens of a model; name it with --from", param_hint="--add-tokens")
    new_tokens = (options.read_text(add_tokens) or "").splitlines()
    if (directory / "config.json").exists():
        raise CheckpointError(f"{directory}: holds a checkpoint already; name another directory or remove it")
    from blockdiff import checkpoint
    from blockdiff.checkpoint.opening import require_as_written
    from blockdiff.checkpoint.tokenizer import load_tokenizer
    from blockdiff.terminal import counted, say_out

    loaded = load_tokenizer(tokenizer) if tokenizer is not None else None
    if add_tokens is not None:
        loaded = loaded or load_tokenizer(str(source))
        checkpoint.add_tokens(loaded, new_tokens)
    origin = preset
    if drafter_for is not None:
        model = checkpoint.drafter_for(drafter_for, layers, block, seed, dtype or "float32", mask_token)
        origin = f"a drafter of {counted(layers, 'layer')} and blocks of {block} tokens for {drafter_for}"
    elif source is not None:
        require_as_written(source)
        config = checkpoint.read_config(source)
        if add_tokens is not None and config.denoises:
            if canvas_options:
                raise typer.BadParameter(f"{source} has canvases already; leave it out", param_hint=canvas_options[0])
            model, origin = checkpoint.load(source, dtype or "auto"), f"from {source}"
        else:
            model = checkpoint.convert(source, canvas_length or 256, seed, dtype or "auto", prefix=prefix or "causal")
            origin = f"from {source}, canvases of {canvas_length or 256} tokens"
            origin += "" if model.config.block is None else ", a prefix of blocks"
        if add_tokens is not None:
            model = checkpoint.with_rows_for(model, loaded)
            origin += f", {counted(len(new_tokens), 'new token')}"
    else:
        model = checkpoint.init(str(preset), seed, loaded, dtype or "float32")
    checkpoint.save(model, directory, tokenizer=loaded)
    count = sum(parameter.numel() for parameter in model.parameters())
    written = str(model.dtype).removeprefix("torch.")
    say_out(f"{directory}: {origin}, {count:,} parameters, {written}, seed {seed}")
    if loaded is None and drafter_for is None and not (directory / "tokenizer_config.json").exists():
        say_out("no tokenizer in it; give one with --tokenizer DIR before sampling")
