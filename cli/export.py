"""`blockdiff export`: a run or an adapter as a checkpoint of its own, or as an adapter for PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli import options
from blockdiff.cli.model import at_checkpoint
from blockdiff.terminal import say_out


def export(
    source: Annotated[
        str, typer.Argument(metavar="RUN|MODEL", help="A run, its checkpoints/step-N, a checkpoint or a hub id.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The directory to write; must not be there yet.")
    ],
    checkpoint: options.Checkpoint = None,
    adapter: options.Adapter = None,
    peft: Annotated[
        bool, typer.Option("--peft", metavar="", help="Write the adapter alone, in PEFT's format.")
    ] = False,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="With --peft: the model that the adapter names.")
    ] = None,
    merge_into: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Merge the adapter into these weights, which its own were rounded from."),
    ] = None,
    canvas_length: Annotated[
        int | None,
        typer.Option("--canvas-length", metavar="N", min=1, help="Tokens of a canvas, if config.json has no number."),
    ] = None,
    dtype: options.Dtype = "auto",
    quantize: options.Quantize = None,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Then upload it to the Hub; a new repository is private.")
    ] = None,
) -> None:
    """Write a run, or a model with an adapter, as one checkpoint in Hub layout (config.json and safetensors)."""
    if base is not None and not peft:
        raise typer.BadParameter("only an adapter names its model; give --peft too", param_hint="--base")
    if peft and quantize is not None:
        raise typer.BadParameter("adapters are never in fewer bits; leave one of the two out", param_hint="--quantize")
    if peft and merge_into is not None:
        raise typer.BadParameter("--peft merges nothing; leave one of the two out", param_hint="--merge-into")
    arguments = {"peft": peft, "base": base, "dtype": dtype, "quantize": quantize, "merge_into": merge_into}
    if push is not None:
        from blockdiff.checkpoint.push import require_hub_id

        require_hub_id(push)
    source = at_checkpoint(source, checkpoint)
    if (Path(source) / "trainer.json").is_file() and adapter is None:
        from blockdiff.training.export import consolidate

        if canvas_length is not None:
            raise typer.BadParameter("a run knows it; leave it out", param_hint="--canvas-length")
        written = consolidate(Path(source), output, **arguments)
    else:
        from blockdiff.checkpoint import export as export_model

        written = export_model(source, output, adapter, canvas_length=canvas_length, **arguments)
    what = "the adapter, in PEFT's format" if peft else "a checkpoint"
    say_out(f"{written}: {what}, {sum(file.stat().st_size for file in written.iterdir()):,} bytes")
    if push is not None:
        from blockdiff.checkpoint.push import push as upload

        say_out(f"uploaded to {upload(written, push)}")
