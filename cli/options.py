"""Options that several commands have, and what they do before the work begins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockdiff.errors import BlockdiffError
from blockdiff.files import matching

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint directory or a hub id.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change a key of the recipe (YAML value).")
]
Columns = Annotated[
    str | None,
    typer.Option(metavar="ROLE=COLUMN,...", help="Columns of other names: prompt=question,response=answer."),
]
Subset = Annotated[str | None, typer.Option(help="Configuration of a hub data set.")]
Split = Annotated[str, typer.Option(help="Of a hub data set or a directory.")]
MaxSteps = Annotated[int | None, typer.Option("--steps", min=1, help="At most so many denoising steps per canvas.")]
MAX_SEED = 2**64 - 1
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the draws.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace files that are there already.")]
AllowControlTokens = Annotated[
    bool, typer.Option("--allow-control-tokens", help="Read control tokens that prompts spell (<turn|>) as tokens.")
]
BatchSize = Annotated[int, typer.Option(min=1, help="Requests that run together.")]
Adapter = Annotated[str | None, typer.Option(metavar="DIR", help="An adapter of the model, in PEFT's format.")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16, float16 or float64.")]
Quantize = Annotated[
    str | None,
    typer.Option(
        metavar="fp8|fp8-dynamic|none",
        help="Round weights to fp8, also the inputs of their products, or undo it (default: as stored).",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")]


def _explained(value: str | None) -> str | None:
    if value == "help":
        from blockdiff.sampling.strategies import strategies_table

        typer.echo(strategies_table())
        raise typer.Exit
    return value


Strategy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:KEY=VALUE,...]",
        help="How canvases are denoised (default: as the released model's); `help` lists the names.",
        callback=_explained,
        is_eager=True,
    ),
]
Kernels = Annotated[str, typer.Option(help="auto, triton or torch.")]
TensorParallel = Annotated[
    int, typer.Option(min=1, metavar="N", help="Run the model over so many processes, which are started.")
]

Template = Annotated[str | None, typer.Option(help="The response's form: <?N> is a hole of N tokens, <?? is <?.")]
Regex = Annotated[str | None, typer.Option(help="What the whole response must match.")]
JsonSchema = Annotated[Path | None, typer.Option(metavar="FILE", help="A JSON schema that the response must satisfy.")]
Draft = Annotated[str | None, typer.Option(help="A response to start from, noised to --noise.")]
Noise = Annotated[float | None, typer.Option(min=0, max=1, help="Share of the draft that is noise (default 0.5).")]
Banned = Annotated[list[str] | None, typer.Option(help="A text that must not occur (may be repeated).")]
RepetitionPenalty = Annotated[float, typer.Option(help="More than 1: tokens seen before are less likely.")]


def parse_columns(text: str | None) -> dict[str, str]:
    """`prompt=question,response=answer` as a dict; typer.BadParameter says what is wrong with it."""
    columns: dict[str, str] = {}
    for entry in (text or "").split(","):
        if not entry.strip():
            continue
        role, _, column = (part.strip() for part in entry.partition("="))
        if not role or not column:
            raise typer.BadParameter(f"{entry.strip()!r} is not ROLE=COLUMN", param_hint="--columns")
        if role in columns:
            raise typer.BadParameter(f"{role} appears twice", param_hint="--columns")
        columns[role] = column
    return columns


def require_free(path: Path | None, *inputs: str | Path | None, overwrite: bool = False) -> None:
    """Raises BlockdiffError for a file to write that is one of the inputs or lies in a directory that is, for one
    that is there unless `overwrite`, and for a directory.

    inputs: what the command reads, as the user named it: paths, patterns, or names of the Hub.
    """
    if path is not None and path.is_dir():
        raise BlockdiffError(f"{path}: is a directory; name a file in it")
    if path is None or not path.is_file():  # /dev/stdout or a pipe can always be written to
        return
    for found in (each for name in inputs if name is not None for each in matching(name)):
        if found.resolve() in (path.resolve(), path.resolve().parent):
            raise BlockdiffError(f"{path}: is read by this command, so it is not written; choose another file")
    if not overwrite:
        raise BlockdiffError(f"{path}: is there already; choose another place, or replace it with --overwrite")


def make_parent(path: Path | None) -> None:
    """Make the directory that a file is to be written into, before any work is done for it."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BlockdiffError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def read_text(path: Path | None) -> str | None:
    """A file's text, None for no file; BlockdiffError where it cannot be read."""
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BlockdiffError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8'})") from None
