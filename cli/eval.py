"""`blockdiff eval`: how well and how fast a model solves a task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TASKS = ("sudoku",)


def evaluate(
    model: Annotated[str, typer.Argument(help="A checkpoint directory or a hub id.")],
    task: Annotated[str, typer.Option(help="The task: sudoku.")],
    data: Annotated[Path, typer.Option(help="Rows of the task, such as data/sudoku4/test.jsonl.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSON to write the numbers to.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Most denoising steps per canvas.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that run together.")] = 100,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32 or bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    kernels: Annotated[str, typer.Option(help="auto, triton or torch.")] = "auto",
) -> None:
    """Accuracy and denoising steps per canvas, together: a fine-tune can win one and lose the other."""
    raise NotImplementedError
