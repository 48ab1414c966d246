"""`blockdiff eval`: how well and how fast a model solves a task."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from blockdiff.cli import options
from blockdiff.errors import RequestError
from blockdiff.evals import TASKS
from blockdiff.evals import task as find_task
from blockdiff.terminal import shown


def evaluate(
    model: options.Model,
    task: Annotated[str, typer.Option(help=f"What is right: {', '.join(TASKS)}.")],
    data: Annotated[str, typer.Option(help="Rows of the task: a file, a directory, a pattern or a hub id.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON to write the numbers to.")] = None,
    overwrite: options.Overwrite = False,
    columns: options.Columns = None,
    subset: options.Subset = None,
    split: options.Split = "test",
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are the user's turn of a chat, not raw text.")] = False,
    seed: options.Seed = 0,
    steps: options.MaxSteps = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of a response (default: what the task's responses need).")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N rows.")] = None,
    batch_size: options.BatchSize = 100,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    kernels: options.Kernels = "auto",
) -> None:
    """Answer a task's rows: accuracy and denoising steps per canvas together.

    Both, because a fine-tune can win one and lose the other.
    """
    if task not in TASKS:
        raise typer.BadParameter(f"{task!r} is none of {', '.join(TASKS)}", param_hint="--task")
    from blockdiff.data.sources import Source, rows_of
    from blockdiff.evals import run
    from blockdiff.sampling import Sampler
    from blockdiff.terminal import quiet

    source = Source(data, subset=subset, split=split, columns=options.parse_columns(columns))
    rows = [row.as_conversation() if chat else row for row in islice(rows_of(source), limit)]
    found = find_task(task)
    run.questions_of(rows, found)  # refused now rather than after the weights are read
    options.require_free(output, model, data, overwrite=overwrite)
    options.make_parent(output)
    quiet()
    sampler = Sampler.from_pretrained(model, dtype=dtype, device=device, kernels=kernels)
    max_steps = steps or sampler.generation.max_steps
    numbers = run.evaluate(
        sampler, rows, found, batch_size=batch_size, seed=seed, max_steps=steps, max_new_tokens=max_new_tokens
    )
    failed = [record["error"] for record in numbers["records"] if "error" in record]
    if len(failed) == numbers["count"]:
        raise RequestError(f"no row could be answered: {failed[0]}")
    if output is not None:
        settings = {"model": model, "data": data, "max_steps": max_steps}
        output.write_text(json.dumps({**settings, **numbers}, indent=1) + "\n", encoding="utf-8")
    per_second = numbers["count"] / max(numbers["seconds"], 1e-9)
    print(f"solved            {numbers['solved']} of {numbers['count']} ({numbers['solved_share']:.1%})")
    print(f"steps per canvas  {numbers['steps_per_canvas']:.2f} (at most {max_steps})")
    print(f"tokens per step   {numbers['tokens_per_forward']:.2f}")
    print(f"time              {numbers['seconds']:.1f} s, {per_second:.1f} rows/s, {batch_size} at a time")
    if failed:
        print(f"not answered      {len(failed)}, the first because {shown(failed[0], sys.stdout)}")
