"""`blockdiff eval`: how well and how fast a model solves a task."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli.columns import HELP, parse_columns
from blockdiff.evals import TASKS
from blockdiff.evals import task as find_task


def evaluate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint directory or a hub id.")],
    task: Annotated[str, typer.Option(help=f"What is right: {', '.join(TASKS)}.")],
    data: Annotated[str, typer.Option(help="Rows of the task: a file, a directory, a pattern or a hub id.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON to write the numbers to.")] = None,
    columns: Annotated[str | None, typer.Option(metavar="ROLE=COLUMN,...", help=HELP)] = None,
    subset: Annotated[str | None, typer.Option(help="Configuration of a hub data set.")] = None,
    split: Annotated[str, typer.Option(help="Of a hub data set or a directory.")] = "test",
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are the user's turn of a chat, not raw text.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Most denoising steps per canvas.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a response (default: what the task's responses need).")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows that run together.")] = 100,
    dtype: Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16, float16 or float64.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1.")] = "auto",
    kernels: Annotated[str, typer.Option(help="auto, triton or torch.")] = "auto",
) -> None:
    """Answer a task's rows: accuracy and denoising steps per canvas together.

    Both, because a fine-tune can win one and lose the other.
    """
    if task not in TASKS:
        raise typer.BadParameter(f"{task!r} is none of {', '.join(TASKS)}", param_hint="--task")
    from blockdiff.cli.loading import load_sampler, make_parent
    from blockdiff.data.sources import Source, rows_of
    from blockdiff.evals import run

    source = Source(data, subset=subset, split=split, columns=parse_columns(columns))
    rows = [row.as_conversation() if chat else row for row in islice(rows_of(source), limit)]
    kind = find_task(task)
    run.ask(rows, kind)  # refused now rather than after the weights are read
    make_parent(output)
    sampler = load_sampler(model, dtype, device, kernels)
    most = steps or sampler.generation.max_steps
    numbers = run.evaluate(
        sampler, rows, kind, batch_size=batch_size, seed=seed, max_steps=steps, max_new_tokens=max_new_tokens
    )
    if output is not None:
        settings = {"model": model, "data": data, "max_steps": most}
        output.write_text(json.dumps({**settings, **numbers}, indent=1) + "\n", encoding="utf-8")
    per_second = numbers["count"] / max(numbers["seconds"], 1e-9)
    print(f"solved            {numbers['solved']} of {numbers['count']} ({numbers['solved_share']:.1%})")
    print(f"steps per canvas  {numbers['steps_per_canvas']:.2f} (at most {most})")
    print(f"tokens per step   {numbers['tokens_per_forward']:.2f}")
    print(f"time              {numbers['seconds']:.1f} s, {per_second:.1f} rows/s, {batch_size} at a time")
    if numbers["errors"]:
        print(f"not answered      {numbers['errors']}")
