"""`blockdiff eval`: how well and how fast a model solves a task, alone or beside another model."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockdiff.cli import options
from blockdiff.errors import RequestError
from blockdiff.evals import TASKS
from blockdiff.evals import task as find_task
from blockdiff.terminal import shown

if TYPE_CHECKING:
    from blockdiff.data.rows import Row


def evaluate(
    model: options.Model,
    task: Annotated[str, typer.Option(help=f"What is right: {', '.join(TASKS)}.")],
    data: Annotated[str, typer.Option(help="Rows of the task: a file, a directory, a pattern or a hub id.")],
    compare: Annotated[
        str | None, typer.Option(metavar="OTHER", help="A second model: both on the same rows, with a paired test.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="JSON to write the numbers to.")] = None,
    overwrite: options.Overwrite = False,
    columns: options.Columns = None,
    subset: options.Subset = None,
    split: options.Split = "test",
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are the user's turn of a chat, not raw text.")] = False,
    thinking: Annotated[bool, typer.Option("--thinking", help="Ask for reasoning; only the answer counts.")] = False,
    best_of: Annotated[int, typer.Option(min=1, help="Draw so many answers a row; the best by its score counts.")] = 1,
    seed: options.Seed = 0,
    steps: options.MaxSteps = None,
    strategy: options.Strategy = None,
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
    from blockdiff.evals import compare as pairs
    from blockdiff.evals import summary
    from blockdiff.evals.questions import questions_of
    from blockdiff.evals.run import evaluate as answer
    from blockdiff.evals.settings import settings_of
    from blockdiff.sampling import Sampler
    from blockdiff.terminal import quiet

    source = Source(data, subset=subset, split=split, columns=options.parse_columns(columns))
    rows = [row.as_conversation() if chat else row for row in islice(rows_of(source), limit)]
    found = find_task(task)
    questions_of(rows, found)  # refused now rather than after the weights are read
    if thinking:
        _require_conversations(rows)
    options.require_free(output, model, compare, data, overwrite=overwrite)
    options.make_parent(output)
    quiet()

    def report_of(path: str) -> dict[str, Any]:
        """The report of one model, whose weights are gone afterwards."""
        sampler = Sampler.from_pretrained(path, dtype=dtype, device=device, kernels=kernels, strategy=strategy)
        numbers = answer(
            sampler,
            rows,
            found,
            batch_size=batch_size,
            seed=seed,
            max_steps=steps,
            max_new_tokens=max_new_tokens,
            thinking=thinking,
            best_of=best_of,
        )
        failed = [record["error"] for record in numbers["records"] if "error" in record]
        if len(failed) == numbers["count"]:
            raise RequestError(f"{path}: no row could be answered: {failed[0]}")
        return {"model": path, "data": data, "settings": settings_of(sampler), **numbers}

    reports = [report_of(path) for path in ([model] if compare is None else [model, compare])]
    for report in reports:
        if compare is not None:
            print(f"\n{report['model']}" if report is not reports[0] else report["model"])
        print("\n".join(summary.lines(report)))
        failed = [record["error"] for record in report["records"] if "error" in record]
        if failed:
            print(f"not answered      {len(failed)}, the first because {shown(failed[0], sys.stdout)}")
    written = reports[0]
    if compare is not None:
        comparison = pairs.compare(reports[0], reports[1])
        print("\n" + "\n".join(pairs.lines(reports[0], reports[1], comparison)))
        records = comparison.pop("records")
        alone = [{name: value for name, value in report.items() if name != "records"} for report in reports]
        written = {"task": task, "data": data, "models": alone, "comparison": comparison, "records": records}
    if output is not None:
        output.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def _require_conversations(rows: list[Row]) -> None:
    raw = next((row for row in rows if row.messages is None), None)
    if raw is not None:
        raise typer.BadParameter(
            f"{raw.where} is a prompt in raw text, which has no place for it; give --chat as well",
            param_hint="--thinking",
        )
